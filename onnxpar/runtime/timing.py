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


def serve_timing(wire: Wire, watch: Watch, start: Mapping[str, Any]) -> None:
    """Times what it is told to until it is told to close.

    A message names the file of a model, and how often to run it; the answer has the seconds of each
    run behind WARM_UP. Inputs are ones, and nothing is moved for them.
    """
    world = World.create(f"rank-{watch.rank}", **start["world"])
    watch.join(world)
    wire.send({})
    while (message := wire.receive())["do"] != "close":
        seconds: list[float] = []
        if message["path"] is not None:
            session = _open(world, message["path"], start["share"])
            seconds = _seconds(session, message["runs"])
            del session  # before the world that its kernels use
        wire.send({"seconds": seconds})
    world.close()


def _open(world: World, path: str, share: Mapping[str, Any]) -> ort.InferenceSession:
    """The model as it is written, in a rank's share of the cores."""
    options = session_options(world)
    as_written = {"graph_optimization_level": int(ort.GraphOptimizationLevel.ORT_DISABLE_ALL)}
    SessionSpec(as_written).apply(options, world.rank, share["threads"], share["spin"])
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _seconds(session: ort.InferenceSession, runs: int) -> list[float]:
    types = {"tensor(float)": np.float32, "tensor(bool)": np.bool_}
    feeds = {i.name: np.ones(i.shape, types[i.type]) for i in session.get_inputs()}
    found = []
    for _ in range(WARM_UP + runs):
        start = time.perf_counter()
        session.run(None, feeds)
        found.append(time.perf_counter() - start)
    return found[WARM_UP:]
