"""What a rank's process does for a calibration: it joins the world, and times models."""

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
    """Times what it is told to until it is told to close.

    A message names the file of a model, how often to run it, whether onnxruntime is to optimize it,
    whether caches are to be cold, and whether ranks talk; the answer has the seconds of each run
    behind WARM_UP. Inputs are ones, and nothing is moved for them.
    """
    world = World.create(f"rank-{watch.rank}", **start["world"])
    watch.join(world)
    wire.send({})
    while (message := wire.receive())["do"] != "close":
        seconds: list[float] = []
        if message["path"] is not None:
            session = _open(world, message["path"], start["share"], message["optimized"])
            seconds = _seconds(session, message["runs"], message["cold"], message["talks"])
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


def _seconds(session: ort.InferenceSession, runs: int, cold: bool, talks: bool) -> list[float]:
    """Of what does not talk, the seconds of this thread alone: it has a part in all work, and what
    other processes do meanwhile does not count."""
    clock = time.perf_counter if talks else time.thread_time
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
