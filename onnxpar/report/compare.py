"""Compares every output of a sharded model with the unsplit model's output on the same feeds."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from textwrap import wrap
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import ModelError
from onnxpar.report.sensitivity import (
    CHANGE,
    COARSE_CHANGE,
    LARGE,
    MARGIN,
    RUNS,
    movements,
)
from onnxpar.report.unsplit import Unsplit
from onnxpar.runtime.ranks.cores import own_cores
from onnxpar.runtime.session.session import InferenceSession, Session
from onnxpar.runtime.session.values import arrays_in

TOLERANCES: Mapping[str, float] = {
    "float64": 1e-12,
    "float32": 1e-5,
    "float16": 5e-3,
    "bfloat16": 4e-2,
}
"""Largest allowed error by dtype, relative to the largest magnitude of the reference. Values of
other dtypes must be equal."""
COLUMNS = 100
MOVED = (
    "Some errors are larger than usual: the model may amplify rounding errors. Their tolerance is",
    f"{MARGIN:.0f} times the largest change of the unsplit model's results in {RUNS} runs on one",
    "thread, with and without optimization, in which each element of weights and float inputs is",
    f"changed by up to {CHANGE:.0e} of its value, or {COARSE_CHANGE:.0e} if the model quantizes or",
    "sorts.",
)
UNLIMITED = 0.01
"""An error above this, in a row without a tolerance, is explained below the table."""
TIMED_RUNS, TIMED_SECONDS = 5, 1.5
"""Each model is run for timing at most TIMED_RUNS times, and for at most TIMED_SECONDS seconds."""


def quietly(text: str) -> None:
    """A `tell` function that ignores its text."""


@dataclass(frozen=True)
class Comparison:
    """The comparison of one output with its reference.

    error      the largest error, relative to the largest magnitude of the reference; for values
               that must be equal, the fraction of elements that differ
    tolerance  the largest error that is allowed
    fault      a difference that `error` cannot express (another dtype or shape, NaN at other
               places); else empty
    off        the largest absolute error, for floats
    largest    the largest magnitude of the reference, for floats
    blank      the fraction of elements that are NaN in both, and so are not compared
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    error: float
    tolerance: float
    fault: str = ""
    off: float = 0.0
    largest: float = 0.0
    blank: float = 0.0

    @property
    def ok(self) -> bool:
        """True if the output is within the tolerance."""
        return not self.fault and self.error <= self.tolerance

    @property
    def badness(self) -> tuple[bool, float]:
        """A key for sorting: (has a fault, error as a fraction of the tolerance); the worst output
        is the largest."""
        if not self.tolerance:
            return bool(self.fault), math.inf if self.error else 0.0
        return bool(self.fault), self.error / self.tolerance


@dataclass(frozen=True)
class Closeness:
    """A tolerance for each element, `atol + rtol * abs(reference)`, as in `numpy.allclose`. The
    error of an output is then the largest ratio of a difference to its tolerance."""

    rtol: float = 0.0
    atol: float = 0.0

    def error(self, given: Array, reference: Array) -> float:
        """Returns the largest ratio of a difference to its tolerance: at most 1 if all elements are
        close."""
        a, b = given.astype(np.float64), reference.astype(np.float64)
        finite = np.isfinite(b)
        off, allowed = np.abs(a - b)[finite], self.atol + self.rtol * np.abs(b[finite])
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.where(off == 0, 0.0, off / allowed).max(initial=0))


@dataclass(frozen=True)
class Times:
    """Seconds of a run.

    unsplit, sharded  of the unsplit model, and of the sharded one on `ranks` ranks: the shortest of
                      a few runs after the first; or the first, if that takes longer than
                      TIMED_SECONDS
    predicted         the plan's predictions of both, for these sizes
    """

    unsplit: float
    sharded: float
    ranks: int
    predicted: tuple[float, float] | None = None

    def text(self) -> str:
        """Returns both times in one line."""
        how = f"shortest of {TIMED_RUNS} or fewer, warm"
        if max(self.unsplit, self.sharded) > TIMED_SECONDS:
            how = f"the first, if it takes over {TIMED_SECONDS} s"
        cores = len(own_cores())
        some = "one core" if cores == 1 else f"{cores} cores"
        shared = f" that share {some}" if self.ranks > cores else ""
        unsplit, sharded = self.predicted or (None, None)
        return (
            f"a run takes {_ms(self.unsplit, unsplit)} unsplit, {_ms(self.sharded, sharded)} on "
            f"{self.ranks} ranks{shared} ({how})"
        )


def _ms(seconds: float, predicted: float | None) -> str:
    """The milliseconds of a run, and behind them the predicted ones in parentheses; short runs get
    one more digit."""
    digits = 2 if seconds >= 1e-3 else 3
    beside = "" if predicted is None else f" ({predicted * 1e3:.{digits}f} predicted)"
    return f"{seconds * 1e3:.{digits}f} ms{beside}"


