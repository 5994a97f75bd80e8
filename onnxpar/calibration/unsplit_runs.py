"""Times runs of an unsplit model on this host, as the measure of what its kernels take."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Barrier
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxpar.base.custom_ops import quiet_options
from onnxpar.runtime.cores import Share, shares
from onnxpar.runtime.load_session import load_session
from onnxpar.runtime.options import SLOW_FUSIONS, SessionSpec
from onnxpar.runtime.values import is_value

SECONDS = 0.05
"""Duration of the runs of each kind, at least."""
LONGEST = 0.5
"""A run that takes longer, in seconds, is not repeated."""
FEWEST = 3
"""Runs of each kind, the first of which is not counted."""


@dataclass(frozen=True)
class UnsplitRuns:
    """Seconds of a run of the unsplit model in onnxruntime: `alone` with all cores, `beside` others
    with the cores of a rank each."""

    alone: float
    beside: float


def time_unsplit(
    model: str | os.PathLike[str], feeds: Mapping[str, Any], ranks: int
) -> UnsplitRuns | None:
    """Times runs of a model with all cores, and at the same time on as many shares of the cores as
    so many ranks have at once; None if onnxruntime does not run it on these feeds. What was timed
    is known from then on in this process, by file and sizes."""
    cores = sum(share.threads for share in shares(1))
    each = tuple(shares(ranks)[: min(ranks, cores)])
    path, file = os.path.abspath(model), os.stat(model)
    sizes = tuple((name, np.shape(value)) for name, value in feeds.items())
    key = (path, file.st_mtime_ns, file.st_size, sizes, each)
    if key not in _timed:
        _timed[key] = _time(path, feeds, each)
    return _timed[key]


_timed: dict[Hashable, UnsplitRuns | None] = {}
_Run = Callable[[], object]


def _time(model: str, feeds: Mapping[str, Any], each: tuple[Share, ...]) -> UnsplitRuns | None:
    try:
        session = load_session(model, quiet_options(), providers=["CPUExecutionProvider"])
        alone = _shortest([lambda: lambda: session.run(None, feeds)])
        sizes = _sizes(session, feeds)
        ranks = [partial(_as_rank, model, feeds, sizes, share) for share in each]
        return UnsplitRuns(alone, _shortest(ranks))
    except Exception:  # onnxruntime's errors have no other base
        return None


def _sizes(session: ort.InferenceSession, feeds: Mapping[str, Any]) -> dict[str, int]:
    """The sizes that these feeds give to the symbols in the shapes of inputs."""
    fed = [(port.shape, np.shape(feeds[port.name])) for port in session.get_inputs()]
    pairs = [pair for shape, sizes in fed for pair in zip(shape, sizes, strict=True)]
    return {symbol: size for symbol, size in pairs if isinstance(symbol, str)}


def _as_rank(model: str, feeds: Mapping[str, Any], sizes: Mapping[str, int], share: Share) -> _Run:
    """A run as in the process of a rank: on its share of the cores, without the nodes that compute
    sizes, and with inputs and outputs that are bound to memory, as tensors of numbers can be."""
    if share.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, share.cores)  # of this thread, and of those that it starts
    options = quiet_options()
    SessionSpec().apply(options, 0, share.threads, share.spin)
    for symbol, size in sizes.items():
        options.add_free_dimension_override_by_name(symbol, size)
    session = load_session(model, options, SLOW_FUSIONS, providers=["CPUExecutionProvider"])
    if any(is_value(port.type) for port in (*session.get_inputs(), *session.get_outputs())):
        return lambda: session.run(None, feeds)
    binding = session.io_binding()
    for name, value in feeds.items():
        binding.bind_cpu_input(name, value)
    for port in session.get_outputs():
        binding.bind_output(port.name)
    return lambda: session.run_with_iobinding(binding)


def _shortest(each: Sequence[Callable[[], _Run]]) -> float:
    """The seconds of the shortest run while all run, each in a thread that opens its session; of
    the one that takes longest."""
    are_open = Barrier(len(each))

    def runs(opened: Callable[[], _Run]) -> float:
        try:
            run = opened()
        except BaseException:
            are_open.abort()
            raise
        are_open.wait()
        taken: list[float] = []
        end = time.perf_counter() + SECONDS
        while len(taken) < FEWEST or time.perf_counter() < end:
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
            if taken[-1] > LONGEST:
                break
        return min(taken[1:] or taken)

    with ThreadPoolExecutor(len(each)) as pool:
        return max(pool.map(runs, each))
