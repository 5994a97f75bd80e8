"""What the search minimizes, and the limits that a strategy must keep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from onnxpar.base.errors import StrategyError
from onnxpar.base.units import quantity
from onnxpar.graph.training_spec import Step
from onnxpar.search.known import Known
from onnxpar.search.patience import Patience

LATENCY, THROUGHPUT = "latency", "throughput"
OBJECTIVES = (LATENCY, THROUGHPUT)
"""What to minimize. Latency is the time of one run: compute plus communication. Throughput is about
the time from one run to the next if runs overlap: only the larger of compute and communication
counts."""


@dataclass(frozen=True)
class Objective:
    """The goal of the search, and its limits.

    goal        LATENCY or THROUGHPUT
    memory      the bytes that a rank may have at any time; None: any
    untied      True if repeated blocks, such as the layers of a model, may get different strategies
    any_fit     True to end the search at the first strategy within the limit
    holding     the cost of having weights and states in memory, as a multiple of the time to read
                them once
    hides_sums  True if a training step hides gradient sums between hosts behind compute, as far as
                the link allows
    memories    if ranks differ, the bytes of each rank; `memory` is then the limit of the largest,
                and other ranks may have less in proportion
    on_host     names of weights and states that do not count, because they stay on the host
    patience    the time limit of the search
    known       results that copies of this objective share
    """

    goal: str = LATENCY
    memory: float | None = None
    untied: bool = False
    any_fit: bool = False
    holding: float = 0.0
    hides_sums: bool = False
    memories: tuple[float, ...] = ()
    on_host: Sequence[str] = ()
    patience: Patience = field(default_factory=Patience, compare=False)
    known: Known = field(default_factory=Known, compare=False, repr=False)

    @classmethod
    def from_argument(
        cls,
        objective: str | None,
        memory_limit: float | str | None,
        untied: bool = False,
        patience: Patience | None = None,
    ) -> Objective:
        """Returns the objective as users write it; `memory_limit` is bytes, or text with a unit,
        such as 16GB. Errors: StrategyError if the limit is not positive."""
        memory = (
            None
            if memory_limit is None
            else quantity(memory_limit, "B", "--memory-limit", may_omit_unit=False)
        )
        if memory is not None and memory <= 0:
            raise StrategyError(f"--memory-limit {memory_limit}: give more than 0")
        return cls(objective or LATENCY, memory, untied, patience=patience or Patience())

    def weight_of(self, rank: int) -> float:
        """Returns the factor by which the bytes of a rank count towards `memory`: more than 1 for a
        rank that has less memory than others, 0 for one whose memory is unknown."""
        if not self.memories:
            return 1.0
        return max(m for m in self.memories if math.isfinite(m)) / self.memories[rank]

    def check(self, step: Step | None) -> None:
        """Raises a StrategyError if the goal is unknown, or does not apply to a training step."""
        if self.goal not in OBJECTIVES:
            known = ", ".join(OBJECTIVES)
            raise StrategyError(f"--objective {self.goal!r} is unknown; use one of {known}")
        if step is not None and self.goal != LATENCY:
            raise StrategyError(
                f"--objective {self.goal}: each training step waits for the one before, so only "
                "its latency counts; leave the option out"
            )

    def seconds(self, compute: float, communication: float, hidden: float = 0.0) -> float:
        """Returns the seconds to minimize, from the seconds of compute, of communication, and of
        further communication that compute hides."""
        if self.goal == THROUGHPUT:
            return max(compute, communication + hidden)
        return compute + communication


class OverLimit(StrategyError):
    """No strategy within the limit on memory was found.

    least      bytes that every strategy needs at least; None: unknown
    found      bytes that the best strategy found needs
    is_proved  True if it is proved that no strategy is within the limit
    states     the part of `least` that states need
    """

    def __init__(
        self,
        message: str,
        least: float | None,
        found: float = math.inf,
        is_proved: bool = False,
        states: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.least, self.found, self.is_proved, self.states = least, found, is_proved, states
