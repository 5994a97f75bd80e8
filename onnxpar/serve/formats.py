"""Answers as JSON of OpenAI's API: whole, and in chunks."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from onnxpar.serve.answers import Piece, Usage
from onnxpar.serve.placed_text import PlacedToken
from onnxpar.serve.wanted import Wanted

_LEAST_LOGPROB = -9999.0
"""What OpenAI sends for less; JSON has no infinity."""


class Format(ABC):
    """How answers are written.

    bytes_of  the bytes of a token
    number    how many answers there are
    """

    prefix: ClassVar[str]
    """Begins the ids of answers."""
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(
        self, model: str, wanted: Wanted, bytes_of: Callable[[int], bytes], number: int
    ) -> None:
        self._wanted, self._bytes_of = wanted, bytes_of
        made = {"created": int(time.time()), "model": model}
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "object": self.kind, **made}
        self._texts = [""] * number
        self._tokens: list[list[PlacedToken]] = [[] for _ in range(number)]
        self._finishes: list[str | None] = [None] * number

    def begin(self) -> list[dict[str, Any]]:
        """Returns the chunks in front of all others."""
        return []

    @abstractmethod
    def _delta(self, index: int, text: str, tokens: Sequence[PlacedToken], is_end: bool) -> Any:
        """The choice of a chunk, without its reason to end."""

    @abstractmethod
    def _choice(self, index: int, text: str, tokens: Sequence[PlacedToken]) -> dict[str, Any]:
        """The choice of a whole answer, without its reason to end."""

    def add(self, piece: Piece) -> None:
        """Adds a piece to a whole answer."""
        self._texts[piece.index] += piece.text
        self._tokens[piece.index] += piece.tokens
        self._finishes[piece.index] = piece.finish

    def whole(self, usage: Usage) -> dict[str, Any]:
        """Returns the answers, from the pieces that were added."""
        each = enumerate(zip(self._texts, self._tokens, self._finishes, strict=True))
        choices = [
            {"index": at, **self._choice(at, text, tokens), "finish_reason": finish}
            for at, (text, tokens, finish) in each
        ]
        return {**self._head, "choices": choices, "usage": _usage(usage)}

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Returns the chunks of a piece, of which there may be none."""
        found = []
        if piece.text or piece.tokens:
            found.append(self._chunk(piece.index, piece.text, piece.tokens))
        if piece.finish is not None:
            found.append(self._chunk(piece.index, "", (), piece.finish))
        return found

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Returns the chunk behind all others, with the numbers of tokens."""
        return {**self._head, "object": self.chunk_kind, "choices": [], "usage": _usage(usage)}

    def _chunk(
        self, index: int, text: str, tokens: Sequence[PlacedToken], finish: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, **self._delta(index, text, tokens, finish is not None)}
        found = {**self._head, "object": self.chunk_kind}
        found["choices"] = [{**choice, "finish_reason": finish}]
        return {**found, "usage": None} if self._wanted.wants_usage else found

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


class ChatFormat(Format):
    """Answers of /v1/chat/completions."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def begin(self) -> list[dict[str, Any]]:
        """Returns the chunks that tell the role of each answer."""
        made = [self._chunk(index, "", ()) for index in range(len(self._texts))]
        for chunk in made:
            chunk["choices"][0]["delta"] = {"role": "assistant", "content": ""}
        return made

    def _delta(self, index: int, text: str, tokens: Sequence[PlacedToken], is_end: bool) -> Any:
        return {"delta": {} if is_end else {"content": text}, "logprobs": self._logprobs(tokens)}

    def _choice(self, index: int, text: str, tokens: Sequence[PlacedToken]) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(tokens, is_whole=True)}

    def _logprobs(self, tokens: Sequence[PlacedToken], is_whole: bool = False) -> Any:
        if self._wanted.logprobs is None or not (tokens or is_whole):
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


class CompletionFormat(Format):
    """Answers of /v1/completions."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def _delta(self, index: int, text: str, tokens: Sequence[PlacedToken], is_end: bool) -> Any:
        return {"text": text, "logprobs": self._logprobs(tokens)}

    def _choice(self, index: int, text: str, tokens: Sequence[PlacedToken]) -> dict[str, Any]:
        return {"text": text, "logprobs": self._logprobs(tokens, is_whole=True)}

    def _logprobs(self, tokens: Sequence[PlacedToken], is_whole: bool = False) -> Any:
        if self._wanted.logprobs is None or not (tokens or is_whole):
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


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(_LEAST_LOGPROB, float(logprob))


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.new,
        "total_tokens": usage.prompt + usage.new,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
