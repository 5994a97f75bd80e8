"""The parts of an answer: text, and calls of tools (functions that the client offers)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Text:
    """A part: text of an answer outside of calls."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A part: the beginning of a call of the tool `name`. `index` numbers the calls of an answer,
    `id` is the call's id for the client."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A part: a piece of the arguments of call number `index`, in JSON."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """A part: the end of call number `index`. `outcome` is "malformed" for text that turned out to
    be no call, and follows again as content, and "cut" if the answer was cut within the call."""

    index: int
    outcome: Literal["right", "malformed", "cut"]


Part = Text | CallBegin | CallArguments | CallEnd
"""A part of an answer."""


@dataclass
class Call:
    """A call of a tool, with its arguments in JSON as far as they have come."""

    id: str
    name: str
    arguments: str = ""


class Calls:
    """Collects the calls of an answer from its parts. `well_formed` has the complete calls, and a
    call that was cut, but no malformed ones."""

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
