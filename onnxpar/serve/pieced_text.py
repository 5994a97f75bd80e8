"""Reads a text that comes in pieces, by generators that wait where the text has not come yet."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A generator that reads from the text: it yields to wait for more text, and returns its result."""
_OPENING, _CLOSING = "([{", ")]}"


class UnexpectedText(Exception):
    """The text does not continue as expected, or has ended."""


class PiecedText:
    """A text that comes in pieces, and a position up to which it is read. Methods read from the
    position on, as generators that yield to wait for more text. Errors: UnexpectedText.

    text         the text so far; the caller appends pieces
    at           the position
    is_complete  True if no further piece comes
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_complete = False

    def next(self) -> Reading[str]:
        """Returns the next character, without moving the position; an empty text at the end."""
        while self.at == len(self.text) and not self.is_complete:
            yield
        return self.text[self.at : self.at + 1]

    def visible(self) -> Reading[str]:
        """Skips white space, and returns the next character without moving the position behind
        it."""
        while (char := (yield from self.next())).isspace():
            self.at += 1
        return char

    def take(self, chars: str) -> Reading[str]:
        """Skips white space, and reads and returns the next character, which must be one of
        `chars`."""
        char = yield from self.visible()
        if not char or char not in chars:
            raise UnexpectedText
        self.at += 1
        return char

    def word(self) -> Reading[str]:
        """Skips white space, and reads and returns a name of letters, digits and `_.-`."""
        yield from self.visible()
        start = self.at
        while (char := (yield from self.next())) and (char.isalnum() or char in "_.-"):
            self.at += 1
        if start == self.at:
            raise UnexpectedText
        return self.text[start : self.at]

    def one_of(self, options: Sequence[str]) -> Reading[str | None]:
        """Reads one of these texts, if one comes next, and returns it; otherwise reads nothing, and
        returns None."""
        while True:
            for option in options:
                if self.text.startswith(option, self.at):
                    self.at += len(option)
                    return option
            rest = self.text[self.at :][: max(map(len, options), default=0)]
            if self.is_complete or not any(option.startswith(rest) for option in options):
                return None
            yield

    def expect(self, options: Sequence[str]) -> Reading[str]:
        """Skips white space, and reads and returns one of these texts. If the end of the text cuts
        one of them, the position is at the end when the error is raised."""
        yield from self.visible()
        option = yield from self.one_of(options)
        if option is None:
            rest = self.text[self.at :]
            self.at += len(rest) if any(option.startswith(rest) for option in options) else 0
            raise UnexpectedText
        return option

    def until(self, end: str) -> Reading[str]:
        """Reads up to and including the text `end`; returns the text before it."""
        start = self.at
        while (end_at := self.text.find(end, self.at)) < 0:
            if self.is_complete:
                self.at = len(self.text)
                raise UnexpectedText
            self.at = max(self.at, len(self.text) - len(end) + 1)
            yield
        self.at = end_at + len(end)
        return self.text[start:end_at]

    def value(self, quotes: str = '"') -> Reading[str]:
        """Skips white space, and reads and returns a JSON value as text. With other `quotes`, reads
        a value of Python. A value ends with the bracket or quote that closes it; a number or a word
        ends before a comma, a bracket or white space."""
        yield from self.visible()
        start, depth, quote = self.at, 0, ""
        while char := (yield from self.next()):
            if not depth and not quote and (char in ",)]}" or char.isspace()):
                return self.text[start : self.at]
            self.at += 1
            if char == "\\" and quote:
                yield from self.next()
                self.at += 1
            elif quote:
                quote = "" if char == quote else quote
            elif char in quotes:
                quote = char
            depth += 0 if quote else (char in _OPENING) - (char in _CLOSING)
            if not depth and not quote and char in quotes + _CLOSING:
                return self.text[start : self.at]
        raise UnexpectedText
