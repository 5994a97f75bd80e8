"""Prediction beside measurement, as data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from onnxpar.base.shown import Shown
from onnxpar.search.predict import Prediction

NOTHING_RAN = "(nothing ran)"


@dataclass(frozen=True)
class Computed:
    """A set of nodes. `ops` are their types in the model, `ran` those of what onnxruntime ran for
    them, `calls` times in a run; seconds are of a run, on the rank that computes longest."""

    nodes: tuple[str, ...]
    ops: tuple[str, ...]
    ran: tuple[str, ...]
    calls: int
    predicted: float | None
    measured: float

    @property
    def label(self) -> str:
        """One type for all of it: that in the model if it is one, else what ran if that is."""
        if not self.ran:
            return NOTHING_RAN
        if len(self.ops) == 1:
            return self.ops[0]
        return self.ran[0] if len(self.ran) == 1 or not self.ops else " + ".join(self.ops)


@dataclass(frozen=True)
class Communicated:
    """A collective, or all of those inside an op. `bytes` are what a rank sends in a run, None
    where the plan does not say; `measured` is without `wait`; both are means of the ranks."""

    node: str
    kind: str
    tensor: str
    calls: int
    bytes: int | None
    predicted: float | None
    measured: float
    wait: float


@dataclass(frozen=True)
class OpType:
    """All sets of one label."""

    op: str
    nodes: int
    predicted: float | None
    measured: float


@dataclass(frozen=True)
class Comparison(Shown):
    """Prediction beside measurement, in seconds of a run: the mean of `runs`, the middle half by
    length of those that were `recorded`. `rank` is the one that computes longest;
    `length` is from a run's begin on the first rank to its end on the last; `sizes` are the open
    ones that the prediction is for: those of the runs, where the trace has them."""

    model: str
    mesh: tuple[tuple[str, int], ...]
    runs: int
    recorded: int
    rank: int
    length: float
    computed: Sequence[Computed]
    talked: Sequence[Communicated]
    sizes: str = ""

    @property
    def predicted(self) -> Prediction:
        """What the cost model says."""
        compute, talk = (sum(r.predicted or 0.0 for r in rows) for rows in self._both)
        return Prediction(compute, talk)

    @property
    def measured(self) -> Prediction:
        """What was measured, without waiting."""
        compute, talk = (sum(r.measured for r in rows) for rows in self._both)
        return Prediction(compute, talk)

    @property
    def wait(self) -> float:
        """Seconds that a rank waits for others, on average."""
        return sum(t.wait for t in self.talked)

    @property
    def _both(self) -> tuple[Sequence[Computed], Sequence[Communicated]]:
        return self.computed, self.talked

    def op_types(self) -> list[OpType]:
        """Sets of nodes by what they are, that which took longest first."""
        by_label: dict[str, list[Computed]] = defaultdict(list)
        for row in self.computed:
            by_label[row.label].append(row)
        types = [
            OpType(
                label,
                sum(max(len(row.nodes), 1) for row in rows),
                sum_known(row.predicted for row in rows),
                sum(row.measured for row in rows),
            )
            for label, rows in by_label.items()
        ]
        return sorted(types, key=lambda t: -t.measured)

    def worst(self) -> list[Computed | Communicated]:
        """Everything, by how many seconds the prediction is off; the worst first."""
        rows: list[Computed | Communicated] = [*self.computed, *self.talked]
        return sorted(rows, key=lambda row: -abs(row.measured - (row.predicted or 0.0)))

    def to_json(self) -> dict[str, Any]:
        """All of it, in seconds; `ratio` is measured by predicted, None where nothing is."""
        predicted, measured = self.predicted, self.measured
        totals = {
            key: _with_ratio({"predicted": getattr(predicted, key), "measured": own})
            for key, own in (*asdict(measured).items(), ("total", measured.total))
        }
        return {
            "model": self.model,
            "mesh": [list(axis) for axis in self.mesh],
            "runs": self.runs,
            "recorded": self.recorded,
            "rank": self.rank,
            **totals,
            "wait": self.wait,
            "run": self.length,
            "ops": [_with_ratio(asdict(t)) for t in self.op_types()],
            "collectives": [_with_ratio(asdict(t)) for t in self.talked],
            "nodes": [_with_ratio({"op": c.label, **asdict(c)}) for c in self.computed],
        }


def sum_known(values: Iterable[float | None]) -> float | None:
    """The sum of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _with_ratio(entry: dict[str, Any]) -> dict[str, Any]:
    predicted = entry["predicted"]
    return {**entry, "ratio": entry["measured"] / predicted if predicted else None}
