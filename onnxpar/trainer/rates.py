"""Learning-rate schedules."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onnxpar.errors import InputError

SCHEDULES = ("constant", "linear", "cosine")


def check_rate(peak: float, schedule: str = SCHEDULES[0], warmup: int = 0) -> None:
    """Checks the options of a schedule for a run of any length. Errors: InputError."""
    if schedule not in SCHEDULES:
        raise InputError(f"--schedule {schedule!r}: give one of {', '.join(SCHEDULES)}")
    if not 0 <= peak < math.inf:
        raise InputError(f"--lr {peak}: the learning rate must be finite, and 0 or more")
    if warmup < 0:
        raise InputError(f"--warmup {warmup}: give a number of steps, or 0 for none")


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
        check_rate(self.peak, self.schedule, self.warmup)
        if self.warmup > self.steps:
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
