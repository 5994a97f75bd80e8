"""Answers requests for the tokens of a text or a chat, and for the text of tokens, in the form of
vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anyio.to_thread import run_sync
from starlette.types import Receive, Scope

from onnxpar.serve.api_error import JsonResponse, quote
from onnxpar.serve.chat_request import ChatCompletionRequest
from onnxpar.serve.endpoint import Visiting
from onnxpar.serve.event_stream import EventStream
from onnxpar.serve.request import Array, Request, object_of, read_request, refuse
from onnxpar.serve.service import GeneratingService


class TokenizeCompletionRequest(Request):
    """A request for the tokens of a text."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ChatCompletionRequest):
    """A request for the tokens of a chat."""

    return_token_strs: bool = False


class DetokenizeRequest(Request):
    """A request for the text of tokens."""

    tokens: Array[int]

    def check(self, service: Any) -> None:
        most = max(service.engine.tokenizer.size, service.engine.vocabulary)
        for token in self.tokens:
            if not 0 <= token < most:
                refuse("tokens", f"has {quote(token)}; ids are from 0 to {most - 1}")


class Tokenizing(Visiting):
    """The endpoint of a route that needs only the tokenizer. `answer` is a function from the
    members of a request to the members of its answer."""

    def __init__(
        self,
        service: GeneratingService,
        answer: Callable[[dict[str, Any], GeneratingService], dict[str, Any]],
    ) -> None:
        super().__init__(service)
        self._service, self._of = service, answer

    async def _answer(
        self, body: bytes, scope: Scope, receive: Receive, stream: EventStream
    ) -> None:
        """Reads a request from `body`, and sends the answer."""
        answer = await run_sync(lambda: self._of(object_of(body), self._service))
        await JsonResponse(answer)(scope, receive, stream.raw)


def tokenize(members: dict[str, Any], service: GeneratingService) -> dict[str, Any]:
    """Returns the members of the answer to a request for the tokens of a text or a chat. Errors:
    ApiError for a wrong request."""
    tokenizer = service.engine.tokenizer
    request: TokenizeCompletionRequest | TokenizeChatRequest
    if members.get("prompt") is None and members.get("messages") is not None:
        request = read_request(TokenizeChatRequest, members, service)
        (tokens,) = request.tokens(service)
    else:
        request = read_request(TokenizeCompletionRequest, members, service)
        tokens = tokenizer.encode(request.prompt, request.add_special_tokens)
    texts = [tokenizer.token(token) for token in tokens] if request.return_token_strs else None
    return {
        "count": len(tokens),
        "max_model_len": service.longest,
        "tokens": tokens,
        "token_strs": texts,
    }


def detokenize(members: dict[str, Any], service: GeneratingService) -> dict[str, Any]:
    """Returns the members of the answer to a request for the text of tokens, which includes special
    tokens. Errors: ApiError for a wrong request."""
    request = read_request(DetokenizeRequest, members, service)
    return {"prompt": service.engine.tokenizer.decode(request.tokens, specials=True)}
