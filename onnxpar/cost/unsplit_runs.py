"""Times runs of an unsplit model on this host: the measure for the time of its kernels."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from onnxpar.base.custom_ops import libraries
from onnxpar.runtime.ranks.cores import Share, shares
from onnxpar.runtime.ranks.rank_process import command, environment
from onnxpar.runtime.session.feeds import InputSpec

PATIENCE = 20.0
"""Longest wait, in seconds, for the process that runs the model."""


@dataclass(frozen=True)
class UnsplitRuns:
    """Seconds of a run of the unsplit model in onnxruntime. `alone` is for all cores; `beside` is
    for the cores of one rank, while a run for each other rank uses the other cores."""

    alone: float
    beside: float


def time_unsplit(
    model: str | os.PathLike[str],
    inputs: Sequence[InputSpec],
    ranges: Mapping[str, tuple[int, int]],
    ranks: int,
    zeros: Iterable[str] = (),
) -> UnsplitRuns | None:
    """Times runs of a model on random inputs, in `ranges`, and on `zeros`: with all cores, and at
    the same time on as many shares of the cores as these ranks have at once. Runs are in another
    process, which a kernel may end. This process remembers results by file and sizes. None if
    onnxruntime does not run the model on such inputs."""
    cores = sum(share.threads for share in shares(1))
    rank_shares = tuple(shares(ranks)[: min(ranks, cores)])
    path, file = os.path.abspath(model), os.stat(model)
    sizes = tuple((name, tuple(shape)) for name, _, shape in inputs)
    key = (path, file.st_mtime_ns, file.st_size, sizes, rank_shares)
    if key not in _timed:
        _timed[key] = _timed_apart(path, inputs, ranges, rank_shares, zeros)
    return _timed[key]


_timed: dict[Hashable, UnsplitRuns | None] = {}


def _timed_apart(
    model: str,
    inputs: Sequence[InputSpec],
    ranges: Mapping[str, tuple[int, int]],
    rank_shares: Sequence[Share],
    zeros: Iterable[str],
) -> UnsplitRuns | None:
    message = {
        "model": model,
        "inputs": [(name, dtype, list(shape)) for name, dtype, shape in inputs],
        "ranges": {name: list(bounds) for name, bounds in ranges.items()},
        "zeros": sorted(zeros),
        "shares": [asdict(share) for share in rank_shares],
        "libraries": list(libraries()),
    }
    try:
        done = subprocess.run(
            command("cost.unsplit_process"),
            input=json.dumps(message).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(),
            timeout=PATIENCE,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return UnsplitRuns(**json.loads(done.stdout.splitlines()[-1]))
