"""The main loop of a rank's process in a calibration: joins the world and times models."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from onnxpar.runtime.groups import World, session_options
from onnxpar.runtime.options import SessionSpec
from onnxpar.runtime.wire import Wire

if TYPE_CHECKING:
    from onnxpar.runtime.worker import Watch

WARM_UP = 2
"""Runs that do not count: onnxruntime gets memory piece by piece in the first, and again, as one
block, in the second."""
OTHER = 32 << 20
"""Bytes that are worked on between runs for which caches are to be cold."""


def serve_timing(wire: Wire, watch: Watch, start: Mapping[str, Any]) -> None:
    """Times models as messages ask for them, until a message closes it.

    A message has the file of a model, the number of runs, and flags: onnxruntime optimizes the
    model, caches are cold, ranks communicate. The answer has the seconds of each run after WARM_UP
    runs. Inputs are ones, which no run copies.
    """
    world = World.create(f"rank-{watch.rank}", **start["world"])
    watch.join(world)
    wire.send({})
    while (message := wire.receive())["do"] != "close":
        seconds: list[float] = []
        if message["path"] is not None:
            session = _open(world, message["path"], start["share"], message["optimized"])
            seconds = _seconds(session, message["runs"], message["cold"], message["communicates"])
            del session  # before the world that its kernels use
        wire.send({"seconds": seconds})
    world.close()


def _open(
    world: World, path: str, share: Mapping[str, Any], optimized: bool
) -> ort.InferenceSession:
    """The model, as it is written or optimized, in a rank's share of the cores."""
    options = session_options(world)
    as_written = {"graph_optimization_level": int(ort.GraphOptimizationLevel.ORT_DISABLE_ALL)}
    SessionSpec({} if optimized else as_written).apply(
        options, world.rank, share["threads"], share["spin"]
    )
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _seconds(
    session: ort.InferenceSession, runs: int, cold: bool, communicates: bool
) -> list[float]:
    """The seconds of each run. If ranks do not communicate, the CPU time of this thread: it takes
    part in all work, and the load of other processes does not count."""
    clock = time.perf_counter if communicates else time.thread_time
    other = np.zeros(OTHER if cold else 0, np.int8)
    types = {"tensor(float)": np.float32, "tensor(bool)": np.bool_}
    feeds = {i.name: np.ones(i.shape, types[i.type]) for i in session.get_inputs()}
    found = []
    for _ in range(WARM_UP + runs):
        other += 1
        start = clock()
        session.run(None, feeds)
        found.append(clock() - start)
    return found[WARM_UP:]
