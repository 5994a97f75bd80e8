"""An attempt at a plan of a model, and the plan that results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from onnxpar.base.units import text_of
from onnxpar.compiler.pass_ import PassContext
from onnxpar.compiler.plan import Plan
from onnxpar.graph.tensors import Whole
from onnxpar.planner.observer import Observer
from onnxpar.planner.options import Options
from onnxpar.search.objective import Objective


@dataclass(frozen=True)
class Attempt:
    """The options that a planner may change from one plan of a model to the next; all others are
    the user's.

    objective  the objective of the search; its limit on memory may be lower than the user's
    devices    the number of ranks; None: the ranks of the mesh
    page_size  tokens of a page of the caches; 0 or None: the caches stay as in the model
    shares     the shares of the work, by rank, if the parts of ranks may differ; empty: in
               proportion to their speeds
    whole      nodes, and factors of them, that stay whole because sizes are open
    """

    objective: Objective
    devices: int | None
    page_size: int | None
    shares: tuple[float, ...] = ()
    whole: Whole = field(default_factory=dict)

    @classmethod
    def first(cls, options: Options) -> Attempt:
        """The attempt with the user's own options."""
        return cls(options.objective, options.devices, options.page_size)

    def on(self, options: Options) -> Options:
        """The options with the attempt's changes."""
        return replace(
            options,
            objective=self.objective,
            devices=self.devices,
            page_size=self.page_size,
            shares=self.shares,
        )

    def text(self, chosen: Attempt) -> str:
        """The differences from the chosen attempt, as text."""
        return " and ".join(self._differences(chosen)) or "the same again"

    def _differences(self, chosen: Attempt) -> Iterator[str]:
        objective, other = self.objective, chosen.objective
        if objective.memory != other.memory:
            limit = (
                "no limit"
                if objective.memory is None
                else f"{text_of(objective.memory, 'B')} a rank"
            )
            yield f"with {limit} in the search"
        if objective.hides_sums != other.hides_sums:
            how = "hidden by compute" if objective.hides_sums else "counted in full"
            yield f"with sums of gradients {how} in the search"
        if self.shares != chosen.shares:
            yield "with other shares of the work"
        if self.page_size != chosen.page_size:
            yield "with caches in pages" if self.page_size else "without pages"


@dataclass(frozen=True)
class Planned:
    """The plan of an attempt, the context of its passes, and the observer of these passes."""

    attempt: Attempt
    plan: Plan
    ctx: PassContext
    seen: Observer

    def text(self, promises_times: bool) -> str:
        """The memory that the plan needs, and its predicted time if the plan promises times."""
        needed = f"{text_of(self.plan.held, 'B')} a rank"
        if self.plan.predicted is None or not promises_times:
            return needed
        return f"{self.plan.predicted.total * 1e3:.3f} ms and {needed}"
