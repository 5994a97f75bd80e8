"""Reads text of which the end has not come yet."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""What waits, by `yield`, until there is more text, and then goes on."""
_OPENING, _CLOSING = "([{", ")]}"


class UnexpectedText(Exception):
    """There is something else than what is read, or nothing any more."""


class PiecedText:
    """Text that comes in pieces, and a place in it, from which methods read. Errors:
    UnexpectedText.

    at           the place
    is_complete  True if no more comes
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_complete = False

    def next(self) -> Reading[str]:
        """Returns the next character, which stays; an empty text at the end."""
        while self.at == len(self.text) and not self.is_complete:
            yield
        return self.text[self.at : self.at + 1]

    def visible(self) -> Reading[str]:
        """Skips white space; returns the next character, which stays."""
        while (char := (yield from self.next())).isspace():
            self.at += 1
        return char

    def take(self, chars: str) -> Reading[str]:
        """Reads the next character that is no white space, which must be one of these."""
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
        """Reads one of several texts; returns None, and reads nothing, if there is none of them."""
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
        """Reads one of several texts behind white space. One that the end cuts is read, too, before
        the error."""
        yield from self.visible()
        found = yield from self.one_of(options)
        if found is None:
            rest = self.text[self.at :]
            self.at += len(rest) if any(option.startswith(rest) for option in options) else 0
            raise UnexpectedText
        return found

    def until(self, end: str) -> Reading[str]:
        """Reads up to a text, and this; returns what is in front of it."""
        start = self.at
        while (found := self.text.find(end, self.at)) < 0:
            if self.is_complete:
                self.at = len(self.text)
                raise UnexpectedText
            self.at = max(self.at, len(self.text) - len(end) + 1)
            yield
        self.at = found + len(end)
        return self.text[start:found]

    def value(self, quotes: str = '"') -> Reading[str]:
        """Reads a value of JSON or, by its quotes, of Python: up to the bracket or quote that
        closes it, or to the comma, bracket or white space behind a number or a word."""
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
