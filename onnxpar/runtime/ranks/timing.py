"""The main loop of a rank's process in a calibration: joins the world and times models."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxpar.runtime.ranks.doorbell import Line
from onnxpar.runtime.ranks.groups import World, session_options
from onnxpar.runtime.ranks.watch import Watch
from onnxpar.runtime.session.device import HOST
from onnxpar.runtime.session.options import SessionSpec

WARM_UP = 2
"""Runs that are not counted: onnxruntime allocates memory piece by piece in the first run, and
again, as one block, in the second."""
OTHER = 32 << 20
"""Bytes that are written between runs to make caches cold."""


def serve_timing(line: Line, watch: Watch, start: Mapping[str, Any]) -> None:
    """Times models, as messages ask, until a message "close". Used by a calibration, which measures
    a machine.

    A message has the file of a model, or None for a rank that does not take part, the number of
    runs, and flags: whether onnxruntime optimizes the model, caches are cold, and ranks
    communicate. The answer has the seconds of each run after WARM_UP runs. All inputs are ones.
    """
    world = World.create(f"rank-{watch.rank}", **start["world"])
    watch.join(world)
    line.send({})
    while (message := line.receive()) and message["do"] != "close":
        seconds: list[float] = []
        if message["path"] is not None:
            session = _open(world, message["path"], start["share"], message["optimized"])
            seconds = _seconds(session, message["runs"], message["cold"], message["communicates"])
            del session  # before the world that its kernels use
        line.send({"seconds": seconds})
    world.close()


def _open(
    world: World, path: str, share: Mapping[str, Any], optimized: bool
) -> ort.InferenceSession:
    """Opens a model with as many threads as a rank of the session has (`share`). If `optimized` is
    False, onnxruntime runs the graph as written."""
    options = session_options(world)
    as_written = {"graph_optimization_level": int(ort.GraphOptimizationLevel.ORT_DISABLE_ALL)}
    SessionSpec({} if optimized else as_written).apply(
        options, world.rank, share["threads"], share["spin"]
    )
    return ort.InferenceSession(path, options, providers=[HOST.provider])


def _seconds(
    session: ort.InferenceSession, runs: int, cold: bool, communicates: bool
) -> list[float]:
    """Returns the seconds of each run: elapsed time if `communicates`, else the CPU time of this
    thread, which takes part in all work, and does not count the load of other processes. If `cold`,
    caches are emptied before each run."""
    clock = time.perf_counter if communicates else time.thread_time
    other = np.zeros(OTHER if cold else 0, np.int8)
    types = {"tensor(float)": np.float32, "tensor(bool)": np.bool_}
    feeds = {i.name: np.ones(i.shape, types[i.type]) for i in session.get_inputs()}
    times = []
    for _ in range(WARM_UP + runs):
        other += 1
        start = clock()
        session.run(None, feeds)
        times.append(clock() - start)
    return times[WARM_UP:]
