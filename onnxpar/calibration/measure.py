"""Times collectives and ops on ranks of this host, as a session runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np
import onnx

from onnxpar.calibration import models
from onnxpar.files.own_folder import OwnFolder
from onnxpar.ir.collectives import KINDS
from onnxpar.runtime.cores import shares
from onnxpar.runtime.launch import bind_address
from onnxpar.runtime.processes import Processes
from onnxpar.runtime.timing import WARM_UP

MEASURED = tuple(kind.name for kind in KINDS.values() if kind.is_measured)
SIZES = tuple(4 << 10 << shift for shift in (0, 3, 6, 8, 10))
"""Bytes of the tensors: 4 KiB to 4 MiB."""
LARGE = 32 << 20
"""Bytes of a tensor that is larger than any cache."""
ROUNDS = 5
"""Number of rounds; each one runs every case, so that other load of a while affects few runs of
each."""
FEWEST, MOST = 3, 100
"""Least and largest number of runs of a case in a round."""
QUANTILE = 0.2
"""Quantile of the runs of a case that counts: a low one, because other load only adds time."""
LEAST = 0.1
"""Least time of a collective, as a share of its time with the work before it: the difference to the
time of the work by itself may be below 0."""
_WORK: tuple[tuple[Callable[[int], onnx.ModelProto], int, dict[str, bool]], ...] = (
    (models.products, 4, {}),
    (models.convolutions, 4, {"optimized": True}),
    (partial(models.copies, LARGE), 4, {}),
    (models.rows, 4, {}),
    (models.tiny_ops, 500, {"cold": True}),
    (models.work_between, 20, {}),
)
"""Models, the number of times that the op is in each, and how it is run: convolutions get
onnxruntime's blocked layout only with optimizations, and caches are cold for small ops, which in a
model are among large ones."""
_numbers = count()


@dataclass(frozen=True)
class CollectiveTime:
    """The time of a collective on the slowest rank, in groups of `ranks` ranks; `size` is the bytes
    of its operand or its result, whichever is larger."""

    kind: str
    ranks: int
    size: int
    seconds: float


@dataclass(frozen=True)
class Work:
    """Seconds of one op each on the slowest rank, while all ranks compute the same; `bottleneck` is
    three convolutions."""

    product: float
    bottleneck: float
    copy: float
    picks: float
    tiny: float


@dataclass(frozen=True)
class Measurements:
    """All measurements, with so many ranks of so many threads each."""

    ranks: int
    threads: int
    work: Work
    collectives: tuple[CollectiveTime, ...]


def group_sizes(ranks: int) -> list[int]:
    """The sizes of groups to measure: powers of two, and all ranks."""
    return sorted({*(1 << i for i in range(1, ranks.bit_length()) if 1 << i <= ranks), ranks})


def cases(ranks: int) -> list[tuple[str, int, int]]:
    """(kind, ranks of a group, bytes) of the collectives to measure."""
    return [(k, members, s) for members in group_sizes(ranks) for k in MEASURED for s in SIZES]


def measure(
    ranks: int, seconds: float, timeout: float = 60.0, note: Callable[[float], object] = abs
) -> Measurements:
    """Measures for about so many seconds, after the ranks have started; `note` is called with each
    share of the whole that is done. Errors: RankError where a rank fails, or does not answer within
    the timeout."""
    of_collectives = cases(ranks)
    with _ranks(ranks, timeout) as (processes, folder):
        each = [_Case(folder, [model(count)] * ranks, count, **how) for model, count, how in _WORK]
        for kind, members, size in of_collectives:
            repeats = max(2, min(20, (4 << 20) // size))
            of_groups = _of_groups(kind, size, members, ranks, repeats)
            each.append(_Case(folder, of_groups, repeats, communicates=True))
        share = 1 / len(each) / ROUNDS
        for _ in range(ROUNDS):
            for case in each:
                case.run(processes, seconds * share)
                note(share)
    taken = [case.seconds for case in each]
    *work, between = taken[: len(_WORK)]
    found = tuple(
        CollectiveTime(*case, max(seconds - between, seconds * LEAST))
        for case, seconds in zip(of_collectives, taken[len(_WORK) :], strict=True)
    )
    return Measurements(ranks, shares(ranks)[-1].threads, Work(*work), found)


def _of_groups(
    kind: str, size: int, members: int, ranks: int, repeats: int
) -> list[onnx.ModelProto | None]:
    """A model for each rank. All groups communicate at once, as in a mesh; ranks that are left over
    have none."""
    found: list[onnx.ModelProto | None] = []
    for first in range(0, ranks - members + 1, members):
        model = models.collective(kind, size, range(first, first + members), repeats)
        found += [model] * members
    return found + [None] * (ranks - len(found))


@contextmanager
def _ranks(ranks: int, timeout: float) -> Iterator[tuple[Processes, Path]]:
    """Rank processes that time models, and a folder for the models."""
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
    """A model for each rank, which has an op `repeats` times, and the times of its runs."""

    def __init__(
        self,
        folder: Path,
        each: Sequence[onnx.ModelProto | None],
        repeats: int,
        optimized: bool = False,
        cold: bool = False,
        communicates: bool = False,
    ) -> None:
        files: dict[int, str] = {}
        for model in each:
            if model is not None and id(model) not in files:
                files[id(model)] = path = str(folder / f"{next(_numbers)}.onnx")
                onnx.save(model, path)
        self._paths = [files.get(id(model)) for model in each]
        self._repeats = repeats
        self._how = {"optimized": optimized, "cold": cold, "communicates": communicates}
        self._runs = 0
        self._found: list[list[float]] = [[] for _ in each]

    def run(self, processes: Processes, seconds: float) -> None:
        """Runs for about so many seconds in the first round, and as often in later ones."""
        if not self._runs:
            one = max(median(found) for found in self._ask(processes, FEWEST) if found)
            self._runs = max(FEWEST, min(MOST, round(seconds / one) - WARM_UP))
        for found, more in zip(self._found, self._ask(processes, self._runs), strict=True):
            found += more

    def _ask(self, processes: Processes, runs: int) -> list[list[float]]:
        messages = [{"do": "time", "path": path, "runs": runs, **self._how} for path in self._paths]
        answers = processes.call(messages, "a case")
        return [answer["seconds"] for answer in answers]

    @property
    def seconds(self) -> float:
        """The time of the op on the slowest rank, when little else runs."""
        slowest = max(np.quantile(found, QUANTILE) for found in self._found if found)
        return float(slowest) / self._repeats
