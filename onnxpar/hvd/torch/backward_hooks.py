"""Finds out when a backward pass of PyTorch begins and ends, by hooks."""

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
    """One backward pass. The autograd engine holds the only reference until the pass ends, also by
    an exception: a dead weak reference to it means that the pass failed."""


class Passes(ABC):
    """Calls `begin_pass` when the first hook of a backward pass runs, and `end_pass` after the
    pass, unless an exception has ended it."""

    _run: weakref.ref[_Run] | None = None

    @abstractmethod
    def has_gradient(self, name: str) -> None:
        """Called after a backward pass has added to the gradient of a watched parameter."""

    @abstractmethod
    def begin_pass(self) -> None: ...

    @abstractmethod
    def end_pass(self) -> None: ...

    def watch(self, named: Named) -> None:
        """Calls `has_gradient` when a backward pass adds to the gradient of one of these
        parameters, as long as this object exists."""
        hooks = [
            parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), name))
            for name, parameter in named.items()
        ]
        weakref.finalize(self, _remove, hooks)

    def enter(self, _: Any = None) -> None:
        """Called in each hook: begins the pass if this hook is the first one of a pass."""
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
        """Called by the autograd engine after the pass."""
        self._run = None
        with torch.no_grad():
            self.end_pass()


def _hook(passes: weakref.ref[Passes], name: str) -> Callable[[Any], None]:
    """Returns a hook that calls `has_gradient(name)` on the object, if it still exists."""

    def ready(_: Any) -> None:
        owner = passes()
        if owner is not None:
            owner.has_gradient(name)

    return ready


def _remove(hooks: Iterable[Any]) -> None:
    for hook in hooks:
        hook.remove()
