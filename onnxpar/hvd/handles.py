"""Handles of collectives that run in the background."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class Handle(Generic[T]):
    """A collective that was started. Calling a handle waits for its result, like `synchronize`."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def __call__(self) -> T:
        return self._future.result()

    def done(self) -> bool:
        """Returns True if the result, or an error, is ready."""
        return self._future.done()


def synchronize(handle: Handle[T]) -> T:
    """Waits for a collective that was started, and returns its result. Errors: those of the
    collective."""
    return handle()


def poll(handle: Handle[T]) -> bool:
    """Returns True if `synchronize` would return, or raise, immediately."""
    return handle.done()
