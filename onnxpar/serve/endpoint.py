"""The base of all endpoints that run work. It limits the time of a request, and stops it if its
client goes away or the server ends."""

from __future__ import annotations

from abc import ABC, abstractmethod

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from onnxpar.serve.api_error import ApiError
from onnxpar.serve.event_stream import EventStream
from onnxpar.serve.gate import Visit, ending
from onnxpar.serve.service import Service

GONE = "gone"
"""The reason for stopping a request whose client has closed the connection."""
ENDING = "ending"
"""The reason for stopping a request that outlasts the server."""


class Visiting(ABC):
    """The endpoint of a route, as an ASGI application.

    service  the shared state of the server
    stream   the class that sends events
    """

    def __init__(self, service: Service, stream: type[EventStream] = EventStream) -> None:
        self._shared, self._stream = service, stream

    @abstractmethod
    async def _answer(
        self, body: bytes, scope: Scope, receive: Receive, stream: EventStream
    ) -> None:
        """Reads a request from `body`, and sends the answer. Errors: ApiError for a request that
        cannot be answered."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request. Errors: ApiError, if the response has not begun; later errors become
        an event."""
        stream = self._stream(send)
        with self._shared.gate.visit() as visit:
            error = await self._visit(visit, scope, receive, stream)
        if error is None:
            return
        if not stream.has_begun:
            raise error
        await stream.fail(error)

    async def _visit(
        self, visit: Visit, scope: Scope, receive: Receive, stream: EventStream
    ) -> ApiError | None:
        """Answers a request within the time limit, and as long as its client waits. Returns the
        error to send to the client; None if all went well, or the client is gone."""
        error: ApiError | None = None
        is_done = False
        async with anyio.create_task_group() as group:
            visit.enter(group.cancel_scope)
            seconds = self._shared.settings.request_timeout
            group.cancel_scope.deadline = anyio.current_time() + seconds
            try:
                body = await _read(Request(scope, receive), self._shared.settings.max_body)
                group.start_soon(_watch, receive, visit)
                await self._answer(body, scope, receive, stream)
            except ClientDisconnect:
                visit.stop(GONE)
            except ApiError as found:
                error = found
            is_done = True
            group.cancel_scope.cancel()
        if is_done or visit.why == GONE:
            return error
        if visit.why == ENDING:
            return ending()
        text = f"the request has taken more than {seconds:g} s, which is the limit of the server"
        return ApiError(text, 504, code="timeout")


async def _read(request: Request, most: int) -> bytes:
    """Returns the body of a request. Errors: ApiError if it has more than `most` bytes;
    ClientDisconnect if the client goes away."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise ApiError(f"the request is larger than {most} bytes", 413, code="too_large")
    return bytes(body)


async def _watch(receive: Receive, visit: Visit) -> None:
    """Waits until the client closes the connection, and then stops the request."""
    while (await receive())["type"] != "http.disconnect":
        pass
    visit.stop(GONE)
