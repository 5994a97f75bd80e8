"""Sends server-sent events."""

from __future__ import annotations

from starlette.types import Message, Send

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx must not hold events back
)


class EventStream:
    """A response whose events are sent as they come.

    has_begun  True once anything was sent
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def raw(self, message: Message) -> None:
        """Sends a message of another response in place of events."""
        self.has_begun = True
        await self._send(message)

    async def send(self, data: bytes) -> None:
        """Sends an event."""
        if not self.has_begun:
            await self.raw(
                {"type": "http.response.start", "status": 200, "headers": list(_HEADERS)}
            )
        event = b"data: " + data + b"\n\n"
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def end(self) -> None:
        """Sends the event that ends OpenAI's streams."""
        await self.send(b"[DONE]")
        await self._send({"type": "http.response.body", "body": b""})
