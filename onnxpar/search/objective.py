"""The objective of the search, and the limits that a strategy must keep."""

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
"""Latency is the time of one run: compute plus communication. Throughput is about the time from one
run to the next if runs overlap: only the larger of compute and communication counts."""


@dataclass(frozen=True)
class Objective:
    """The objective of the search (`goal`), and its limits. `memory` is the bytes that a rank may
    hold at any time; if `memories` has the bytes of each rank, that is the limit of the largest,
    and other ranks may hold less in proportion; weights and states `on_host` do not count. Repeated
    blocks get the same strategy unless `untied`. With `any_fit`, the search ends at the first
    strategy within the limit. Holding weights and states costs `holding` times the time to read
    them once from memory. With `hides_sums`, a training step hides gradient sums between hosts
    behind compute, as far as the link allows. Copies share the results `known`."""

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
        """The objective as users write it; memory is bytes, or text with a unit, as 16GB. Errors:
        StrategyError."""
        memory = (
            None
            if memory_limit is None
            else quantity(memory_limit, "B", "--memory-limit", may_omit_unit=False)
        )
        if memory is not None and memory <= 0:
            raise StrategyError(f"--memory-limit {memory_limit}: give more than 0")
        return cls(objective or LATENCY, memory, untied, patience=patience or Patience())

    def weight_of(self, rank: int) -> float:
        """The factor from bytes that a rank holds to bytes that count towards `memory`: more than 1
        for a rank that has less than others, 0 for one whose memory is unknown."""
        if not self.memories:
            return 1.0
        return max(m for m in self.memories if math.isfinite(m)) / self.memories[rank]

    def check(self, step: Step | None) -> None:
        """Raises StrategyError if the objective is unknown, or does not apply to a training
        step."""
        if self.goal not in OBJECTIVES:
            known = ", ".join(OBJECTIVES)
            raise StrategyError(f"--objective {self.goal!r} is unknown; use one of {known}")
        if step is not None and self.goal != LATENCY:
            raise StrategyError(
                f"--objective {self.goal}: each training step waits for the one before, so only "
                "its latency counts; leave the option out"
            )

    def seconds(self, compute: float, communication: float, hidden: float = 0.0) -> float:
        """The seconds to minimize, from the seconds of compute and of communication in a run, and
        of further communication that compute hides."""
        if self.goal == THROUGHPUT:
            return max(compute, communication + hidden)
        return compute + communication


class OverLimit(StrategyError):
    """No strategy within the limit on memory was found. Every strategy needs at least `least` bytes
    (None: unknown), including `states` bytes of states; the best strategy found needs `found`
    bytes. `is_proved` is True if no strategy is within the limit."""

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
