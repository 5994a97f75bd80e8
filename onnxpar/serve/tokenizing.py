"""Answers requests for the tokens of a text or a chat, and for the text of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from anyio.to_thread import run_sync
from starlette.types import Receive, Scope

from onnxpar.serve.api_error import json_response
from onnxpar.serve.body import Fields, fields_of
from onnxpar.serve.chat_request import messages_of, template_options
from onnxpar.serve.event_stream import EventStream
from onnxpar.serve.prompts import chat_tokens
from onnxpar.serve.service import GeneratingService
from onnxpar.serve.texts import ids_of
from onnxpar.serve.tools import functions_of
from onnxpar.serve.visiting import Visiting
from onnxpar.serve.wanted import check_model

Answer = Callable[[Fields, GeneratingService], dict[str, Any]]


class Tokenizing(Visiting):
    """The endpoint of a route for which the tokenizer alone is needed.

    answer  what a request is answered
    """

    def __init__(self, service: GeneratingService, answer: Answer) -> None:
        super().__init__(service)
        self._service, self._of = service, answer

    async def _answer(
        self, body: bytes, scope: Scope, receive: Receive, stream: EventStream
    ) -> None:
        answer = await run_sync(self._answered, body)
        await json_response(answer)(scope, receive, stream.raw)

    def _answered(self, body: bytes) -> dict[str, Any]:
        fields = fields_of(body)
        answer = self._of(fields, self._service)
        fields.refuse_others()
        return answer


def tokenized(fields: Fields, service: GeneratingService) -> dict[str, Any]:
    """Returns the tokens of a text or a chat, as vLLM writes them. Errors: ApiError."""
    check_model(fields, service.settings)
    tokenizer = service.engine.tokenizer
    text = fields.text("prompt")
    tokens: Sequence[int]
    if text is not None:
        specials = fields.flag("add_special_tokens", default=True)
        tokens = tokenizer.encode(text, specials)
    elif fields.get("messages") is not None:
        functions = functions_of(fields, is_flat=False)
        tokens = chat_tokens(service, messages_of(fields), template_options(fields, functions))
    else:
        fields.refuse("prompt", "is missing; give a text, or messages")
    has_texts = fields.flag("return_token_strs")
    return {
        "count": len(tokens),
        "max_model_len": service.longest,
        "tokens": tokens,
        "token_strs": [tokenizer.token(token) for token in tokens] if has_texts else None,
    }


def detokenized(fields: Fields, service: GeneratingService) -> dict[str, Any]:
    """Returns the text of tokens, with special tokens, as vLLM writes it. Errors: ApiError."""
    check_model(fields, service.settings)
    tokens = ids_of(fields, "tokens", fields.get("tokens"))
    tokenizer = service.engine.tokenizer
    most = max(tokenizer.size, service.engine.vocabulary)
    for token in tokens:
        if not 0 <= token < most:
            fields.refuse("tokens", f"has {token}; ids are from 0 to {most - 1}")
    return {"prompt": tokenizer.decode(tokens, specials=True)}
