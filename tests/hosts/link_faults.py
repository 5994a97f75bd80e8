"""Random faults of the links between hosts, each from its seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

TIMEOUT = 3.0
"""Seconds that a rank waits for another one."""

KINDS = (
    *("loss", "delay", "reordering", "collapse", "cut", "short cut", "long cut"),
    *("one way", "partition", "mixture"),
)
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast")
TURNS = 14


@dataclass(frozen=True)
class Change:
    """So many seconds after the onset, packets between these hosts get this quality; pairs are
    (sender, receiver)."""

    after: float
    pairs: tuple[tuple[int, int], ...]
    quality: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A world whose links fail.

    counts    the ranks on each host
    at_start  True if the fault begins while ranks meet, False if while they run
    onset     seconds from the start, or from when all have met, until the fault
    model     True if they run a sharded model instead of `turns`: collectives and their rows
    pace      least seconds of a turn
    """

    seed: int
    kind: str
    counts: tuple[int, ...]
    at_start: bool
    onset: float
    model: bool
    turns: tuple[tuple[str, int], ...]
    pace: float
    changes: tuple[Change, ...] = field(default=())

    @property
    def places(self) -> list[int]:
        """The host of each rank."""
        return [host for host, count in enumerate(self.counts) for _ in range(count)]

    @property
    def broken(self) -> set[tuple[int, int]]:
        """The pairs of hosts whose link has a fault."""
        return {(min(pair), max(pair)) for change in self.changes for pair in change.pairs}

    @property
    def flows(self) -> bool:
        """Whether packets get through, slowly or not all, or again before the timeout. Then a
        collective of many messages may take longer than the timeout, which is that of each."""
        cuts = [change for change in self.changes if "cut" in change.quality]
        heals = bool(cuts) and not cuts[-1].quality["cut"]
        return not cuts or (heals and cuts[-1].after - cuts[0].after < TIMEOUT)

    def __str__(self) -> str:
        what = "a model" if self.model else f"{max(rows for _, rows in self.turns)} rows"
        when = "at the start" if self.at_start else "while running"
        return (
            f"{self.seed} ({self.kind} {when}, +{self.onset:.2f} s, ranks {self.counts}, {what}): "
            + "; ".join(f"{c.after:.2f} s {c.pairs} {c.quality}" for c in self.changes)
        )


def draw(seed: int) -> Case:
    """The fault of a seed. Ten seeds in a row have all kinds."""
    dice = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    hosts = 3 if kind == "partition" else dice.choice([2, 3])
    counts = tuple(dice.choice([1, 1, 2]) for _ in range(hosts))
    at_start = dice.random() < 0.35
    large = dice.random() < 0.5
    rows = [dice.randint(100_000, 200_000) if large else dice.randint(1, 2000) for _ in range(3)]
    return Case(
        seed=seed,
        kind=kind,
        counts=counts,
        at_start=at_start,
        onset=dice.choice([0.0, dice.uniform(0, 0.08)]) if at_start else dice.uniform(0, 0.8),
        model=dice.random() < 0.2,
        turns=tuple(
            (dice.choice(COLLECTIVES), dice.choice(rows) // sum(counts) + 1) for _ in range(TURNS)
        ),
        pace=0.1,
        changes=tuple(_changes(kind, hosts, dice)),
    )


def _changes(kind: str, hosts: int, dice: random.Random) -> Iterator[Change]:
    every = tuple(permutations(range(hosts), 2))
    if kind == "mixture":
        noise: dict[str, Any] = {}
        for each in dice.sample(["loss", "delay", "reordering"], 2):
            noise |= _noise(each, dice, 0.3)
        yield Change(0, every, noise)
        second = dice.choice(["none", "cut", "short cut", "long cut", "one way"])
        if second == "none":
            return
        for change in _changes(second, hosts, dice):
            yield Change(change.after + 0.3, change.pairs, change.quality)
        return
    if kind in ("loss", "delay", "reordering"):
        yield Change(0, every, _noise(kind, dice, 1.0))
        return
    if kind == "collapse":
        yield Change(0, every, {"rate": dice.choice([300.0, 2e3, 1e4, 2e6, 1e7])})
        return
    lonely = dice.randrange(hosts)
    around = tuple(pair for pair in every if lonely in pair)
    if kind == "one way":
        other = dice.choice([each for each in range(hosts) if each != lonely])
        away = tuple(pair for pair in every if pair[0] == lonely)
        yield Change(0, dice.choice([away, ((lonely, other),)]), {"cut": True})
        return
    if kind == "partition":
        first, second = dice.sample(range(hosts), 2)
        yield Change(0, ((first, second), (second, first)), {"cut": True})
        return
    yield Change(0, around, {"cut": True})
    if kind == "short cut":
        yield Change(TIMEOUT * dice.uniform(0.05, 0.7), around, {"cut": False})
    if kind == "long cut":
        yield Change(TIMEOUT + dice.uniform(0.5, 2), around, {"cut": False})


def _noise(kind: str, dice: random.Random, most: float) -> dict[str, Any]:
    if kind == "loss":
        return {"loss": most * dice.choice([0.01, 0.05, 0.2, 0.4])}
    if kind == "delay":
        latency = most * dice.choice([0.002, 0.02, 0.1])
        return {"latency": latency, "jitter": latency * dice.random()}
    return {"reorder": dice.choice([0.05, 0.3]), "late": dice.choice([0.002, 0.02])}
