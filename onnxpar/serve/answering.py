"""Answers a request: reads it, lets the engine generate, and writes what comes."""

from __future__ import annotations

from collections.abc import Callable

import anyio
from anyio.to_thread import run_sync
from starlette.types import Receive, Scope, Send

from onnxpar.serve.answers import Answers
from onnxpar.serve.api_error import ApiError, json_bytes, json_response
from onnxpar.serve.body import Fields, Gone, fields_of, read_body
from onnxpar.serve.event_stream import EventStream
from onnxpar.serve.formats import Format
from onnxpar.serve.gate import Visit, ending
from onnxpar.serve.prompts import Prepared, prepare
from onnxpar.serve.service import Service
from onnxpar.serve.settings import Settings
from onnxpar.serve.wanted import Wanted

GONE = "gone"
"""Why a request is stopped whose client has closed the connection."""
ENDING = "ending"
"""Why a request is stopped that outlasts the end of the server."""


class Answering:
    """The endpoint of a route that generates, as an ASGI application.

    read  what a request wants, of its fields
    form  how answers are written
    """

    def __init__(
        self, service: Service, read: Callable[[Fields, Settings], Wanted], form: type[Format]
    ) -> None:
        self._service, self._read, self._form = service, read, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request. Errors: ApiError, before the answer has begun."""
        stream = EventStream(send)
        with self._service.gate.visit() as visit:
            error = await self._visit(visit, scope, receive, stream)
        if error is None:
            return
        if not stream.has_begun:
            raise error
        await stream.send(json_bytes(error.body()))
        await stream.end()

    async def _visit(
        self, visit: Visit, scope: Scope, receive: Receive, stream: EventStream
    ) -> ApiError | None:
        """Answers a request, within its time and while its client is there; returns the error, if
        there is one to tell."""
        error: ApiError | None = None
        is_done = False
        async with anyio.create_task_group() as group:
            visit.enter(group.cancel_scope)
            seconds = self._service.settings.request_timeout
            group.cancel_scope.deadline = anyio.current_time() + seconds
            try:
                body = await read_body(receive, self._service.settings.max_body)
                group.start_soon(_watch, receive, visit)
                await self._answer(body, scope, receive, stream)
            except Gone:
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

    async def _answer(
        self, body: bytes, scope: Scope, receive: Receive, stream: EventStream
    ) -> None:
        """Answers a request that has been read."""
        wanted, prepared = await run_sync(self._prepared, body)
        form = self._form(
            self._service.settings.model_name,
            wanted,
            self._service.grammars.bytes_of,
            prepared.echoes,
        )
        with Answers(self._service, wanted, prepared) as answers:
            if wanted.is_stream:
                await _stream(answers, form, wanted, stream)
                return
            async for piece in answers.pieces():
                form.add(piece)
        await json_response(form.whole(answers.usage))(scope, receive, stream.raw)

    def _prepared(self, body: bytes) -> tuple[Wanted, Prepared]:
        """What a request wants, and its tokens; in a thread, as it may take a while."""
        wanted = self._read(fields_of(body), self._service.settings)
        return wanted, prepare(self._service, wanted)


async def _stream(answers: Answers, form: Format, wanted: Wanted, stream: EventStream) -> None:
    """Sends answers as they come. The first event decides whether the request fails at once."""
    async for piece in answers.pieces():
        if not stream.has_begun:
            for chunk in form.begin():
                await stream.send(json_bytes(chunk))
        for chunk in form.chunks(piece):
            await stream.send(json_bytes(chunk))
    if wanted.wants_usage:
        await stream.send(json_bytes(form.usage(answers.usage)))
    await stream.end()


async def _watch(receive: Receive, visit: Visit) -> None:
    """Stops a request when its client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    visit.stop(GONE)
