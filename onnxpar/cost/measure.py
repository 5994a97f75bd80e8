"""Measures the time of collectives and ops, in rank processes of this host that are like those of a
session."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from statistics import median

import numpy as np
import onnx

from onnxpar.base.own_folder import OwnFolder
from onnxpar.cost import calibration_models as models
from onnxpar.graph.collectives import KINDS
from onnxpar.runtime.launch.launch import bind_address
from onnxpar.runtime.ranks.cores import own_cores, shares
from onnxpar.runtime.ranks.processes import Processes
from onnxpar.runtime.ranks.timing import WARM_UP
from onnxpar.runtime.session.session import InferenceSession

Shard = Callable[[Path, Path, int], object]
"""The compiler: splits the batch of the model in a file over a number of ranks, into a folder."""
MEASURED = tuple(kind.name for kind in KINDS.values() if kind.is_measured)
SIZES = tuple(4 << 10 << shift for shift in (0, 3, 6, 8, 10))
"""Sizes in bytes of the tensors of measured collectives, 4 KiB to 4 MiB."""
COPIED = NEAR, MIDDLE, LARGE = 128 << 10, 1 << 20, 32 << 20
"""Sizes in bytes of copied tensors: one that fits into a core's cache, one that may fit in part,
and one that does not fit."""

MOST_RANKS = 8
"""By default, at most this many ranks are measured; more would take longer and change the result
little."""


@dataclass(frozen=True)
class Effort:
    """The extent of a measurement.

    sizes        bytes of the tensors of collectives
    rounds       number of rounds; each runs every case, so that a short load from other programs
                 affects few runs of each case
    every_group  False: only groups of 2 and of all ranks
    most         seconds after which no further round begins
    """

    sizes: tuple[int, ...] = SIZES
    rounds: int = 5
    every_group: bool = True
    most: float = float("inf")


THOROUGH = Effort()
QUICK = Effort((SIZES[0], SIZES[2], SIZES[-1]), rounds=2, every_group=False, most=3.0)
FEWEST, MOST = 3, 100
"""Fewest and most runs of a case in a round."""
QUANTILE = 0.2
"""The time of a case is this quantile of its runs; a low one, because other load only adds time."""
LEAST = 0.1
"""The time of a collective is that of work and collective minus that of the work alone, which noise
may make negative; it is at least this fraction of the time of both."""
_WORK: tuple[tuple[Callable[[int], onnx.ModelProto], int, dict[str, bool]], ...] = (
    (partial(models.products, models.ROWS), 4, {}),
    (partial(models.products, models.FEW), 4, {}),
    (partial(models.products, models.FEW, apart=True), models.APART, {"cold": True}),
    (models.convolutions, 4, {"optimized": True}),
    *((partial(models.copies, size), max(4, (4 << 20) // size), {}) for size in COPIED),
    (models.rows, 4, {}),
    (models.tiny_ops, 100, {"cold": True}),
    (models.work_between, 20, {}),
)
"""For each measured op: a function that builds a model of so many repetitions, that number, and
options of the runs. Convolutions are optimized, because only then does onnxruntime use its blocked
memory format. Caches are cold for products whose weights must come from memory, and for tiny ops,
because in real models other ops run between them."""
CHANNELS = (4, 8, 16, 32, 64)
"""Numbers of output channels of measured convolutions, to find how many a kernel computes at
once."""
PASSED = (4 << 10, 4 << 20)
"""Bytes of inputs and outputs of a session: few, and many."""
SESSION_SECONDS = 0.2
"""Seconds for which a session runs for each size in PASSED. The first half does not count, while
the system still moves processes between cores."""
IN_RATED = 4
"""The number of times that a model of `rated` repeats its op."""
_numbers = count()


@dataclass(frozen=True)
class CollectiveTime:
    """Measured seconds of a collective in groups of `ranks` ranks, on the slowest rank. `size` is
    the bytes of its operand or result, whichever is larger."""

    kind: str
    ranks: int
    size: int
    seconds: float


@dataclass(frozen=True)
class Work:
    """Measured seconds of ops on the slowest rank, while all ranks compute the same op.

    product     a matrix product
    few         a product with few rows
    apart       a product with few rows whose weight comes from memory, not from the cache
    bottleneck  three convolutions
    copies      elementwise ops on tensors of COPIED bytes
    picks       a Gather of single elements
    tiny        an op on one element
    narrow      a convolution to each number of CHANNELS
    rated       ops of the kinds in `calibration_models.RATED`, in each of their shapes
    """

    product: float
    few: float
    apart: float
    bottleneck: float
    copies: tuple[float, ...]
    picks: float
    tiny: float
    narrow: tuple[float, ...]
    rated: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Measurements:
    """All measurements, with `ranks` ranks of `threads` threads each.

    work     seconds of ops on each rank, while all ranks compute
    alone    seconds of ops on one rank with all cores
    session  (ranks, bytes of inputs and outputs, seconds) of runs that compute next to nothing
    """

    ranks: int
    threads: int
    work: Work
    alone: Work
    session: tuple[tuple[int, int, float], ...]
    collectives: tuple[CollectiveTime, ...]


def default_ranks() -> int:
    """Returns the default number of ranks: one for each core, at least 2 and at most MOST_RANKS."""
    return max(2, min(MOST_RANKS, len(own_cores())))


def group_sizes(ranks: int, effort: Effort = THOROUGH) -> list[int]:
    """Returns the sizes of groups to measure: powers of two, and all ranks; for 6 ranks [2, 4,
    6]."""
    if not effort.every_group:
        return sorted({2, ranks})
    return sorted({*(1 << i for i in range(1, ranks.bit_length()) if 1 << i <= ranks), ranks})


def cases(ranks: int, effort: Effort = THOROUGH) -> list[tuple[str, int, int]]:
    """Returns the collectives to measure, as (kind, ranks in a group, bytes)."""
    groups = group_sizes(ranks, effort)
    return [(k, members, s) for members in groups for k in MEASURED for s in effort.sizes]


def measure(
    ranks: int,
    seconds: float,
    timeout: float = 60.0,
    note: Callable[[float], object] = abs,
    effort: Effort = THOROUGH,
    shard: Shard | None = None,
) -> Measurements:
    """Starts ranks, measures for about `seconds` seconds, and returns the measurements.

    timeout  longest wait for a rank, in seconds
    note     called after each case with the fraction of the whole measurement that the case was
    shard    the compiler; without it, no session is measured

    Errors: RankError if a rank fails, or does not respond in time.
    """
    of_collectives = cases(ranks, effort)
    start = time.monotonic()
    parts = seconds * 0.7, seconds * 0.3
    with _ranks(ranks, timeout) as (processes, folder):
        measured_cases = _cases_of_work(folder, ranks)
        for kind, members, size in of_collectives:
            repeats = max(2, min(20, (4 << 20) // size))
            of_groups = _of_groups(kind, size, members, ranks, repeats)
            measured_cases.append(_Case(folder, of_groups, repeats, communicates=True))
        _run_rounds(
            measured_cases, processes, parts[0], effort, start, lambda share: note(share * 0.7)
        )
    seconds_of_cases = iter([case.seconds for case in measured_cases])
    work, between = _work_of(seconds_of_cases)
    collectives = tuple(
        CollectiveTime(*case, max(seconds - between, seconds * LEAST))
        for case, seconds in zip(of_collectives, seconds_of_cases, strict=True)
    )
    with _ranks(1, timeout) as (processes, folder):
        measured_cases = _cases_of_work(folder, 1)
        _run_rounds(
            measured_cases, processes, parts[1], effort, start, lambda share: note(share * 0.3)
        )
    alone, _ = _work_of(iter([case.seconds for case in measured_cases]))
    few, many = PASSED
    session: tuple[tuple[int, int, float], ...] = ()
    if shard is not None:
        session = (
            *_session_times(1, [few], timeout, shard),
            *_session_times(ranks, [few, many], timeout, shard),
        )
    return Measurements(ranks, shares(ranks)[-1].threads, work, alone, session, collectives)


def _cases_of_work(folder: Path, ranks: int) -> list[_Case]:
    """Returns the cases that measure all of `Work`, in the order in which `_work_of` reads their
    times."""
    work = [
        _Case(folder, [model(count)] * ranks, count, **options) for model, count, options in _WORK
    ]
    for channels in CHANNELS:
        model = models.narrow_convolutions(channels, 4)
        work.append(_Case(folder, [model] * ranks, 4, optimized=True))
    for kind, shapes in models.RATED.items():
        for shape in shapes:
            model = models.rated(kind, *shape, IN_RATED)
            work.append(_Case(folder, [model] * ranks, IN_RATED))
    return work


def _work_of(seconds: Iterator[float]) -> tuple[Work, float]:
    """Takes the next times from `seconds`, in the order of `_cases_of_work`; returns them as Work,
    and the seconds of the matrix product before each collective."""
    product, few, apart, bottleneck, *copies, picks, tiny, between = islice(seconds, len(_WORK))
    narrow = tuple(islice(seconds, len(CHANNELS)))
    rated = {kind: tuple(islice(seconds, len(shapes))) for kind, shapes in models.RATED.items()}
    work = Work(product, few, apart, bottleneck, tuple(copies), picks, tiny, narrow, rated)
    return work, between


def _run_rounds(
    cases: Sequence[_Case],
    processes: Processes,
    seconds: float,
    effort: Effort,
    start: float,
    note: Callable[[float], object],
) -> None:
    """Runs all cases in rounds, for about `seconds` seconds in all. `start` is when the measurement
    began; for `note` see `measure`."""
    share = 1 / len(cases) / effort.rounds
    for turn in range(effort.rounds):
        if turn and time.monotonic() - start > effort.most:
            break
        for case in cases:
            case.run(processes, seconds * share)
            note(share)


def _session_times(
    ranks: int, sizes: Iterable[int], timeout: float, shard: Shard
) -> Iterator[tuple[int, int, float]]:
    """Yields (ranks, bytes of inputs and outputs, seconds of a run) for each size, measured in a
    session whose ranks only negate their inputs."""
    with OwnFolder() as folder:
        onnx.save(models.negated(), folder / "model.onnx")
        shard(folder / "model.onnx", folder / "model.par", ranks)
        with InferenceSession(folder / "model.par", timeout=timeout) as session:
            for size in sizes:
                x = np.zeros((ranks, size // 4 // ranks), np.float32)
                times: list[float] = []
                end = time.perf_counter() + SESSION_SECONDS
                while len(times) < 2 or time.perf_counter() < end:
                    begin = time.perf_counter()
                    session.run(None, {"X": x})
                    times.append(time.perf_counter() - begin)
                counted = times[len(times) // 2 :]
                yield ranks, 2 * x.nbytes, float(np.quantile(counted, QUANTILE))


def _of_groups(
    kind: str, size: int, members: int, ranks: int, repeats: int
) -> list[onnx.ModelProto | None]:
    """Returns the model of each rank for a collective in groups of `members` neighbouring ranks,
    all groups at once, as in a mesh; None for ranks that are left over."""
    rank_models: list[onnx.ModelProto | None] = []
    for first in range(0, ranks - members + 1, members):
        model = models.collective(kind, size, range(first, first + members), repeats)
        rank_models += [model] * members
    return rank_models + [None] * (ranks - len(rank_models))


@contextmanager
def _ranks(ranks: int, timeout: float) -> Iterator[tuple[Processes, Path]]:
    """A block in which rank processes run that time models; yields them, and a folder for the
    models."""
    with OwnFolder() as folder:
        world = {
            "size": ranks,
            "store": f"file:{folder}/store",
            "bind_address": bind_address(),
            "timeout": timeout,
        }
        processes = Processes(Path("the calibration"), ranks, timeout, None)
        try:
            starts = [
                {"path": None, "share": asdict(share), "world": {**world, "rank": rank}}
                for rank, share in enumerate(shares(ranks))
            ]
            processes.call(starts, "the start")
            yield processes, folder
        finally:
            processes.close()


class _Case:
    """One measurement: a model for each rank, which repeats an op `repeats` times, and the times of
    its runs."""

    def __init__(
        self,
        folder: Path,
        rank_models: Sequence[onnx.ModelProto | None],
        repeats: int,
        optimized: bool = False,
        cold: bool = False,
        communicates: bool = False,
    ) -> None:
        files: dict[int, str] = {}
        for model in rank_models:
            if model is not None and id(model) not in files:
                files[id(model)] = path = str(folder / f"{next(_numbers)}.onnx")
                onnx.save(model, path)
        self._paths = [files.get(id(model)) for model in rank_models]
        self._repeats = repeats
        self._how = {"optimized": optimized, "cold": cold, "communicates": communicates}
        self._runs = 0
        self._times: list[list[float]] = [[] for _ in rank_models]

    def run(self, processes: Processes, seconds: float) -> None:
        """Runs the models and records the times. The first call runs them for about `seconds`
        seconds, later calls as often as the first did."""
        if not self._runs:
            longest = max(median(times) for times in self._time(processes, FEWEST) if times)
            self._runs = max(FEWEST, min(MOST, round(seconds / longest) - WARM_UP))
        for times, more in zip(self._times, self._time(processes, self._runs), strict=True):
            times += more

    def _time(self, processes: Processes, runs: int) -> list[list[float]]:
        messages = [{"do": "time", "path": path, "runs": runs, **self._how} for path in self._paths]
        answers = processes.call(messages, "a case")
        return [answer["seconds"] for answer in answers]

    @property
    def seconds(self) -> float:
        """The seconds of one op on the slowest rank, as QUANTILE of its runs."""
        slowest = max(np.quantile(times, QUANTILE) for times in self._times if times)
        return float(slowest) / self._repeats
