"""Answers a request: reads it, lets the engine generate, and writes what comes."""

from __future__ import annotations

from collections.abc import Callable

from anyio.to_thread import run_sync
from starlette.types import Receive, Scope

from onnxpar.serve.answers import Answers
from onnxpar.serve.api_error import json_response
from onnxpar.serve.body import Fields, fields_of
from onnxpar.serve.event_stream import EventStream
from onnxpar.serve.formats import Format
from onnxpar.serve.prompts import Prepared, prepare
from onnxpar.serve.service import GeneratingService
from onnxpar.serve.settings import Settings
from onnxpar.serve.visiting import Visiting
from onnxpar.serve.wanted import Wanted


class Answering(Visiting):
    """The endpoint of a route that generates.

    read    what a request wants, of its fields
    form    how answers are written
    stream  how events are sent
    """

    def __init__(
        self,
        service: GeneratingService,
        read: Callable[[Fields, Settings], Wanted],
        form: Callable[[str, Wanted, Callable[[int], bytes], int], Format],
        stream: type[EventStream] = EventStream,
    ) -> None:
        super().__init__(service, stream)
        self._service, self._read, self._form = service, read, form

    async def _answer(
        self, body: bytes, scope: Scope, receive: Receive, stream: EventStream
    ) -> None:
        """Answers a request that has been read."""
        wanted, prepared = await run_sync(self._prepared, body)
        form = self._form(
            self._service.settings.model_name,
            wanted,
            self._service.grammars.bytes_of,
            len(prepared.echoes),
        )
        with Answers(self._service, wanted, prepared) as answers:
            if wanted.is_stream:
                await _stream(answers, form, stream)
                return
            async for piece in answers.pieces():
                form.add(piece)
        await json_response(form.whole(answers.usage))(scope, receive, stream.raw)

    def _prepared(self, body: bytes) -> tuple[Wanted, Prepared]:
        """What a request wants, and its tokens; in a thread, as it may take a while."""
        fields = fields_of(body)
        wanted = self._read(fields, self._service.settings)
        fields.refuse_others()
        return wanted, prepare(self._service, wanted)


async def _stream(answers: Answers, form: Format, stream: EventStream) -> None:
    """Sends answers as they come. The first event decides whether the request fails at once."""
    async for piece in answers.pieces():
        if not stream.has_begun:
            for chunk in form.begin():
                await stream.send(chunk)
        for chunk in form.chunks(piece):
            await stream.send(chunk)
    for chunk in form.end(answers.usage):
        await stream.send(chunk)
    await stream.end()
