"""Learning-rate schedules."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onnxpar.errors import InputError

SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class Rate:
    """A learning rate that rises linearly to `peak` over `warmup` steps. For the rest of `steps`,
    the rate stays at `peak` (constant), or falls to zero linearly (linear) or along half a cosine
    (cosine)."""

    peak: float
    steps: int
    schedule: str = "constant"
    warmup: int = 0

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise InputError(f"--schedule {self.schedule!r}: give one of {', '.join(SCHEDULES)}")
        if not 0 <= self.peak < math.inf:
            raise InputError(f"--lr {self.peak}: the learning rate must be finite, and 0 or more")
        if not 0 <= self.warmup <= self.steps:
            raise InputError(
                f"--warmup {self.warmup}: the run has {self.steps} steps; give a number from 0 to "
                f"{self.steps}"
            )

    def at(self, step: int) -> float:
        """Returns the rate of a step; steps count from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        if self.schedule == "linear":
            return self.peak * (1 - done)
        if self.schedule == "cosine":
            return self.peak * (1 + math.cos(math.pi * done)) / 2
        return self.peak
