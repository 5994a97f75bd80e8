"""Times runs of an unsplit model on this host, as the measure of what its kernels take."""

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
    """Seconds of a run of the unsplit model in onnxruntime: `alone` with all cores, `beside` others
    with the cores of a rank each."""

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
    the same time on as many shares of the cores as so many ranks have at once. None if onnxruntime
    does not run it on such inputs. They are of a process of their own, which a kernel may end. What
    was timed is known from then on in this process, by file and sizes."""
    cores = sum(share.threads for share in shares(1))
    each = tuple(shares(ranks)[: min(ranks, cores)])
    path, file = os.path.abspath(model), os.stat(model)
    sizes = tuple((name, tuple(shape)) for name, _, shape in inputs)
    key = (path, file.st_mtime_ns, file.st_size, sizes, each)
    if key not in _timed:
        _timed[key] = _timed_apart(path, inputs, ranges, each, zeros)
    return _timed[key]


_timed: dict[Hashable, UnsplitRuns | None] = {}


def _timed_apart(
    model: str,
    inputs: Sequence[InputSpec],
    ranges: Mapping[str, tuple[int, int]],
    each: Sequence[Share],
    zeros: Iterable[str],
) -> UnsplitRuns | None:
    message = {
        "model": model,
        "inputs": [(name, dtype, list(shape)) for name, dtype, shape in inputs],
        "ranges": {name: list(bounds) for name, bounds in ranges.items()},
        "zeros": sorted(zeros),
        "shares": [asdict(share) for share in each],
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
