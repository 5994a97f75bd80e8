"""Finds the begin and the end of a backward pass of PyTorch."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

Named = Mapping[str, Any]
"""Parameters by name."""


class _Run:
    """One backward pass. The engine keeps it until the pass ends, even by an exception."""


class Passes(ABC):
    """Acts when the first hook runs in a backward pass, and after the pass unless it ends by an
    exception."""

    _run: weakref.ref[_Run] | None = None

    @abstractmethod
    def has_gradient(self, name: str) -> None:
        """Called after a backward pass has added to the gradient of a watched parameter."""

    @abstractmethod
    def begin_pass(self) -> None: ...

    @abstractmethod
    def end_pass(self) -> None: ...

    def watch(self, named: Named) -> None:
        """Calls `has_gradient` for these parameters, as long as this object exists."""
        hooks = [
            parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), name))
            for name, parameter in named.items()
        ]
        weakref.finalize(self, _remove, hooks)

    def enter(self, _: Any = None) -> None:
        """Records that a hook runs."""
        if self._run is not None and self._run() is not None:
            return
        self.begin_pass()
        run = _Run()
        self._run = weakref.ref(run)
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._finish, run))

    @property
    def has_failed(self) -> bool:
        """True if the latest pass has ended by an exception."""
        return self._run is not None and self._run() is None

    def _finish(self, _: _Run) -> None:
        self._run = None
        with torch.no_grad():
            self.end_pass()


def _hook(passes: weakref.ref[Passes], name: str) -> Callable[[Any], None]:
    def ready(_: Any) -> None:
        owner = passes()
        if owner is not None:
            owner.has_gradient(name)

    return ready


def _remove(hooks: Iterable[Any]) -> None:
    for hook in hooks:
        hook.remove()
