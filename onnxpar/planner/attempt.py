"""An attempt at a plan of a model, and the plan that came of it."""

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
    """Those options that a planner varies from one plan of a model to the next; all others are the
    user's.

    objective  the objective of the search; its limit on memory may be lower than the user's
    devices    the number of ranks; None: that of the mesh
    page_size  tokens of a page of the caches; 0 or None: the caches stay as in the model
    shares     the share of the work that each rank takes, with --balance; empty: in proportion to
               the speed of its device
    whole      nodes, and factors of them, that must stay whole because sizes are open
    """

    objective: Objective
    devices: int | None
    page_size: int | None
    shares: tuple[float, ...] = ()
    whole: Whole = field(default_factory=dict)

    @classmethod
    def first(cls, options: Options) -> Attempt:
        """Returns the first attempt: the user's own options."""
        return cls(options.objective, options.devices, options.page_size)

    def on(self, options: Options) -> Options:
        """Returns the user's options with the changes of the attempt."""
        return replace(
            options,
            objective=self.objective,
            devices=self.devices,
            page_size=self.page_size,
            shares=self.shares,
        )

    def text(self, chosen: Attempt) -> str:
        """Returns how this attempt differs from the `chosen` one, for a note to the user."""
        return " and ".join(self._differences(chosen)) or "the same again"

    def _differences(self, chosen: Attempt) -> Iterator[str]:
        """Yields the differences from the chosen attempt, as texts."""
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
    """A plan, with the attempt from which it came, the context after its passes, and the observer
    that saw them."""

    attempt: Attempt
    plan: Plan
    ctx: PassContext
    seen: Observer

    def text(self, promises_times: bool) -> str:
        """Returns the memory that the plan needs; with `promises_times`, also its predicted time,
        as `1.234 ms and 2 GB a rank`."""
        needed = f"{text_of(self.plan.held, 'B')} a rank"
        if self.plan.predicted is None or not promises_times:
            return needed
        return f"{self.plan.predicted.total * 1e3:.3f} ms and {needed}"
