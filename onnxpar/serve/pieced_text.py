"""Reads a text whose end has not come yet."""

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
    """A text that comes in pieces, and a position in it, from which methods read. Errors:
    UnexpectedText.

    at           the position
    is_complete  True if no further piece comes
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_complete = False

    def next(self) -> Reading[str]:
        """Returns the next character, without reading on; an empty text at the end."""
        while self.at == len(self.text) and not self.is_complete:
            yield
        return self.text[self.at : self.at + 1]

    def visible(self) -> Reading[str]:
        """Skips white space; returns the next character, without reading on."""
        while (char := (yield from self.next())).isspace():
            self.at += 1
        return char

    def take(self, chars: str) -> Reading[str]:
        """Reads the next character after white space, which must be one of `chars`."""
        char = yield from self.visible()
        if not char or char not in chars:
            raise UnexpectedText
        self.at += 1
        return char

    def word(self) -> Reading[str]:
        """Reads a name of letters, digits and `_.-`."""
        yield from self.visible()
        start = self.at
        while (char := (yield from self.next())) and (char.isalnum() or char in "_.-"):
            self.at += 1
        if start == self.at:
            raise UnexpectedText
        return self.text[start : self.at]

    def one_of(self, options: Sequence[str]) -> Reading[str | None]:
        """Reads one of several texts. If none of them comes next, returns None and reads
        nothing."""
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
        """Skips white space and reads one of several texts. If the end of the text cuts the option,
        reads the beginning of it before the error."""
        yield from self.visible()
        option = yield from self.one_of(options)
        if option is None:
            rest = self.text[self.at :]
            self.at += len(rest) if any(option.startswith(rest) for option in options) else 0
            raise UnexpectedText
        return option

    def until(self, end: str) -> Reading[str]:
        """Reads up to the text `end`, and `end` itself; returns the text before it."""
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
        """Reads a value of JSON or, with `quotes`, of Python: up to the bracket or quote that
        closes it, or to the comma, bracket or white space after a number or a word."""
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
