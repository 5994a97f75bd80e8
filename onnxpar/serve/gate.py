"""Admits requests up to a limit, and stops them when the server ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from onnxpar.serve.api_error import ApiError

RETRY = {"Retry-After": "1"}
"""The header that tells clients after how many seconds to try again."""


class Visit:
    """A request in progress. `why` is the reason for which it was stopped before its end, or
    None."""

    def __init__(self) -> None:
        self.why: str | None = None
        self._loop = asyncio.get_running_loop()
        self._scope: anyio.CancelScope | None = None

    def enter(self, scope: anyio.CancelScope) -> None:
        """Sets the scope (of anyio) that `stop` cancels, and in which the request is answered."""
        self._scope = scope
        if self.why is not None:
            scope.cancel()

    def stop(self, why: str) -> None:
        """Stops the request for the reason `why`. Call it in the event loop."""
        self.why = self.why or why
        if self._scope is not None:
            self._scope.cancel()

    def stop_soon(self, why: str) -> None:
        """Stops the request for the reason `why`. Call it from any thread."""
        self._loop.call_soon_threadsafe(self.stop, why)


class Gate:
    """Admits at most `most` requests at once, and none after `close`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._visits: set[Visit] = set()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._is_closed

    @contextmanager
    def visit(self) -> Iterator[Visit]:
        """Admits a request for the duration of the `with` block, and yields its Visit. Errors:
        ApiError if there are too many requests, or the server is about to end."""
        visit = Visit()
        with self._changed:
            if self._is_closed:
                raise ending()
            if len(self._visits) >= self._most:
                text = f"{self._most} requests are being answered; try again later"
                raise ApiError(text, 429, code="too_many_requests", headers=RETRY)
            self._visits.add(visit)
        try:
            yield visit
        finally:
            with self._changed:
                self._visits.remove(visit)
                self._changed.notify_all()

    def close(self) -> None:
        """Refuses requests from now on."""
        self._is_closed = True

    def wait(self, seconds: float) -> bool:
        """Waits until all requests have ended, at most `seconds`; returns False if some still
        run."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._visits, seconds)

    def stop(self, why: str) -> None:
        """Stops the requests that still run, for the reason `why`."""
        with self._changed:
            for visit in self._visits:
                visit.stop_soon(why)


def ending() -> ApiError:
    """Returns the error for requests to a server that is about to end."""
    return ApiError("the server ends; try again later", 503, code="draining", headers=RETRY)
