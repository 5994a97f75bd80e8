"""Holds a sharded model against the unsplit one: every output, on the same feeds."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxpar.base.arrays import Array
from onnxpar.checking.sensitivity import (
    CHANGE,
    COARSE_CHANGE,
    LARGE,
    MARGIN,
    ORT_ERRORS,
    RUNS,
    movements,
)
from onnxpar.errors import InputError, ModelError
from onnxpar.runtime.options import keep_double
from onnxpar.runtime.session import InferenceSession, Session
from onnxpar.runtime.tensors import as_fed, bind_input, dtype_of, memory_of, view_of
from onnxpar.runtime.values import arrays_in, is_optional, is_value

TOLERANCES: Mapping[str, float] = {
    "float64": 1e-12,
    "float32": 1e-5,
    "float16": 5e-3,
    "bfloat16": 4e-2,
}
"""By dtype, the largest error allowed, relative to the largest magnitude of the reference.

What is not named here must be equal.
"""
COLUMNS = 100
MOVED = (
    "Some results are not as close as usual: the model may amplify what it rounds. Allowed is then",
    f"{MARGIN:.0f} times what those of the unsplit model move by in {RUNS} runs on one thread,",
    f"optimized or not, in which weights and fed floats change by up to {CHANGE:.0e} of each, or",
    f"{COARSE_CHANGE:.0e} where it quantizes or sorts.",
)
TIMED_RUNS, TIMED_SECONDS = 5, 1.5
"""Runs that are timed of each model, or fewer where these would take longer than that."""


def quietly(text: str) -> None:
    """Shows nothing of what is being done."""


@dataclass(frozen=True)
class Comparison:
    """One output: its largest error, relative to the largest magnitude of the reference.

    Of what must be equal, the error is the share of elements that are not. `fault` says what no
    error can measure: another dtype or shape, NaN elsewhere. Else it is empty. Where the error is
    of numbers, `off` is it in absolute terms, and `largest` that magnitude.
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
        """Whether the output is as good as the reference."""
        return not self.fault and self.error <= self.tolerance

    @property
    def badness(self) -> tuple[bool, float]:
        """Orders outputs: those with a fault last, then by how much of the tolerance they use."""
        if not self.tolerance:
            return bool(self.fault), math.inf if self.error else 0.0
        return bool(self.fault), self.error / self.tolerance


@dataclass(frozen=True)
class Closeness:
    """Numbers are close where they differ by at most `atol + rtol * abs(reference)`, element by
    element, as of `numpy.allclose`. An error is then the largest difference as a share of that."""

    rtol: float = 0.0
    atol: float = 0.0

    def error(self, given: Array, reference: Array) -> float:
        """The largest share of what each element may differ by; at most 1 where all are close."""
        a, b = given.astype(np.float64), reference.astype(np.float64)
        finite = np.isfinite(b)
        off, allowed = np.abs(a - b)[finite], self.atol + self.rtol * np.abs(b[finite])
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.where(off == 0, 0.0, off / allowed).max(initial=0))


@dataclass(frozen=True)
class Times:
    """The shortest of a few runs after the first, in seconds, of the unsplit model and of the
    sharded one on so many ranks. A first run that takes longer than TIMED_SECONDS is itself the
    time."""

    unsplit: float
    sharded: float
    ranks: int

    def text(self) -> str:
        """One line that says whose times these are."""
        how = f"shortest of {TIMED_RUNS} or fewer, warm"
        if max(self.unsplit, self.sharded) > TIMED_SECONDS:
            how = f"the first, where it takes over {TIMED_SECONDS} s"
        return (
            f"a run takes {self.unsplit * 1e3:.2f} ms unsplit, {self.sharded * 1e3:.2f} ms on "
            f"{self.ranks} ranks ({how})"
        )


