"""What a strategy is judged by, and what it must keep to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from onnxpar.base.units import quantity
from onnxpar.errors import StrategyError
from onnxpar.ir.training_spec import Step
from onnxpar.search.patience import Patience

LATENCY, THROUGHPUT = "latency", "throughput"
OBJECTIVES = (LATENCY, THROUGHPUT)
"""The time of a run, computing and talking one after the other; and the time from one run to the
next where several are under way, so that only the longer of the two counts."""


@dataclass(frozen=True)
class Objective:
    """The objective, and the bytes that a rank may hold at any time. Repeated blocks are split
    alike, unless `untied`. With `any_fit`, the first strategy that keeps to the limit will do."""

    goal: str = LATENCY
    memory: float | None = None
    untied: bool = False
    any_fit: bool = False
    patience: Patience = field(default_factory=Patience, compare=False)

    @classmethod
    def given(
        cls,
        objective: str | None,
        memory_limit: float | str | None,
        untied: bool = False,
        patience: Patience | None = None,
    ) -> Objective:
        """As users write it: bytes, or text with a unit, as 16GB. Errors: StrategyError."""
        memory = (
            None
            if memory_limit is None
            else quantity(memory_limit, "B", "--memory-limit", may_omit_unit=False)
        )
        if memory is not None and memory <= 0:
            raise StrategyError(f"--memory-limit {memory_limit}: must be more than nothing")
        return cls(objective or LATENCY, memory, untied, patience=patience or Patience())

    def check(self, step: Step | None) -> None:
        """Errors: StrategyError where there is no such objective, or none of a training step."""
        if self.goal not in OBJECTIVES:
            known = ", ".join(OBJECTIVES)
            raise StrategyError(f"--objective {self.goal!r}: there are {known}")
        if step is not None and self.goal != LATENCY:
            raise StrategyError(
                f"--objective {self.goal}: one training step waits for the other, so only its "
                "time counts; leave it out"
            )

    def seconds(self, compute: float, communication: float) -> float:
        """What the objective makes of both."""
        if self.goal == THROUGHPUT:
            return max(compute, communication)
        return compute + communication


class OverLimit(StrategyError):
    """No strategy was found that keeps to the limit on memory; `least` bytes are needed at least,
    where that is known; `found` bytes is what a strategy was found to hold."""

    def __init__(self, message: str, least: float | None, found: float = math.inf) -> None:
        super().__init__(message)
        self.least, self.found = least, found
