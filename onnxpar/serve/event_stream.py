"""Sends answers as server-sent events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.types import Message, Send

from onnxpar.serve.api_error import ApiError, json_bytes

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx must not hold events back
)


class EventStream:
    """A response that sends events one by one. `has_begun` is True once bytes are sent, so that an
    error can no longer be a response of its own."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def raw(self, message: Message) -> None:
        """Sends an ASGI message of another response, in place of events."""
        self.has_begun = True
        await self._send(message)

    async def send(self, event: Mapping[str, Any]) -> None:
        """Sends an event, as JSON; the first one begins the response."""
        await self._send_lines(b"data: " + json_bytes(event))

    async def end(self) -> None:
        """Sends the event that ends OpenAI's streams, "[DONE]", and ends the response."""
        await self._send_lines(b"data: [DONE]")
        await self._close()

    async def fail(self, error: ApiError) -> None:
        """Sends an error in place of the events that are missing, and ends the response."""
        await self.send(error.body())
        await self.end()

    async def _send_lines(self, lines: bytes) -> None:
        """Sends the lines of an event, after the head of the response if it has not begun."""
        if not self.has_begun:
            await self.raw(
                {"type": "http.response.start", "status": 200, "headers": list(_HEADERS)}
            )
        event = {"type": "http.response.body", "body": lines + b"\n\n", "more_body": True}
        await self._send(event)

    async def _close(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})


class NumberedEventStream(EventStream):
    """Events with names and numbers, as clients of /v1/responses expect them."""

    def __init__(self, send: Send) -> None:
        super().__init__(send)
        self._number = 0

    async def send(self, event: Mapping[str, Any]) -> None:
        """Sends an event, as JSON with its number; its member `type` is its name."""
        data = json_bytes({**event, "sequence_number": self._number})
        self._number += 1
        await self._send_lines(b"event: " + event["type"].encode() + b"\ndata: " + data)

    async def end(self) -> None:
        """Ends the response; the format's last event has said that it ends."""
        await self._close()

    async def fail(self, error: ApiError) -> None:
        """Sends an error in place of the events that are missing, and ends the response. Some
        clients read the event's own members, others the error object in it."""
        event = {"type": "error", "code": error.code, "message": str(error), "param": error.param}
        await self.send({**event, **error.body()})
        await self.end()
