"""Answers as JSON of OpenAI's API: whole, and in chunks."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from onnxpar.serve.answer_parts import CallArguments, CallBegin, Calls, Part
from onnxpar.serve.answers import Piece, Usage
from onnxpar.serve.generation_request import GenerationRequest
from onnxpar.serve.placed_text import PlacedToken

_LEAST_LOGPROB = -9999.0
"""What OpenAI sends for less; JSON has no infinity."""


class Format(ABC):
    """How answers are written."""

    @abstractmethod
    def begin(self) -> list[dict[str, Any]]:
        """Returns the chunks in front of all others."""

    @abstractmethod
    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Returns the chunks of a piece, of which there may be none."""

    @abstractmethod
    def end(self, usage: Usage) -> list[dict[str, Any]]:
        """Returns the chunks behind all others."""

    @abstractmethod
    def add(self, piece: Piece) -> None:
        """Adds a piece to a whole answer."""

    @abstractmethod
    def whole(self, usage: Usage) -> dict[str, Any]:
        """Returns the answers, from the pieces that were added."""


class ChoicesFormat(Format):
    """Answers that are choices, of which there may be several.

    bytes_of  the bytes of a token
    number    how many answers there are
    """

    prefix: ClassVar[str]
    """Begins the ids of answers."""
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(
        self, model: str, request: GenerationRequest, bytes_of: Callable[[int], bytes], number: int
    ) -> None:
        self._request, self._bytes_of = request, bytes_of
        made = {"created": int(time.time()), "model": model}
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "object": self.kind, **made}
        self._texts = [""] * number
        self._tokens: list[list[PlacedToken]] = [[] for _ in range(number)]
        self._finishes: list[str | None] = [None] * number

    def begin(self) -> list[dict[str, Any]]:
        return []

    @abstractmethod
    def _delta(self, index: int, text: str, tokens: Sequence[PlacedToken], is_end: bool) -> Any:
        """The choice of a chunk, without its reason to end."""

    @abstractmethod
    def _choice(self, index: int, text: str, tokens: Sequence[PlacedToken]) -> dict[str, Any]:
        """The choice of a whole answer, without its reason to end."""

    def add(self, piece: Piece) -> None:
        self._texts[piece.index] += piece.content
        self._tokens[piece.index] += piece.tokens
        self._finishes[piece.index] = piece.finish

    def whole(self, usage: Usage) -> dict[str, Any]:
        each = enumerate(zip(self._texts, self._tokens, self._finishes, strict=True))
        choices = [
            {"index": at, **self._choice(at, text, tokens), "finish_reason": finish}
            for at, (text, tokens, finish) in each
        ]
        return {**self._head, "choices": choices, "usage": _usage(usage)}

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        found = []
        if piece.content or piece.tokens:
            found.append(self._chunk(piece.index, piece.content, piece.tokens))
        found += self._calls(piece)
        if piece.finish is not None:
            found.append(self._chunk(piece.index, "", (), piece.finish))
        return found

    def _calls(self, piece: Piece) -> list[dict[str, Any]]:
        """The chunks of calls."""
        return []

    def end(self, usage: Usage) -> list[dict[str, Any]]:
        if not self._request.stream_options.include_usage:
            return []
        head = {**self._head, "object": self.chunk_kind}
        return [{**head, "choices": [], "usage": _usage(usage)}]

    def _chunk(
        self, index: int, text: str, tokens: Sequence[PlacedToken], finish: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, **self._delta(index, text, tokens, finish is not None)}
        found = {**self._head, "object": self.chunk_kind}
        found["choices"] = [{**choice, "finish_reason": finish}]
        return {**found, "usage": None} if self._request.stream_options.include_usage else found

    def _key_of(self, token: int) -> str:
        """The text of a token, as OpenAI writes it: bytes that are no whole characters as such, so
        that tokens with different bytes differ."""
        found = self._bytes_of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def _text_of(self, token: int) -> str:
        return self._bytes_of(token).decode("utf-8", "replace")


class ChatFormat(ChoicesFormat):
    """Answers of /v1/chat/completions."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self, model: str, request: GenerationRequest, bytes_of: Callable[[int], bytes], number: int
    ) -> None:
        super().__init__(model, request, bytes_of, number)
        self._calls_of = [Calls() for _ in range(number)]

    def add(self, piece: Piece) -> None:
        super().add(piece)
        for part in piece.parts:
            self._calls_of[piece.index].add(part)

    def begin(self) -> list[dict[str, Any]]:
        """Returns the chunks that tell the role of each answer."""
        delta = {"role": "assistant", "content": ""}
        return [self._with_delta(index, delta) for index in range(len(self._texts))]

    def _with_delta(self, index: int, delta: Mapping[str, Any]) -> dict[str, Any]:
        chunk = self._chunk(index, "", ())
        chunk["choices"][0]["delta"] = delta
        return chunk

    def _calls(self, piece: Piece) -> list[dict[str, Any]]:
        calls = filter(None, map(_call_delta, piece.parts))
        return [self._with_delta(piece.index, {"tool_calls": [call]}) for call in calls]

    def _delta(self, index: int, text: str, tokens: Sequence[PlacedToken], is_end: bool) -> Any:
        return {"delta": {} if is_end else {"content": text}, "logprobs": self._logprobs(tokens)}

    def _choice(self, index: int, text: str, tokens: Sequence[PlacedToken]) -> dict[str, Any]:
        calls = [
            {"id": call.id, **_function(call.name, call.arguments)}
            for call in self._calls_of[index].made
        ]
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        return {"message": message, "logprobs": self._logprobs(tokens, is_whole=True)}

    def _logprobs(self, tokens: Sequence[PlacedToken], is_whole: bool = False) -> Any:
        if self._request.likeliest is None or not (tokens or is_whole):
            return None
        content = [
            {
                **self._entry(token.id, token.logprob),
                "top_logprobs": [self._entry(*top) for top in token.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": self._text_of(token),
            "logprob": _finite(logprob),
            "bytes": list(self._bytes_of(token)),
        }


class CompletionFormat(ChoicesFormat):
    """Answers of /v1/completions."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def _delta(self, index: int, text: str, tokens: Sequence[PlacedToken], is_end: bool) -> Any:
        return {"text": text, "logprobs": self._logprobs(tokens)}

    def _choice(self, index: int, text: str, tokens: Sequence[PlacedToken]) -> dict[str, Any]:
        return {"text": text, "logprobs": self._logprobs(tokens, is_whole=True)}

    def _logprobs(self, tokens: Sequence[PlacedToken], is_whole: bool = False) -> Any:
        if self._request.likeliest is None or not (tokens or is_whole):
            return None
        return {
            "tokens": [self._key_of(token.id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._likeliest(token) for token in tokens],
            "text_offset": [token.begin for token in tokens],
        }

    def _likeliest(self, token: PlacedToken) -> dict[str, float | None] | None:
        """The likeliest tokens and the one that there is; None for the first of a prompt."""
        if token.logprob is None:
            return None
        each = (*token.top, (token.id, token.logprob))
        return {self._key_of(token): _finite(logprob) for token, logprob in each}


def _call_delta(part: Part) -> dict[str, Any] | None:
    """What a chunk tells of a part of a call; None for other parts."""
    if isinstance(part, CallBegin):
        return {"index": part.index, "id": part.id, **_function(part.name, "")}
    if isinstance(part, CallArguments):
        return {"index": part.index, "function": {"arguments": part.text}}
    return None


def _function(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(_LEAST_LOGPROB, float(logprob))


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.new,
        "total_tokens": usage.prompt + usage.new,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
