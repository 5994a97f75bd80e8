"""Where a backward pass of PyTorch begins and ends."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import torch


class _Run:
    """One backward pass. The engine keeps it until the pass ends, by an exception, too."""


class Passes(ABC):
    """Does something when hooks first run in a backward pass, and after the pass if it has not
    ended by an exception."""

    _run: weakref.ref[_Run] | None = None

    @abstractmethod
    def begin_pass(self) -> None: ...

    @abstractmethod
    def end_pass(self) -> None: ...

    def enter(self, _: Any = None) -> None:
        """Tells that a hook runs."""
        if self._run is not None and self._run() is not None:
            return
        run = _Run()
        self._run = weakref.ref(run)
        self.begin_pass()
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._finish, run))

    @property
    def has_failed(self) -> bool:
        """True if the latest pass has ended by an exception."""
        return self._run is not None and self._run() is None

    def _finish(self, _: _Run) -> None:
        self._run = None
        with torch.no_grad():
            self.end_pass()
