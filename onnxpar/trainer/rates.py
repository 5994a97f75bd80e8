"""Learning rates over the steps of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onnxpar.errors import InputError

SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class Rate:
    """A learning rate that rises linearly over `warmup` steps to `peak`, and from there to the end
    of `steps` stays, or falls to zero along a line or half a cosine."""

    peak: float
    steps: int
    schedule: str = "constant"
    warmup: int = 0

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise InputError(f"schedule {self.schedule!r}: there are {', '.join(SCHEDULES)}")
        if not 0 <= self.peak < math.inf:
            raise InputError(f"a learning rate of {self.peak}: must be 0 or more, and finite")
        if not 0 <= self.warmup <= self.steps:
            raise InputError(f"a warmup of {self.warmup} steps in a run of {self.steps}")

    def at(self, step: int) -> float:
        """The rate of a step; the first is 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        if self.schedule == "linear":
            return self.peak * (1 - done)
        if self.schedule == "cosine":
            return self.peak * (1 + math.cos(math.pi * done)) / 2
        return self.peak