@dataclass(frozen=True)
class Report:
    """The comparison of every output, one row each."""

    rows: tuple[Comparison, ...]
    times: Times | None = None
    moved: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    """The change of each result of the unsplit model by rounding, by output. Measured only if an
    error exceeds its usual tolerance."""

    @property
    def ok(self) -> bool:
        """True if all outputs are within their tolerances."""
        return all(row.ok for row in self.rows)

    @property
    def worst(self) -> Comparison:
        """The output with the largest `badness`."""
        return max(self.rows, key=lambda row: row.badness)

    def to_json(self) -> dict[str, Any]:
        """Returns the comparison as JSON value, with times in seconds."""
        outputs = [{**asdict(row), "shape": list(row.shape), "ok": row.ok} for row in self.rows]
        times = None if self.times is None else asdict(self.times)
        return {"ok": self.ok, "outputs": outputs, "times": times, "moved": dict(self.moved)}

    def text(self) -> str:
        """Returns a table of at most 100 columns, a line about the worst output, and warnings."""
        width = min(max(len(name) for name in ("output", *(row.name for row in self.rows))), 36)
        header = f"{'output':{width}}  {'dtype':8}  {'shape':18}  {'error':>8}  {'allowed':>8}"
        lines = [header, *(_line(row, width) for row in self.rows)]
        verdict = "all outputs agree" if self.ok else "the outputs differ"
        worst = self.worst
        lines.append(f"{verdict}; the worst is {worst.name}: {worst.fault or f'{worst.error:.1e}'}")
        lines += _unlimited_lines(self.rows)
        lines += [_blank_line(row) for row in self.rows if row.blank]
        if self.moved:
            lines += ["", *MOVED, *(_moved_line(r, self.moved) for r in self.rows if is_far(r))]
            lines += [_loose_line(n, m) for n, m in self.moved.items() if m > LARGE]
        if self.times is not None:
            lines += ["", *wrap(self.times.text(), COLUMNS, subsequent_indent="  ")]
        return "\n".join(line if line.startswith("warning") else line[:COLUMNS] for line in lines)


def compare(
    model: str | os.PathLike[str] | bytes,
    par: str | os.PathLike[str] | Session,
    feeds: Mapping[str, Any],
    tolerances: Mapping[str, float] | None = None,
    close: Closeness | None = None,
    timed: bool = False,
    tell: Callable[[str], None] = quietly,
) -> Report:
    """Runs the unsplit model and the sharded one on the same feeds, and compares every output.

    par         a model.par folder, or an open session
    tolerances  by dtype, in place of entries of TOLERANCES
    close       in place of all tolerances
    timed       True: both models run a few more times, to be timed
    tell        called with a text before each step

    Errors: ModelError if the unsplit model does not load; InputError; RankError.
    """
    if not isinstance(par, Session):
        with InferenceSession(par) as session:
            return compare(model, session, feeds, tolerances, close, timed, tell)
    par.check_feeds(feeds)
    tell("running the unsplit model")
    unsplit = Unsplit(model)
    try:
        reference, first = _clocked(lambda: unsplit.run(feeds))
    except ModelError as error:
        raise par.blame(error, feeds) from error
    seconds = 0.0
    if timed:
        tell("timing the unsplit model")
        seconds = shortest(lambda: unsplit.run(feeds), first)
    unsplit.close()  # the ranks may need its memory
    tell(f"running {par.ranks} ranks")
    outputs, first = _clocked(lambda: _run(par, feeds))
    times = None
    if timed:
        tell(f"timing {par.ranks} ranks")
        times = Times(seconds, shortest(lambda: _run(par, feeds), first), par.ranks)
    allowed = {**TOLERANCES, **(tolerances or {})}
    types = {argument.name: argument.type for argument in par.get_outputs()}
    wanted, given = (
        {k: a for n, v in values.items() for k, a in arrays_in(n, v, types.get(n, "")).items()}
        for values in (reference, outputs)
    )
    rows = [compare_arrays(n, given.get(n), array, allowed, close) for n, array in wanted.items()]
    moved: Mapping[str, float] = {}
    if close is None and any(is_far(row) for row in rows):
        tell("measuring how rounding changes the results of the unsplit model")
        moved = movements(model, feeds, reference)
        rows = [judged(row, moved) for row in rows]
    extra = [
        Comparison(n, a.dtype.name, a.shape, 0.0, 0.0, "the unsplit model does not have it")
        for n, a in given.items()
        if n not in wanted
    ]
    return Report((*rows, *extra), times, moved=moved)


def is_far(row: Comparison) -> bool:
    """True if an output fails only because of a large error, which rounding may explain."""
    return not row.ok and not row.fault


def judged(row: Comparison, moved: Mapping[str, float]) -> Comparison:
    """Returns the comparison; if its error is too large, with a tolerance that allows for the
    effect of rounding on the unsplit model (`moved`, by output)."""
    if not is_far(row):
        return row
    return replace(row, tolerance=max(row.tolerance, MARGIN * moved.get(row.name, 0.0)))


def _clocked(run: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], float]:
    """Returns the results of a run, and its seconds."""
    start = time.perf_counter()
    results = run()
    return results, time.perf_counter() - start


