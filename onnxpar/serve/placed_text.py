"""Finds the place in a text where each of its tokens begins."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onnxpar.llm.requests import Token
from onnxpar.llm.tokenizer import UNFINISHED, Stream

_new_decoder = codecs.getincrementaldecoder("utf-8")
"""Makes a decoder of bytes; the bytes of a character may be spread over several tokens."""


@dataclass(frozen=True)
class PlacedToken:
    """A token and its place in the text.

    id       the token
    logprob  the natural logarithm of its probability; None for the first token of a prompt
    top      the likeliest tokens at its place, with their logarithms
    begin    the number of characters of the text before it
    """

    id: int
    logprob: float | None
    top: Sequence[tuple[int, float]]
    begin: int

    @staticmethod
    def of(token: Token, begin: int) -> PlacedToken:
        """Returns the token of an engine's event, with its place."""
        return PlacedToken(token.id, token.logprob, token.top, begin)


class PlacedText:
    """A stream of text that also finds the place of each token. A token that only continues a
    character has the place of that character.

    stream    turns tokens into text
    bytes_of  a function from a token to its bytes
    start     the number of characters before the text
    """

    def __init__(self, stream: Stream, bytes_of: Callable[[int], bytes], start: int = 0) -> None:
        self._stream, self._bytes_of = stream, bytes_of
        self._sent = start
        self._begun, self._begin = b"", 0
        """Bytes of a character that is not complete, and its place."""

    @property
    def length(self) -> int:
        """The number of characters so far, including characters that still wait."""
        return self._sent + len(self._stream.waiting)

    def add(self, token: int) -> tuple[str, int]:
        """Adds a token; returns the text that is complete now, and the place of the token."""
        waited = len(self._stream.waiting)
        new = self._stream.add(token)
        old = (new + self._stream.waiting)[:waited]
        begin = self._sent + len(old) - len(old.lstrip(UNFINISHED))
        self._sent += len(new)
        if not self._stream.has_text(token):
            return new, begin
        bytes_ = self._bytes_of(token)
        goes_on = bool(self._begun) and _may_begin_a_character(self._begun + bytes_[:1])
        if goes_on:
            begin, bytes_ = self._begin, self._begun + bytes_
        decoder = _new_decoder("replace")
        decoder.decode(bytes_)
        rest = decoder.getstate()[0]
        if not goes_on or rest != bytes_:
            self._begin = self.length - 1
        self._begun = rest
        return new, begin


def _may_begin_a_character(data: bytes) -> bool:
    """True for bytes that are whole characters in UTF-8, or with which a character may begin."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True
