"""The calls that Python users make; the command line is the same with other spelling."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxpar import pipeline
from onnxpar.mesh import Mesh
from onnxpar.pipeline import Options
from onnxpar.plan import Plan
from onnxpar.search.aim import Aim
from onnxpar.strategy import Strategy
from onnxpar.topology import Topology


def shard(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    devices: int | None = None,
    mesh: str | Mesh | None = None,
    preset: str | None = None,
    strategy: str | os.PathLike[str] | Mapping[str, Any] | Strategy | None = None,
    dims: Mapping[str, int] | None = None,
    states: Sequence[tuple[str, str]] = (),
    strict: bool = False,
    verify: bool = False,
    configuration: str | None = None,
    compression: str | None = None,
    topology: str | os.PathLike[str] | Mapping[str, Any] | Topology | None = None,
    search: str | None = None,
    objective: str | None = None,
    memory_limit: float | str | None = None,
    untied: bool = False,
) -> Plan:
    """Writes a model as a folder that `InferenceSession` runs, and returns its plan.

    devices   number of ranks, where no mesh is given
    mesh      named axes, `"dp=2,tp=4"` or a Mesh
    preset    data-parallel, tensor-parallel or hybrid; manual for a program per rank
    strategy  a YAML file, or the same structure in Python: {"shard": {...}, "tensors": {...}}
    dims      sizes of symbolic dimensions, by symbol
    states    (input, output) pairs that are fed back
    strict    an op that stays whole is an error
    verify    check the invariants between passes
    configuration  which multi-device annotations of the model to follow, or "none"
    compression    how gradients of a training step travel: float16, bfloat16 or 2bit:THRESHOLD
    topology  what ranks run on: a file as `onnxpar calibrate` writes it, or the same in Python
    search    auto: the fastest strategy by the cost model of that, which is the default without a
              preset, a strategy and annotations; see `onnxpar shard --help`
    objective      what auto finds the best for: latency, the default, or throughput
    memory_limit   bytes that a rank may hold at any time, or text as "16GB"
    untied         decide each of several repeated blocks by itself
    Errors: OnnxparError, naming what is wrong and the remedy; nothing is left half-written.
    """
    options = _options(
        devices,
        mesh,
        preset,
        strategy,
        dims,
        states,
        strict,
        verify,
        configuration,
        topology,
        search,
        objective,
        memory_limit,
        untied,
        compression,
    )
    return pipeline.shard(Path(model), Path(output), options)


def make_plan(
    model: str | os.PathLike[str],
    *,
    devices: int | None = None,
    mesh: str | Mesh | None = None,
    preset: str | None = None,
    strategy: str | os.PathLike[str] | Mapping[str, Any] | Strategy | None = None,
    dims: Mapping[str, int] | None = None,
    states: Sequence[tuple[str, str]] = (),
    strict: bool = False,
    verify: bool = False,
    configuration: str | None = None,
    compression: str | None = None,
    topology: str | os.PathLike[str] | Mapping[str, Any] | Topology | None = None,
    search: str | None = None,
    objective: str | None = None,
    memory_limit: float | str | None = None,
    untied: bool = False,
) -> Plan:
    """What `shard` would do with the same options; nothing is written."""
    options = _options(
        devices,
        mesh,
        preset,
        strategy,
        dims,
        states,
        strict,
        verify,
        configuration,
        topology,
        search,
        objective,
        memory_limit,
        untied,
        compression,
    )
    return pipeline.plan(Path(model), options)[0]


def annotate(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    devices: int | None = None,
    mesh: str | Mesh | None = None,
    preset: str | None = None,
    strategy: str | os.PathLike[str] | Mapping[str, Any] | Strategy | None = None,
    dims: Mapping[str, int] | None = None,
    states: Sequence[tuple[str, str]] = (),
    strict: bool = False,
    verify: bool = False,
    configuration: str | None = None,
    topology: str | os.PathLike[str] | Mapping[str, Any] | Topology | None = None,
    search: str | None = None,
    objective: str | None = None,
    memory_limit: float | str | None = None,
    untied: bool = False,
) -> Plan:
    """Writes the model with the plan that `shard` would follow as ONNX's multi-device annotations,
    which `shard` reads."""
    options = _options(
        devices,
        mesh,
        preset,
        strategy,
        dims,
        states,
        strict,
        verify,
        configuration,
        topology,
        search,
        objective,
        memory_limit,
        untied,
    )
    return pipeline.annotate(Path(model), Path(output), options)


def _options(
    devices: int | None,
    mesh: str | Mesh | None,
    preset: str | None,
    strategy: str | os.PathLike[str] | Mapping[str, Any] | Strategy | None,
    dims: Mapping[str, int] | None,
    states: Sequence[tuple[str, str]],
    strict: bool,
    verify: bool,
    configuration: str | None,
    topology: str | os.PathLike[str] | Mapping[str, Any] | Topology | None,
    search: str | None,
    objective: str | None,
    memory_limit: float | str | None,
    untied: bool,
    compression: str | None = None,
) -> Options:
    mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    return Options(
        devices,
        mesh,
        preset,
        Strategy.given(strategy),
        dims,
        states,
        strict,
        verify,
        configuration,
        compression,
        topology=Topology.given(topology),
        search=search,
        aim=Aim.given(objective, memory_limit, untied),
    )
