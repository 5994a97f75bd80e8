"""Times runs of an unsplit model on this host, as the measure of what its kernels take."""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxpar.base.custom_ops import quiet_options
from onnxpar.runtime.cores import own_cores
from onnxpar.runtime.load_session import load_session
from onnxpar.runtime.options import SLOW_FUSIONS

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
    so many ranks would have; None if onnxruntime does not run it on these feeds. What was timed is
    known from then on in this process, by file and sizes."""
    cores = len(own_cores())
    at_once, threads = max(min(ranks, cores), 1), max(cores // ranks, 1)
    path, file = os.path.abspath(model), os.stat(model)
    sizes = tuple((name, np.shape(value)) for name, value in feeds.items())
    key = (path, file.st_mtime_ns, file.st_size, sizes, at_once, threads)
    if key not in _timed:
        _timed[key] = _time(path, feeds, at_once, threads)
    return _timed[key]


_timed: dict[Hashable, UnsplitRuns | None] = {}


def _time(model: str, feeds: Mapping[str, Any], at_once: int, threads: int) -> UnsplitRuns | None:
    try:
        alone = _shortest([_session(model, 0, ())], feeds)
        if at_once == 1:
            return UnsplitRuns(alone, alone)
        sessions = [_session(model, threads, SLOW_FUSIONS) for _ in range(at_once)]
        return UnsplitRuns(alone, _shortest(sessions, feeds))
    except Exception:  # onnxruntime's errors have no other base
        return None


def _session(model: str, threads: int, disabled: tuple[str, ...]) -> ort.InferenceSession:
    options = quiet_options(threads)
    return load_session(model, options, disabled, providers=["CPUExecutionProvider"])


def _shortest(sessions: list[ort.InferenceSession], feeds: Mapping[str, Any]) -> float:
    """The seconds of the shortest run while all sessions run, of the session that takes longest."""

    def runs(session: ort.InferenceSession) -> float:
        taken: list[float] = []
        end = time.perf_counter() + SECONDS
        while len(taken) < FEWEST or time.perf_counter() < end:
            start = time.perf_counter()
            session.run(None, feeds)
            taken.append(time.perf_counter() - start)
            if taken[-1] > LONGEST:
                break
        return min(taken[1:] or taken)

    with ThreadPoolExecutor(len(sessions)) as pool:
        return max(pool.map(runs, sessions))
