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
"""Bytes of a tensor that no cache holds."""
ROUNDS = 5
"""How often every case has its turn, so that what else the machine does for a while is in few runs
of each."""
FEWEST, MOST = 3, 100
"""Runs of a case in a round."""
QUANTILE = 0.2
"""Of the runs of a case, so many are faster than what counts: other work only adds."""
LEAST = 0.1
"""Of what a collective took with the work before it, if that has taken more than by itself."""
_WORK: tuple[tuple[Callable[[int], onnx.ModelProto], int, dict[str, bool]], ...] = (
    (models.products, 4, {}),
    (models.convolutions, 4, {"optimized": True}),
    (partial(models.copies, LARGE), 4, {}),
    (models.rows, 4, {}),
    (models.tiny_ops, 500, {"cold": True}),
    (models.work_between, 20, {}),
)
"""Models, how often the op stands in each, and how it is run: convolutions only get onnxruntime's
blocked layout where it optimizes, and small ops stand among large ones, which fill the caches."""
_numbers = count()


@dataclass(frozen=True)
class Talk:
    """What one collective took: seconds of the slowest rank, of a tensor of `size` bytes where it
    is largest, over groups of `ranks`."""

    kind: str
    ranks: int
    size: int
    seconds: float


@dataclass(frozen=True)
class Work:
    """What one op took: seconds of the slowest rank, while all ranks do the same. Of `bottleneck`,
    three convolutions."""

    product: float
    bottleneck: float
    copy: float
    picks: float
    tiny: float


@dataclass(frozen=True)
class Measurements:
    """All that was measured, with so many ranks of so many threads each."""

    ranks: int
    threads: int
    work: Work
    talk: tuple[Talk, ...]


def group_sizes(ranks: int) -> list[int]:
    """Powers of two, and all ranks."""
    return sorted({*(1 << i for i in range(1, ranks.bit_length()) if 1 << i <= ranks), ranks})


def cases(ranks: int) -> list[tuple[str, int, int]]:
    """(kind, ranks of a group, bytes) of the collectives to be measured."""
    return [(k, members, s) for members in group_sizes(ranks) for k in MEASURED for s in SIZES]


def measure(
    ranks: int, seconds: float, timeout: float = 60.0, note: Callable[[float], object] = abs
) -> Measurements:
    """Measures in about so many seconds, beside what starting takes; `note` is told of every share
    of the whole that is done. Errors: RankError where a rank fails or does not answer within the
    timeout."""
    talks = cases(ranks)
    with _ranks(ranks, timeout) as (processes, folder):
        each = [_Case(folder, [model(turns)] * ranks, turns, **how) for model, turns, how in _WORK]
        for kind, members, size in talks:
            turns = max(2, min(20, (4 << 20) // size))
            of_groups = _of_groups(kind, size, members, ranks, turns)
            each.append(_Case(folder, of_groups, turns, talks=True))
        share = 1 / len(each) / ROUNDS
        for _ in range(ROUNDS):
            for case in each:
                case.run(processes, seconds * share)
                note(share)
    taken = [case.seconds for case in each]
    work, talk = taken[: len(_WORK)], taken[len(_WORK) :]
    *work, between = work
    found = tuple(
        Talk(*of, max(took - between, took * LEAST)) for of, took in zip(talks, talk, strict=True)
    )
    return Measurements(ranks, shares(ranks)[-1].threads, Work(*work), found)


def _of_groups(
    kind: str, size: int, members: int, ranks: int, turns: int
) -> list[onnx.ModelProto | None]:
    """A model for each rank: as many groups talk at once as there are, as in a mesh."""
    found: list[onnx.ModelProto | None] = []
    for first in range(0, ranks - members + 1, members):
        model = models.collective(kind, size, range(first, first + members), turns)
        found += [model] * members
    return found + [None] * (ranks - len(found))


@contextmanager
def _ranks(ranks: int, timeout: float) -> Iterator[tuple[Processes, Path]]:
    """Rank processes that time models, and a folder for these."""
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
    """A model for each rank in which an op stands `turns` times, and what its runs took."""

    def __init__(
        self,
        folder: Path,
        each: Sequence[onnx.ModelProto | None],
        turns: int,
        optimized: bool = False,
        cold: bool = False,
        talks: bool = False,
    ) -> None:
        files: dict[int, str] = {}
        for model in each:
            if model is not None and id(model) not in files:
                files[id(model)] = path = str(folder / f"{next(_numbers)}.onnx")
                onnx.save(model, path)
        self._paths = [files.get(id(model)) for model in each]
        self._turns = turns
        self._how = {"optimized": optimized, "cold": cold, "talks": talks}
        self._runs = 0
        self._found: list[list[float]] = [[] for _ in each]

    def run(self, processes: Processes, seconds: float) -> None:
        """Runs for about so many seconds, as often as in the first round."""
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
        """What the op takes on the slowest rank, when little else runs."""
        slowest = max(np.quantile(found, QUANTILE) for found in self._found if found)
        return float(slowest) / self._turns
