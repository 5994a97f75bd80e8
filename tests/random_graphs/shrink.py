"""Decisions that can be drawn again, and fewer of them: how a failing graph becomes a small one.

Hypothesis draws too often the same small numbers to reach most ops and splits in a few hundred
graphs, so that decisions are drawn evenly here and only their list is shrunk.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Draw = Callable[[int, int], int]
Check = Callable[[Draw], None]


class Unsuitable(Exception):
    """These decisions make no graph that the unsplit model could be run on."""


@dataclass
class Recorded:
    """Draws evenly, and remembers what was drawn."""

    seed: int
    drawn: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._source = random.Random(self.seed)

    def __call__(self, low: int, high: int) -> int:
        self.drawn.append(self._source.randint(low, high) - low)
        return low + self.drawn[-1]


@dataclass
class Replayed:
    """Draws what the list says, from the low end of each range; then the lowest."""

    decisions: Sequence[int]
    used: int = 0

    def __call__(self, low: int, high: int) -> int:
        at, self.used = self.used, self.used + 1
        return low + min(self.decisions[at] if at < len(self.decisions) else 0, high - low)


def failure(check: Check, draw: Draw) -> Exception | None:
    """What the check raises, None where it holds or does not apply."""
    try:
        check(draw)
    except Unsuitable:
        return None
    except Exception as error:  # any error is a failure of the compiler
        return error
    return None


def shrink(check: Check, decisions: Sequence[int], tries: int = 300) -> list[int]:
    """Decisions that still fail with the same type of error: fewer, then lower ones."""
    kind = type(failure(check, Replayed(decisions)))
    best = list(decisions)

    def fails(candidate: Sequence[int]) -> bool:
        nonlocal tries
        tries -= 1
        return type(failure(check, Replayed(candidate))) is kind

    for length in (32, 16, 8, 4, 2, 1):
        at = len(best) - length
        while at >= 0 and tries > 0:
            candidate = best[:at] + best[at + length :]
            if fails(candidate):
                best = candidate
            at -= length
    for at in range(len(best)):
        if best[at] and tries > 0 and fails([*best[:at], 0, *best[at + 1 :]]):
            best[at] = 0
    return best
