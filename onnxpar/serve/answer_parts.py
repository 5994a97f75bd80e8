"""What an answer consists of: content, and calls of tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Text:
    """Content."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """The beginning of a call.

    index  its number
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the arguments of a call, in JSON."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The end of a call.

    how  it is right; it is malformed, and follows as content; or the answer has been cut within it
    """

    index: int
    how: Literal["right", "malformed", "cut"]


Part = Text | CallBegin | CallArguments | CallEnd
"""What an answer consists of."""


@dataclass
class Call:
    """A call, as far as it has come."""

    id: str
    name: str
    arguments: str = ""


class Calls:
    """The calls of an answer, from its parts.

    made  those that are not malformed
    """

    def __init__(self) -> None:
        self.made: list[Call] = []
        self._last: Call | None = None

    def add(self, part: Part) -> None:
        """Adds a part."""
        if isinstance(part, CallBegin):
            self._last = Call(part.id, part.name)
        elif self._last is not None and isinstance(part, CallArguments):
            self._last.arguments += part.text
        elif self._last is not None and isinstance(part, CallEnd) and part.how != "malformed":
            self.made.append(self._last)
