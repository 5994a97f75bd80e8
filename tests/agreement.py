"""Shards a model, runs its ranks as threads, and holds every output against onnxruntime's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

import onnxpar
from onnxpar.compiler.plan import Plan, Port
from onnxpar.cost.topology import Topology
from onnxpar.layout.mesh import Mesh
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.runtime.session.feeds import make_feeds
from onnxpar.runtime.session.threads import ThreadSession
from onnxpar.strategy.strategy import Strategy

Array = npt.NDArray[Any]

TOLERANCE = {"float32": 1e-5, "float16": 5e-3}
"""The largest error of an output, as a share of its largest reference value; others are equal."""
TIMEOUT = 60.0
"""Seconds after which a collective that waits is a deadlock."""


def options(
    layout: str,
    *,
    dims: Mapping[str, int | str] | None = None,
    strategy: Mapping[str, Any] | None = None,
    topology: Topology | None = None,
) -> Options:
    """Options from `tensor-parallel 4`, `hybrid dp=2,tp=3`, or a mesh alone; verifying."""
    preset, _, mesh = layout.rpartition(" ")
    return Options(
        devices=int(mesh) if mesh.isdigit() else None,
        mesh=None if mesh.isdigit() else Mesh.parse(mesh),
        preset=preset or None,
        dims=dims,
        strategy=None if strategy is None else Strategy.of(strategy),
        topology=topology,
        check_layouts=True,
    )


def feeds_for(plan: Plan) -> dict[str, Array]:
    """Random feeds that every table accepts, in which no mask hides a whole row."""
    ports = [(p.name, p.dtype, shape_of(p)) for p in plan.inputs]
    feeds = make_feeds(ports, plan.ranges)
    for name, bounds in plan.ranges.items():
        if bounds == (0, 2) and feeds[name].ndim:
            feeds[name][..., 0] = 1
    return feeds


def shape_of(port: Port) -> tuple[int, ...]:
    """The global shape of a port of which no size is open."""
    assert port.shape is not None
    return port.shape


def run_unsplit(model: Path, feeds: Mapping[str, Array]) -> list[Array]:
    """The outputs of the unsplit model, in order."""
    one_thread = ort.SessionOptions()
    one_thread.intra_op_num_threads = 1
    one_thread.log_severity_level = 3
    session = ort.InferenceSession(str(model), one_thread, providers=["CPUExecutionProvider"])
    return [np.asarray(out) for out in session.run(None, dict(feeds))]


def run_ranks(par: Path, feeds: Mapping[str, Array]) -> list[Array]:
    """The assembled outputs of a sharded model, in order; ranks are threads."""
    with ThreadSession(par, timeout=TIMEOUT) as session:
        return [np.asarray(out) for out in session.run(None, dict(feeds))]


@cache
def reference(
    model: Path, dims: tuple[tuple[str, int], ...] = ()
) -> tuple[dict[str, Array], list[Array]]:
    """Feeds for a model, and what onnxruntime makes of them; once for all its shardings."""
    plan, _ = sharder.plan(model, Options(devices=1, preset="tensor-parallel", dims=dict(dims)))
    feeds = feeds_for(plan)
    return feeds, run_unsplit(model, feeds)


def check_agrees(model: Path, folder: Path, how: Options) -> Plan:
    """Shards into `folder`, and proves the folder; an AssertionError where an output differs from
    the unsplit model's."""
    par = folder / "model.par"
    plan = sharder.shard(model, par, how)
    proof = onnxpar.verify(model, par)
    assert proof.ok, proof.text()
    feeds, wanted = reference(model, tuple(sorted((how.dims or {}).items())))
    check_outputs(run_ranks(par, feeds), wanted, [p.name for p in plan.outputs])
    return plan


def check_outputs(got: Sequence[Array], wanted: Sequence[Array], names: Sequence[str]) -> None:
    """An AssertionError naming the first output that is not within its dtype's tolerance."""
    for name, a, b in zip(names, got, wanted, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, f"{name}: {a.dtype} {a.shape}"
        error = relative_error(a, b)
        allowed = TOLERANCE.get(b.dtype.name, 0.0)
        assert error <= allowed, f"{name}: error {error:.1e} is over {allowed:.0e}"


def relative_error(got: Array, wanted: Array) -> float:
    """The largest difference as a share of the largest value; inf where NaN or inf disagree.

    For what is not floating point, the share of elements that differ.
    """
    if wanted.dtype.kind != "f":
        return float(np.mean(got != wanted)) if wanted.size else 0.0
    a, b = got.astype(np.float64), wanted.astype(np.float64)
    odd = ~np.isfinite(b)
    if not np.array_equal(a[odd], b[odd], equal_nan=True) or not np.isfinite(a[~odd]).all():
        return float("inf")
    scale = np.abs(b[~odd]).max(initial=0.0)
    worst = np.abs(a[~odd] - b[~odd]).max(initial=0.0)
    return float(worst / scale) if scale else float(worst)