@dataclass(frozen=True)
class Report:
    """The comparison of every output."""

    rows: tuple[Comparison, ...]
    times: Times | None = None
    moved: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    """How far results move by themselves, where some are not as close as usual."""

    @property
    def ok(self) -> bool:
        """Whether all outputs are as good as the reference."""
        return all(row.ok for row in self.rows)

    @property
    def worst(self) -> Comparison:
        """The output that uses most of its tolerance."""
        return max(self.rows, key=lambda row: row.badness)

    def text(self) -> str:
        """A table of at most 100 columns, and which tensor is the worst."""
        width = min(max(len(row.name) for row in self.rows), 36)
        header = f"{'output':{width}}  {'dtype':8}  {'shape':18}  {'error':>8}  {'allowed':>8}"
        lines = [header, *(_line(row, width) for row in self.rows)]
        verdict = "all outputs agree" if self.ok else "the outputs differ"
        worst = self.worst
        lines.append(f"{verdict}; the worst is {worst.name}: {worst.fault or f'{worst.error:.1e}'}")
        lines += [_blank_line(row) for row in self.rows if row.blank]
        if self.moved:
            lines += ["", *MOVED, *(_moved_line(r, self.moved) for r in self.rows if is_far(r))]
            lines += [_loose_line(n, m) for n, m in self.moved.items() if m > LARGE]
        if self.times is not None:
            lines += ["", self.times.text()]
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
    """Runs the unsplit model and the sharded one on the same feeds and compares every output.

    `par` is a model.par folder or an open session. `tolerances` replace those of TOLERANCES, by
    dtype; `close` replaces them all. With `timed`, both run a few times more. `tell` is called with
    a few words before each step. Errors: ModelError where the unsplit model does not load;
    InputError; RankError.
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
        tell("measuring how far results of the unsplit model move by themselves")
        moved = movements(model, feeds, reference)
        rows = [judged(row, moved) for row in rows]
    extra = [
        Comparison(n, a.dtype.name, a.shape, 0.0, 0.0, "the unsplit model lacks it")
        for n, a in given.items()
        if n not in wanted
    ]
    return Report((*rows, *extra), times, moved=moved)


def is_far(row: Comparison) -> bool:
    """Whether a result is right but for how far off it is, which its model may explain."""
    return not row.ok and not row.fault


def judged(row: Comparison, moved: Mapping[str, float]) -> Comparison:
    """The comparison of a result that is far off, held to what it moves by itself."""
    if not is_far(row):
        return row
    return replace(row, tolerance=max(row.tolerance, MARGIN * moved.get(row.name, 0.0)))


def _clocked(run: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], float]:
    """What a run returns, and the seconds that it took."""
    start = time.perf_counter()
    found = run()
    return found, time.perf_counter() - start


def shortest(run: Callable[[], dict[str, Any]], first: float) -> float:
    """The seconds of the shortest of a few runs, after one that took `first` seconds: that itself,
    where another one would take longer than TIMED_SECONDS."""
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
    """Compares an output with its reference; numbers as `close` says, where it is given."""
    dtype, shape = reference.dtype, reference.shape
    error, fault, off, largest, blank = 0.0, "", 0.0, 0.0, 0.0
    if given is None:
        fault = "the sharded model lacks it"
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


class Unsplit:
    """The unsplit model under a stock onnxruntime. Errors: ModelError where it does not load."""

    def __init__(
        self, model: str | os.PathLike[str] | bytes, folder: str | os.PathLike[str] | None = None
    ) -> None:
        """`folder` is where the external data of a model in bytes is."""
        self._session: ort.InferenceSession | None = open_unsplit(model, folder)

    def close(self) -> None:
        """Gives its memory back."""
        self._session = None

    def run(self, feeds: Mapping[str, Any], names: Sequence[str] | None = None) -> dict[str, Any]:
        """The outputs by name, or those of these names. Errors: ModelError, InputError."""
        session = self._session
        assert session is not None, "closed"
        ports = [*session.get_inputs(), *session.get_outputs()]
        for argument in session.get_inputs():
            if argument.name not in feeds and not is_optional(argument.type):
                raise InputError(f"input {argument.name!r} of the unsplit model is not fed")
        try:
            if any(is_value(port.type) for port in ports):
                return _run_values(session, feeds, names)
            return _run_bound(session, feeds, names)
        except ORT_ERRORS as error:
            raise ModelError(f"the unsplit model does not run on these feeds: {error}") from error


def run_unsplit(model: str | os.PathLike[str] | bytes, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """The outputs of the unsplit model, by name, run whole. Errors: ModelError, InputError."""
    return Unsplit(model).run(feeds)


def open_unsplit(
    model: str | os.PathLike[str] | bytes, folder: str | os.PathLike[str] | None = None
) -> ort.InferenceSession:
    """A session of the unsplit model that warns of nothing: an initializer may be an input.
    `folder` is where the external data of a model in bytes is. Errors: ModelError."""
    source = model if isinstance(model, bytes) else os.fspath(model)
    options = ort.SessionOptions()
    options.log_severity_level = 4  # what it would log is raised, too
    if folder is not None:
        key = "session.model_external_initializers_file_folder_path"
        options.add_session_config_entry(key, os.fspath(Path(folder).resolve()))
    try:
        session = ort.InferenceSession(source, options, ["CPUExecutionProvider"])
        fed = (*session.get_inputs(), *session.get_overridable_initializers())
        ports = (fed, session.get_outputs())
        if keep_double(options, *([dtype_of(p.type) for p in each] for each in ports)):
            session = ort.InferenceSession(source, options, ["CPUExecutionProvider"])
    except ORT_ERRORS as error:
        raise ModelError(f"onnxruntime does not load the unsplit model: {error}") from error
    return session


def _run_values(
    session: ort.InferenceSession, feeds: Mapping[str, Any], chosen: Sequence[str] | None
) -> dict[str, Any]:
    values = {n: as_fed(v) if isinstance(v, np.ndarray) else v for n, v in feeds.items()}
    all_names = dict.fromkeys(argument.name for argument in session.get_outputs())
    names = list(chosen or all_names)
    return dict(zip(names, session.run(names, values), strict=True))


def _run_bound(
    session: ort.InferenceSession, feeds: Mapping[str, Array], chosen: Sequence[str] | None
) -> dict[str, Array]:
    binding = session.io_binding()
    held = {name: np.asarray(array, order="C") for name, array in feeds.items()}
    memory = {name: memory_of(array) for name, array in held.items()}
    for argument in (*session.get_inputs(), *session.get_overridable_initializers()):
        if argument.name in held:
            bind_input(binding, argument.name, held[argument.name], memory[argument.name])
    arguments = [
        argument
        for argument in {argument.name: argument for argument in session.get_outputs()}.values()
        if chosen is None or argument.name in chosen
    ]
    for argument in arguments:
        binding.bind_output(argument.name, "cpu")
    session.run_with_iobinding(binding)
    found = {}
    for argument, value in zip(arguments, binding.get_outputs(), strict=True):
        dtype = dtype_of(argument.type)
        if dtype is None:
            raise ModelError(
                f"output {argument.name!r} is a {argument.type}, which is not compared"
            )
        found[argument.name] = view_of(value, dtype).copy()
    return found


def _run(session: Session, feeds: Mapping[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in session.get_outputs()]
    apart = session.apart
    found: dict[str, Any] = {}
    for group in ([n for n in names if n not in apart], [n for n in names if n in apart]):
        if group:
            found.update(zip(group, session.run(group, feeds), strict=True))
    return found


def _float_error(given: Array, reference: Array) -> tuple[float, float, str]:
    """The largest error, the largest finite magnitude, and what no number can say."""
    a, b = given.astype(np.float64), reference.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return math.inf, 0.0, "NaN stands in other places"
    if not np.array_equal(a[~finite & ~np.isnan(b)], b[~finite & ~np.isnan(b)]):
        return math.inf, 0.0, "infinities stand in other places"
    off = np.abs(a[finite] - b[finite]).max(initial=0)
    return float(off), float(np.abs(b[finite]).max(initial=0)), ""


def _blank_line(row: Comparison) -> str:
    """Says how much of a result compares nothing."""
    much = "all of it" if row.blank == 1 else f"{row.blank:.1%} of it"
    return (
        f"warning: {row.name}: {much} is NaN on the ranks and in the unsplit model alike, which "
        "compares nothing; --inputs feeds others"
    )


def _loose_line(name: str, moved: float) -> str:
    """Says of which result even a correct run may be far off."""
    return f"warning: {name} moves by {moved:.0%} in the unsplit model: comparing it tells little"


def _moved_line(row: Comparison, moved: Mapping[str, float]) -> str:
    return (
        f"{row.name} is off by {row.error:.1e}, and moves by {moved.get(row.name, 0.0):.1e} itself"
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