def shortest(run: Callable[[], dict[str, Any]], first: float) -> float:
    """Repeats a run, and returns the seconds of the shortest one. `first` is the seconds of an
    earlier run, and the result if another run would take longer than TIMED_SECONDS."""
    seconds: list[float] = []
    expected = first
    while len(seconds) < TIMED_RUNS and sum(seconds) + expected <= TIMED_SECONDS:
        expected = _clocked(run)[1]
        seconds.append(expected)
    return min(seconds, default=first)


def compare_arrays(
    name: str,
    given: Array | None,
    reference: Array,
    tolerances: Mapping[str, float] = TOLERANCES,
    close: Closeness | None = None,
) -> Comparison:
    """Returns the comparison of an output (`given`; None: missing) with its reference. `tolerances`
    are by dtype; `close`, if there is one, replaces them for numbers."""
    dtype, shape = reference.dtype, reference.shape
    error, fault, off, largest, blank = 0.0, "", 0.0, 0.0, 0.0
    if given is None:
        fault = "the sharded model does not have it"
    elif given.dtype != dtype:
        fault = f"its dtype is {given.dtype}"
    elif given.shape != shape:
        fault = f"its shape is {list(given.shape)}"
    elif dtype.name in tolerances:
        off, largest, fault = _float_error(given, reference)
        error = off / largest if largest else math.inf if off else 0.0
        blank = (
            0.0
            if fault
            else float(np.count_nonzero(reference != reference)) / max(reference.size, 1)
        )
    elif close is None or dtype.kind not in "iu":
        both_nan = (given != given) & (reference != reference)
        error = float(np.count_nonzero((given != reference) & ~both_nan)) / max(reference.size, 1)
    allowed = tolerances.get(dtype.name, 0.0)
    if close is not None and not fault and (dtype.name in tolerances or dtype.kind in "iu"):
        error, allowed = close.error(given, reference), 1.0  # type: ignore[arg-type]
    return Comparison(name, dtype.name, shape, error, allowed, fault, off, largest, blank)


def _run(session: Session, feeds: Mapping[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in session.get_outputs()]
    apart = session.apart
    results: dict[str, Any] = {}
    for group in ([n for n in names if n not in apart], [n for n in names if n in apart]):
        if group:
            results.update(zip(group, session.run(group, feeds), strict=True))
    return results


def _float_error(given: Array, reference: Array) -> tuple[float, float, str]:
    """Returns (largest absolute error, largest finite magnitude of the reference, fault), such as
    the fault "NaN in different places"; empty if there is none."""
    a, b = given.astype(np.float64), reference.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return math.inf, 0.0, "NaN in different places"
    if not np.array_equal(a[~finite & ~np.isnan(b)], b[~finite & ~np.isnan(b)]):
        return math.inf, 0.0, "infinities in different places"
    off = np.abs(a[finite] - b[finite]).max(initial=0)
    return float(off), float(np.abs(b[finite]).max(initial=0)), ""


def _unlimited_lines(rows: Iterable[Comparison]) -> list[str]:
    """Returns lines that explain large errors in rows without a tolerance; empty if there are
    none."""
    far = [row for row in rows if math.isinf(row.tolerance) and row.error > UNLIMITED]
    if not far:
        return []
    most = max(far, key=lambda row: row.largest)
    name = most.name if len(most.name) <= 80 else "..." + most.name[-77:]
    rows_of = "1 row has" if len(far) == 1 else f"{len(far)} rows have"
    return [
        "-: no limit, as values diverge where gradients are rounding errors only, or compressed.",
        f"{rows_of} an error above {UNLIMITED:.0%} of its largest element, which is at most "
        f"{most.largest:.1e}, such as",
        name,
    ]


def _blank_line(row: Comparison) -> str:
    """Returns a warning about elements that are NaN in both, and so are not compared."""
    much = "all of it" if row.blank == 1 else f"{row.blank:.1%} of it"
    return (
        f"warning: {row.name}: {much} is NaN both on the ranks and in the unsplit model, so it is "
        "not compared; give other inputs with --inputs"
    )


def _loose_line(name: str, moved: float) -> str:
    """Returns a warning about a result that even correct runs change so much that comparing it
    proves little."""
    return (
        f"warning: rounding alone changes {name} by {moved:.0%} in the unsplit model, so comparing "
        "it proves little"
    )


def _moved_line(row: Comparison, moved: Mapping[str, float]) -> str:
    return (
        f"{row.name}: error {row.error:.1e}; the unsplit model changes by "
        f"{moved.get(row.name, 0.0):.1e}"
    )


def _line(row: Comparison, width: int) -> str:
    name = row.name if len(row.name) <= width else "..." + row.name[3 - width :]
    shape = str(list(row.shape))
    shape = shape if len(shape) <= 18 else shape[:14] + "...]"
    mark = "" if row.ok else f"  {row.fault or 'too large'}"
    allowed = f"{row.tolerance:8.0e}" if row.tolerance else "   equal"
    if math.isinf(row.tolerance):
        allowed = "       -"
    return f"{name:{width}}  {row.dtype:8}  {shape:18}  {row.error:8.1e}  {allowed}{mark}"
