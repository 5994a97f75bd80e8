"""Handles of collectives that run in the background."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Waiting(Protocol[T_co]):
    """The methods of a future that a handle needs: `result` waits, `done` does not."""

    def result(self) -> T_co: ...
    def done(self) -> bool: ...


class Handle(Generic[T]):
    """A collective that was started. Calling a handle waits for its result, like `synchronize`."""

    def __init__(self, future: Waiting[T]) -> None:
        self._future = future

    def __call__(self) -> T:
        return self._future.result()

    def done(self) -> bool:
        """Returns True if the result, or an error, is ready."""
        return self._future.done()


class Together(Generic[T]):
    """Several futures as one future; `finish` computes its result from the list of their
    results."""

    def __init__(self, futures: Sequence[Future[Any]], finish: Callable[[list[Any]], T]) -> None:
        self._futures = futures
        self._finish = finish

    def result(self) -> T:
        return self._finish([future.result() for future in self._futures])

    def done(self) -> bool:
        return all(future.done() for future in self._futures)


def synchronize(handle: Handle[T]) -> T:
    """Waits for a collective that was started, and returns its result. Raises the error of the
    collective if it failed."""
    return handle()


def poll(handle: Handle[T]) -> bool:
    """Returns True if the collective has ended: `synchronize` would return, or raise,
    immediately."""
    return handle.done()
