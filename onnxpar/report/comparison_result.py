"""The result of comparing predicted with measured times."""

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
    """The times of a set of nodes, in seconds per run, on the rank that computes longest.

    nodes      their names
    ops        their op types in the model
    ran        the op types that onnxruntime ran for them
    calls      how many nodes onnxruntime ran for them in a run
    predicted  None: there is no prediction
    """

    nodes: tuple[str, ...]
    ops: tuple[str, ...]
    ran: tuple[str, ...]
    calls: int
    predicted: float | None
    measured: float

    @property
    def label(self) -> str:
        """The name of the set in tables: its op type in the model if there is only one, else the op
        type that ran if there is only one, else all op types in the model."""
        if not self.ran:
            return NOTHING_RAN
        if len(self.ops) == 1:
            return self.ops[0]
        return self.ran[0] if len(self.ran) == 1 or not self.ops else " + ".join(self.ops)


@dataclass(frozen=True)
class Communicated:
    """The times of a collective, or of all collectives inside an op, in seconds per run: means over
    the ranks.

    bytes     that a rank sends per run; None if unknown
    wait      the time for which a rank waits for others
    measured  the rest of the measured time
    """

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
    """The times of all sets of nodes with the same label; `nodes` is their number."""

    op: str
    nodes: int
    predicted: float | None
    measured: float


@dataclass(frozen=True)
class Comparison(Shown):
    """Predicted and measured times, in seconds per run.

    runs      number of runs whose times are averaged: the middle half, by length, of the `recorded`
              runs
    rank      the rank that computes longest
    length    from the start of a run on the first rank to its end on the last
    computed  times of sets of nodes
    talked    times of collectives
    session   the time of a run outside of ranks; None if the trace does not have it
    sizes     the open sizes of the predictions: sizes of the runs, if the trace has them
    """

    model: str
    mesh: tuple[tuple[str, int], ...]
    runs: int
    recorded: int
    rank: int
    length: float
    computed: Sequence[Computed]
    talked: Sequence[Communicated]
    session: float | None = None
    predicted_session: float = 0.0
    sizes: str = ""

    @property
    def predicted(self) -> Prediction:
        """The sums of all predicted times, of compute and communication."""
        compute, communication = (sum(r.predicted or 0.0 for r in rows) for rows in self._both)
        return Prediction(compute, communication)

    @property
    def measured(self) -> Prediction:
        """The sums of all measured times, of compute and communication, without waiting."""
        compute, communication = (sum(r.measured for r in rows) for rows in self._both)
        return Prediction(compute, communication)

    @property
    def wait(self) -> float:
        """Seconds per run that a rank waits for others, on average over the ranks."""
        return sum(t.wait for t in self.talked)

    @property
    def _both(self) -> tuple[Sequence[Computed], Sequence[Communicated]]:
        return self.computed, self.talked

    def op_types(self) -> list[OpType]:
        """Returns the times by label, the longest measured first."""
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
        """Returns all rows, sorted by the error of the prediction in seconds, the largest first."""
        rows: list[Computed | Communicated] = [*self.computed, *self.talked]
        return sorted(rows, key=lambda row: -abs(row.measured - (row.predicted or 0.0)))

    def to_json(self) -> dict[str, Any]:
        """Returns the comparison as JSON value, with times in seconds; `ratio` is measured /
        predicted, None without a prediction."""
        predicted, measured = self.predicted, self.measured
        totals = {
            key: _with_ratio({"predicted": getattr(predicted, key), "measured": own})
            for key, own in (*asdict(measured).items(), ("total", measured.total))
        }
        session = {"predicted": self.predicted_session or None, "measured": self.session}
        return {
            "model": self.model,
            "mesh": [list(axis) for axis in self.mesh],
            "runs": self.runs,
            "recorded": self.recorded,
            "rank": self.rank,
            **totals,
            "wait": self.wait,
            "session": session,
            "run": self.length + (self.session or 0.0),
            "ops": [_with_ratio(asdict(t)) for t in self.op_types()],
            "collectives": [_with_ratio(asdict(t)) for t in self.talked],
            "nodes": [_with_ratio({"op": c.label, **asdict(c)}) for c in self.computed],
        }


def sum_known(values: Iterable[float | None]) -> float | None:
    """Returns the sum of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _with_ratio(entry: dict[str, Any]) -> dict[str, Any]:
    predicted = entry["predicted"]
    return {**entry, "ratio": entry["measured"] / predicted if predicted else None}
