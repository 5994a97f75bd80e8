"""Learning-rate schedules, as Hugging Face's transformers and PyTorch define them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from onnxpar.base.errors import InputError

_TIMESCALE = 10_000
"""Steps after which an inverse square root has fallen to 1 / sqrt(2), if there is no warm-up."""


def check_rate(peak: float) -> None:
    """Checks a (peak) learning rate. Errors: InputError unless it is finite, and 0 or more."""
    if not 0 <= peak < math.inf:
        raise InputError(f"--lr {peak}: the learning rate must be finite, and 0 or more")


@dataclass(frozen=True)
class Schedule:
    """How a learning rate falls from its peak, after it has risen linearly over `warmup` steps.

    kind    constant: it does not fall; linear, cosine (half of one), polynomial (of degree
            `power`, 1 by default): to `min_lr` at the end of the run; step: by the factor
            `gamma` (0.1 by default) every `step_size` steps; inverse-sqrt: with the root of
            the number of steps; wsd (warm-up, stable, decay): along half a cosine in the last
            `decay_steps` steps
    min_lr  the least rate after warm-up
    """

    kind: str = "constant"
    warmup: int = 0
    min_lr: float = 0.0
    power: float | None = None
    step_size: int | None = None
    gamma: float | None = None
    decay_steps: int | None = None

    def __post_init__(self) -> None:
        """Checks the fields. Errors: InputError for a schedule that no run can have."""
        if self.kind not in SCHEDULES:
            raise InputError(f"--schedule {self.kind!r}: give one of {', '.join(SCHEDULES)}")
        if self.warmup < 0:
            raise InputError(f"--warmup {self.warmup}: give a number of steps, or 0 for none")
        if self.min_lr and self.kind == "constant":
            raise InputError(f"--min-lr {self.min_lr}: a constant rate does not fall; leave it out")
        for option, kind, is_needed, value in (
            ("--lr-power", "polynomial", False, self.power),
            ("--lr-gamma", "step", False, self.gamma),
            ("--lr-step-size", "step", True, self.step_size),
            ("--decay-steps", "wsd", True, self.decay_steps),
        ):
            if value is None and is_needed and self.kind == kind:
                raise InputError(f"--schedule {kind}: give {option}, a number of steps")
            if value is not None and self.kind != kind:
                raise InputError(f"{option} {value}: it is for --schedule {kind}; leave it out")
            if value is not None and not (1 if is_needed else 0) <= value < math.inf:
                raise InputError(f"{option} {value}: must be {1 if is_needed else 0} or more")


ENDING = ("linear", "cosine", "polynomial", "wsd")
"""The schedules whose rates depend on the number of steps of a run."""


@dataclass(frozen=True)
class Rate:
    """The learning rate of each step of a run of `steps` steps (None: unknown until the run ends).
    Errors: InputError if the schedule does not fit the run."""

    peak: float
    steps: int | None
    schedule: Schedule

    def __post_init__(self) -> None:
        check_rate(self.peak)
        warmup, least = self.schedule.warmup, self.schedule.min_lr
        if not 0 <= least <= self.peak:
            raise InputError(f"--min-lr {least}: give a number from 0 to --lr, {self.peak}")
        if self.steps is None and self.schedule.kind in ENDING:
            raise InputError(
                f"--schedule {self.schedule.kind}: it depends on the number of steps of the run, "
                "which this data does not tell; give --max-steps (max_steps=)"
            )
        if self.steps is None:
            return
        rest = self.steps - warmup
        if rest < 0:
            raise InputError(
                f"--warmup {warmup}: the run has {self.steps} steps; give a number from 0 to "
                f"{self.steps}"
            )
        if (self.schedule.decay_steps or 0) > rest:
            raise InputError(
                f"--decay-steps {self.schedule.decay_steps}: the run has {rest} steps after "
                f"warm-up; give a number from 1 to {rest}"
            )

    def at(self, step: int) -> float:
        """Returns the rate of a step; steps count from 0."""
        if step < self.schedule.warmup:
            return self.peak * (step + 1) / self.schedule.warmup
        return SCHEDULES[self.schedule.kind](self, step - self.schedule.warmup)

    def _between(self, share: float) -> float:
        """Returns the rate at a share of the way from the least rate (0) to the peak (1)."""
        return self.schedule.min_lr + (self.peak - self.schedule.min_lr) * share

    def _left(self, step: int) -> float:
        """Returns the share of the steps after warm-up that is left at `step`, counted after
        warm-up."""
        assert self.steps is not None
        return 1 - step / max(self.steps - self.schedule.warmup, 1)

    def _constant(self, step: int) -> float:
        """Returns the rate at a step after warm-up, as the functions below do: here, always the
        peak."""
        return self.peak

    def _linear(self, step: int) -> float:
        """Returns a rate that falls in a line to the least rate at the end of the run."""
        return self._between(self._left(step))

    def _cosine(self, step: int) -> float:
        """Returns a rate that falls along half a cosine to the least rate at the end of the run."""
        return self._between((1 + math.cos(math.pi * (1 - self._left(step)))) / 2)

    def _polynomial(self, step: int) -> float:
        """Returns a rate that falls with a power of the share of steps that are left."""
        power = 1.0 if self.schedule.power is None else self.schedule.power
        return self._between(self._left(step) ** power)

    def _steps(self, step: int) -> float:
        """Returns a rate that is multiplied by gamma every `step_size` steps."""
        assert self.schedule.step_size is not None
        gamma = 0.1 if self.schedule.gamma is None else self.schedule.gamma
        fallen = gamma ** (step // self.schedule.step_size)
        return max(self.peak * fallen, self.schedule.min_lr)

    def _inverse_root(self, step: int) -> float:
        """Returns a rate that falls with the inverse root of the step."""
        scale = self.schedule.warmup or _TIMESCALE
        return max(self.peak / math.sqrt((step + scale) / scale), self.schedule.min_lr)

    def _stable(self, step: int) -> float:
        """Returns the peak until the last `decay_steps` steps, in which the rate falls along half a
        cosine."""
        assert self.schedule.decay_steps is not None and self.steps is not None
        stable = self.steps - self.schedule.warmup - self.schedule.decay_steps
        done = max(step - stable, 0) / self.schedule.decay_steps
        return self._between((1 + math.cos(math.pi * done)) / 2)


SCHEDULES: Mapping[str, Callable[[Rate, int], float]] = {
    "constant": Rate._constant,
    "linear": Rate._linear,
    "cosine": Rate._cosine,
    "polynomial": Rate._polynomial,
    "step": Rate._steps,
    "inverse-sqrt": Rate._inverse_root,
    "wsd": Rate._stable,
}
"""The rate of a step after warm-up, by the name of the schedule."""
CONSTANT = Schedule()
