"""The parts of an answer: content, and calls of tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Text:
    """Content: text of an answer outside of calls."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """The beginning of a call of a tool; `index` numbers the calls of an answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of a call's arguments, in JSON."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The end of a call. `outcome` is "malformed" for a call that follows again as content, and
    "cut" if the answer was cut within the call."""

    index: int
    outcome: Literal["right", "malformed", "cut"]


Part = Text | CallBegin | CallArguments | CallEnd
"""A part of an answer."""


@dataclass
class Call:
    """A call of a tool, with the arguments that have come so far."""

    id: str
    name: str
    arguments: str = ""


class Calls:
    """Collects the calls of an answer from its parts; `well_formed` has all calls but malformed
    ones."""

    def __init__(self) -> None:
        self.well_formed: list[Call] = []
        self._last: Call | None = None

    def add(self, part: Part) -> None:
        """Adds a part of the answer."""
        if isinstance(part, CallBegin):
            self._last = Call(part.id, part.name)
        elif self._last is not None and isinstance(part, CallArguments):
            self._last.arguments += part.text
        elif self._last is not None and isinstance(part, CallEnd) and part.outcome != "malformed":
            self.well_formed.append(self._last)
