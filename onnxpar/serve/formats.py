"""Answers as JSON of OpenAI's API: whole, and in chunks."""

from __future__ import annotations

import codecs
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from onnxpar.llm.requests import Token
from onnxpar.serve.answers import Piece, Usage
from onnxpar.serve.wanted import Wanted

_LEAST_LOGPROB = -9999.0
"""What OpenAI sends for less; JSON has no infinity."""


_new_decoder = codecs.getincrementaldecoder("utf-8")
"""Makes decoders of bytes, whose characters may be spread over several tokens."""


class Format(ABC):
    """How answers are written.

    bytes_of  the bytes of a token
    echoes    the text in front of each answer
    """

    prefix: ClassVar[str]
    """Begins the ids of answers."""
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(
        self, model: str, wanted: Wanted, bytes_of: Callable[[int], bytes], echoes: Sequence[str]
    ) -> None:
        self._wanted, self._bytes_of, self._echoes = wanted, bytes_of, echoes
        made = {"created": int(time.time()), "model": model}
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "object": self.kind, **made}
        self._texts = [""] * len(echoes)
        self._tokens: list[list[Token]] = [[] for _ in echoes]
        self._finishes: list[str | None] = [None] * len(echoes)
        self._offsets = [0] * len(echoes)
        self._decoders = [_new_decoder("replace") for _ in echoes]

    @abstractmethod
    def begin(self) -> list[dict[str, Any]]:
        """Returns the chunks in front of all others."""

    @abstractmethod
    def _delta(self, index: int, text: str, tokens: Sequence[Token], is_end: bool) -> Any:
        """The choice of a chunk, without its reason to end."""

    @abstractmethod
    def _choice(self, index: int, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        """The choice of a whole answer, without its reason to end."""

    def add(self, piece: Piece) -> None:
        """Adds a piece to a whole answer."""
        self._texts[piece.index] += piece.text
        if piece.token is not None:
            self._tokens[piece.index].append(piece.token)
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
        has_logprobs = self._wanted.logprobs is not None and piece.token is not None
        found = []
        if piece.text or has_logprobs:
            tokens = [piece.token] if piece.token is not None else []
            found.append(self._chunk(piece.index, piece.text, tokens))
        if piece.finish is not None:
            found.append(self._chunk(piece.index, "", (), piece.finish))
        return found

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Returns the chunk behind all others, with the numbers of tokens."""
        return {**self._head, "object": self.chunk_kind, "choices": [], "usage": _usage(usage)}

    def _chunk(
        self, index: int, text: str, tokens: Sequence[Token], finish: str | None = None
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

    def _delta(self, index: int, text: str, tokens: Sequence[Token], is_end: bool) -> Any:
        return {"delta": {} if is_end else {"content": text}, "logprobs": self._logprobs(tokens)}

    def _choice(self, index: int, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(tokens, is_whole=True)}

    def _logprobs(self, tokens: Sequence[Token], is_whole: bool = False) -> Any:
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

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._text_of(token),
            "logprob": _finite(logprob),
            "bytes": list(self._bytes_of(token)),
        }


class CompletionFormat(Format):
    """Answers of /v1/completions."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def begin(self) -> list[dict[str, Any]]:
        """Returns the chunks of the prompts, if these are asked for."""
        each = enumerate(self._echoes)
        return [self._chunk(index, echo, ()) for index, echo in each if echo]

    def _delta(self, index: int, text: str, tokens: Sequence[Token], is_end: bool) -> Any:
        return {"text": text, "logprobs": self._logprobs(index, tokens)}

    def _choice(self, index: int, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        logprobs = self._logprobs(index, tokens, is_whole=True)
        return {"text": self._echoes[index] + text, "logprobs": logprobs}

    def _logprobs(self, index: int, tokens: Sequence[Token], is_whole: bool = False) -> Any:
        if self._wanted.logprobs is None or not (tokens or is_whole):
            return None
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            text = self._decoders[index].decode(self._bytes_of(token.id))
            self._offsets[index] += len(text)
        return {
            "tokens": [self._key_of(token.id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {
                    self._key_of(each): _finite(logprob)
                    for each, logprob in (*token.top, (token.id, token.logprob))
                }
                for token in tokens
            ],
            "text_offset": offsets,
        }


def _finite(logprob: float) -> float:
    return max(float(logprob), _LEAST_LOGPROB)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.new,
        "total_tokens": usage.prompt + usage.new,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
