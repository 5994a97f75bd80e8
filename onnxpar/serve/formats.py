"""Formats of answers in OpenAI's API, as JSON: whole answers, or answers in chunks, one for each
event."""

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
"""The value that OpenAI sends for smaller logarithms; JSON has no infinity."""


class Format(ABC):
    """The format of a request's answers. A caller uses either `begin`, `chunks` and `end`, for a
    stream, or `add` and `whole`."""

    @abstractmethod
    def begin(self) -> list[dict[str, Any]]:
        """Returns the chunks that come first."""

    @abstractmethod
    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Returns the chunks for a piece of an answer; there may be none."""

    @abstractmethod
    def end(self, usage: Usage) -> list[dict[str, Any]]:
        """Returns the chunks that come last."""

    @abstractmethod
    def add(self, piece: Piece) -> None:
        """Adds a piece of an answer, for `whole`."""

    @abstractmethod
    def whole(self, usage: Usage) -> dict[str, Any]:
        """Returns the JSON of all answers, from the pieces that were added."""


class ChoicesFormat(Format):
    """Answers in a list of choices, as chats and completions have them.

    model     the name of the model
    request   the request
    bytes_of  a function from a token to its bytes
    number    the number of answers
    """

    prefix: ClassVar[str]
    """The prefix of answers' ids."""
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(
        self, model: str, request: GenerationRequest, bytes_of: Callable[[int], bytes], number: int
    ) -> None:
        self._request, self._bytes_of = request, bytes_of
        origin = {"created": int(time.time()), "model": model}
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "object": self.kind, **origin}
        self._texts = [""] * number
        self._tokens: list[list[PlacedToken]] = [[] for _ in range(number)]
        self._finishes: list[str | None] = [None] * number

    def begin(self) -> list[dict[str, Any]]:
        return []

    @abstractmethod
    def _delta(self, index: int, text: str, tokens: Sequence[PlacedToken], is_end: bool) -> Any:
        """Returns the entry of answer number `index` in a chunk: its new text and tokens. `is_end`
        is True for the chunk that says why the answer ends."""

    @abstractmethod
    def _choice(self, index: int, text: str, tokens: Sequence[PlacedToken]) -> dict[str, Any]:
        """Returns the entry of a whole answer, without the reason of its end."""

    def add(self, piece: Piece) -> None:
        self._texts[piece.index] += piece.content
        self._tokens[piece.index] += piece.tokens
        self._finishes[piece.index] = piece.finish

    def whole(self, usage: Usage) -> dict[str, Any]:
        numbered = enumerate(zip(self._texts, self._tokens, self._finishes, strict=True))
        choices = [
            {"index": at, **self._choice(at, text, tokens), "finish_reason": finish}
            for at, (text, tokens, finish) in numbered
        ]
        return {**self._head, "choices": choices, "usage": _usage(usage)}

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        chunks = []
        if piece.content or piece.tokens:
            chunks.append(self._chunk(piece.index, piece.content, piece.tokens))
        chunks += self._calls(piece)
        if piece.finish is not None:
            chunks.append(self._chunk(piece.index, "", (), piece.finish))
        return chunks

    def _calls(self, piece: Piece) -> list[dict[str, Any]]:
        """Returns the chunks for the calls of tools in a piece."""
        return []

    def end(self, usage: Usage) -> list[dict[str, Any]]:
        if not self._request.stream_options.include_usage:
            return []
        head = {**self._head, "object": self.chunk_kind}
        return [{**head, "choices": [], "usage": _usage(usage)}]

    def _chunk(
        self, index: int, text: str, tokens: Sequence[PlacedToken], finish: str | None = None
    ) -> dict[str, Any]:
        """Returns a chunk with new text and tokens of answer number `index`; `finish` is why the
        answer ends, or None."""
        choice = {"index": index, **self._delta(index, text, tokens, finish is not None)}
        chunk = {**self._head, "object": self.chunk_kind}
        chunk["choices"] = [{**choice, "finish_reason": finish}]
        return {**chunk, "usage": None} if self._request.stream_options.include_usage else chunk

    def _key_of(self, token: int) -> str:
        r"""Returns the text of a token, as OpenAI writes it. Bytes that are no whole characters are
        written as "bytes:\xe2\x80", so that different tokens have different texts."""
        bytes_ = self._bytes_of(token)
        try:
            return bytes_.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in bytes_)

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
        """Returns a chunk for each answer, with the role of its author."""
        delta = {"role": "assistant", "content": ""}
        return [self._with_delta(index, delta) for index in range(len(self._texts))]

    def _with_delta(self, index: int, delta: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a chunk of answer number `index` with these new members of its message."""
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
            for call in self._calls_of[index].well_formed
        ]
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        return {"message": message, "logprobs": self._logprobs(tokens, is_whole=True)}

    def _logprobs(self, tokens: Sequence[PlacedToken], is_whole: bool = False) -> Any:
        """Returns the probabilities of tokens in the form of chats; None if the client does not
        request them, or, in a chunk, if there are no tokens."""
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
        """Returns the probabilities of tokens in the form of completions; None if the client does
        not request them, or, in a chunk, if there are no tokens."""
        if self._request.likeliest is None or not (tokens or is_whole):
            return None
        return {
            "tokens": [self._key_of(token.id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._likeliest(token) for token in tokens],
            "text_offset": [token.begin for token in tokens],
        }

    def _likeliest(self, token: PlacedToken) -> dict[str, float | None] | None:
        """Returns the logarithms of the probabilities of the likeliest tokens and the actual one,
        by text; None for the first token of a prompt."""
        if token.logprob is None:
            return None
        pairs = (*token.top, (token.id, token.logprob))
        return {self._key_of(token): _finite(logprob) for token, logprob in pairs}


def _call_delta(part: Part) -> dict[str, Any] | None:
    """Returns the entry of a part of a call in a chunk; None for text, and for the end of a
    call."""
    if isinstance(part, CallBegin):
        return {"index": part.index, "id": part.id, **_function(part.name, "")}
    if isinstance(part, CallArguments):
        return {"index": part.index, "function": {"arguments": part.text}}
    return None


def _function(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _finite(logprob: float | None) -> float | None:
    """Returns a logarithm that JSON can write: at least `_LEAST_LOGPROB`. None stays None."""
    return None if logprob is None else max(_LEAST_LOGPROB, float(logprob))


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.new,
        "total_tokens": usage.prompt + usage.new,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
