"""Answers requests for embeddings, and for scores of a reranker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from anyio.to_thread import run_sync
from starlette.types import Receive, Scope

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError, OnnxparError
from onnxpar.llm.encoder import Tokens
from onnxpar.llm.requests import Busy, End, Failure
from onnxpar.serve.api_error import ApiError, JsonResponse
from onnxpar.serve.embedding_request import EncoderRequest
from onnxpar.serve.endpoint import Visiting
from onnxpar.serve.event_stream import EventStream
from onnxpar.serve.request import object_of, read_request
from onnxpar.serve.service import EmbeddingService, engine_error


class EmbeddingAnswering(Visiting):
    """The endpoint of a route that embeds or ranks texts; `read` is the class of its requests."""

    def __init__(self, service: EmbeddingService, read: type[EncoderRequest]) -> None:
        super().__init__(service)
        self._service, self._read = service, read

    async def _answer(
        self, body: bytes, scope: Scope, receive: Receive, stream: EventStream
    ) -> None:
        """Reads a request from `body`, runs its texts on the model, and sends the answer."""
        request, texts = await run_sync(self._prepared, body)
        results = await self._results(texts)
        number = sum(len(text.ids) for text in texts)
        head = {
            "object": "list",
            "model": self._service.settings.model_name,
            "usage": {"prompt_tokens": number, "total_tokens": number},
        }
        response = await run_sync(lambda: JsonResponse(head | request.answer(results)))
        await response(scope, receive, stream.raw)

    def _prepared(self, body: bytes) -> tuple[EncoderRequest, Sequence[Tokens]]:
        """Returns the request in a body, and the tokens of its texts. Errors: ApiError for a wrong
        request."""
        request = read_request(self._read, object_of(body), self._service)
        return request, request.checked_tokens(self._service)

    async def _results(self, texts: Sequence[Tokens]) -> Array:
        """Runs texts on the model, waits, and returns the results, (texts, width). Errors: ApiError
        if the model computes none."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Array | End | Failure] = loop.create_future()

        def set_result(event: Array | End | Failure) -> None:
            if not future.done():
                future.set_result(event)

        def listen(event: Array | End | Failure) -> None:
            with suppress(RuntimeError):  # the loop has ended, and with it the request
                loop.call_soon_threadsafe(set_result, event)

        try:
            running = self._service.embedder.submit(texts, listen)
        except InputError as error:
            raise ApiError(str(error)) from None
        except OnnxparError as error:
            raise (
                self._service.busy() if isinstance(error, Busy) else engine_error(error)
            ) from None
        try:
            event = await future
        finally:
            running.cancel()  # has no effect once the request has ended
        if isinstance(event, Failure):
            raise engine_error(event.error)
        if isinstance(event, End):
            raise self._service.busy()
        if not np.isfinite(event).all():
            raise engine_error(OnnxparError("the model computes what is no finite number"))
        return event
