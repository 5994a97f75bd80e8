"""Wall times of the passes of a command, and of its other work: loading, search, checks,
writing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from onnxpar.base.shown import Shown, text_of

LOAD, ANALYSE, SEARCH = "load", "analyse", "search"
CHECK_LAYOUTS, DUMP, SUMMARIZE = "check layouts", "dump", "summarize"
REPEAT, PREDICT = "repeat at other sizes", "predict at typical sizes"
WRITE, WRITE_GRAPH = "write plan.json", "write the graph"
OTHER = "other"
"""Names of rows for work that is not a pass. LOAD: reading the model, with the loader's rewrites;
ANALYSE: finding the factors of the graph; SEARCH: for a mesh and a strategy; CHECK_LAYOUTS: after
every pass; DUMP: writing dumps; SUMMARIZE: the tables of the plan; REPEAT: the passes at other
sizes of open dimensions; PREDICT: the times at typical sizes; WRITE: plan.json; WRITE_GRAPH: the
graph of `opt`; OTHER: the rest. The pass split-ranks writes the ranks."""


@dataclass
class Timed:
    """The number of runs of a pass or of other work, and its wall time in seconds without the time
    of timed work inside."""

    runs: int = 0
    seconds: float = 0.0


class PassTimes(Shown):
    """Collects wall times by name; `print` shows them as a table.

    times = onnxpar.PassTimes()
    onnxpar.shard("gpt2.onnx", devices=4, time_passes=times)
    print(times.rows["propagate-layouts"].seconds, times.seconds)
    """

    def __init__(self) -> None:
        self.rows: dict[str, Timed] = {}
        self._inside: list[float] = []

    @property
    def seconds(self) -> float:
        """The sum over all rows, in seconds."""
        return sum(row.seconds for row in self.rows.values())

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """A block whose time is added to the row `name`, and subtracted from the row of the block
        around it."""
        row = self.rows.setdefault(name, Timed())
        self._inside.append(0.0)
        start = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - start
            row.runs += 1
            row.seconds += took - self._inside.pop()
            if self._inside:
                self._inside[-1] += took


@text_of.register
def _(times: PassTimes) -> str:
    """A table in the order in which things first began, with the rest and the total at the end."""
    total = times.seconds
    rest = {OTHER: times.rows[OTHER]} if OTHER in times.rows else {}
    named = {name: row for name, row in times.rows.items() if name != OTHER} | rest
    lines = [("pass", "runs", "seconds", "share")]
    lines += [
        _line(name, "" if name == OTHER else str(row.runs), row.seconds, total)
        for name, row in named.items()
    ]
    lines.append(_line("total", "", total, total))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join((line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])))
        for line in lines
    )


def _line(name: str, runs: str, seconds: float, total: float) -> tuple[str, str, str, str]:
    return name, runs, f"{seconds:.3f}", f"{100 * seconds / total if total else 0:.0f}%"
