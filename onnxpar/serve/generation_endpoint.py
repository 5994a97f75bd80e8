"""Answers a request for generated text: reads it, lets the engine generate, and writes the
answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anyio.to_thread import run_sync
from starlette.types import Receive, Scope

from onnxpar.serve.answers import Answers
from onnxpar.serve.api_error import JsonResponse
from onnxpar.serve.endpoint import Visiting
from onnxpar.serve.event_stream import EventStream
from onnxpar.serve.formats import Format
from onnxpar.serve.generation_request import GenerationRequest
from onnxpar.serve.prompts import Prepared, prepare
from onnxpar.serve.request import object_of, read_request
from onnxpar.serve.service import GeneratingService


class Answering(Visiting):
    """The endpoint of a route that generates text.

    read    the class of the route's requests
    form    makes the format of the answers from the model's name, the request, a function from a
            token to its bytes, and the number of answers
    stream  the class that sends events
    """

    def __init__(
        self,
        service: GeneratingService,
        read: type[GenerationRequest],
        form: Callable[[str, Any, Callable[[int], bytes], int], Format],
        stream: type[EventStream] = EventStream,
    ) -> None:
        super().__init__(service, stream)
        self._service, self._read, self._form = service, read, form

    async def _answer(
        self, body: bytes, scope: Scope, receive: Receive, stream: EventStream
    ) -> None:
        """Reads a request from `body`, generates the answers, and sends them: as a whole, or piece
        by piece if the request asks for a stream."""
        request, prepared = await run_sync(self._prepared, body)
        form = self._form(
            self._service.settings.model_name,
            request,
            self._service.grammars.bytes_of,
            len(prepared.echoes),
        )
        with Answers(self._service, request, prepared) as answers:
            if request.stream:
                await _stream(answers, form, stream)
                return
            async for piece in answers.pieces():
                form.add(piece)
        await JsonResponse(form.whole(answers.usage))(scope, receive, stream.raw)

    def _prepared(self, body: bytes) -> tuple[GenerationRequest, Prepared]:
        """Returns the request in a body, and its data for the engine. Runs in a thread, as it may
        take a while. Errors: ApiError for a wrong request."""
        request = read_request(self._read, object_of(body), self._service)
        return request, prepare(self._service, request)


async def _stream(answers: Answers, form: Format, stream: EventStream) -> None:
    """Sends answers piece by piece. Nothing is sent before the first piece, so that a request that
    fails before it gets an error response instead of a stream."""
    async for piece in answers.pieces():
        if not stream.has_begun:
            for chunk in form.begin():
                await stream.send(chunk)
        for chunk in form.chunks(piece):
            await stream.send(chunk)
    for chunk in form.end(answers.usage):
        await stream.send(chunk)
    await stream.end()
