"""Times runs of an unsplit model on this host, to correct the cost model's prediction of its
kernels."""

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
    """Seconds of a run of the unsplit model in onnxruntime.

    alone   with all cores of the host
    beside  with the cores of one rank, while the other ranks' cores run the model, too
    """

    alone: float
    beside: float


def time_unsplit(
    model: str | os.PathLike[str],
    inputs: Sequence[InputSpec],
    ranges: Mapping[str, tuple[int, int]],
    ranks: int,
    zeros: Iterable[str] = (),
) -> UnsplitRuns | None:
    """Times runs of a model on random inputs: with all cores, and at the same time on each of the
    shares of the cores that `ranks` ranks would have. Returns None if onnxruntime does not run the
    model on such inputs.

    inputs  (name, dtype, shape) of each input
    ranges  [low, high) of integer inputs, by name
    zeros   names of inputs that are zero

    The runs are in another process, in case a kernel ends it. This process caches results by file
    and sizes.
    """
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
