"""What the search has proved about strategies that it did not choose."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Proof:
    """How far the strategy that the search found may be from the best one.

    seconds      of a run with this strategy, as the search counts them
    bound        every compared strategy takes at least this many seconds; 0 if nothing is proved
    axes         the bound holds for all meshes with at most this many axes; None: for the plan's
                 mesh
    memory       the bound holds for strategies that need at most this many bytes of a rank, as the
                 search counts them; None: for all
    is_complete  False if nodes had too many strategies to compare all
    hides_sums   True if the sums of gradients between hosts count as hidden, in `seconds` and in
                 `bound`
    """

    seconds: float
    bound: float
    axes: int | None = None
    memory: float | None = None
    is_complete: bool = True
    hides_sums: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns the proof as plan.json has it."""
        data = asdict(self)
        is_complete = data.pop("is_complete")
        return {**data, "complete": is_complete}
