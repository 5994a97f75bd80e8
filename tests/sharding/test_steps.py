"""Of training steps, the search is at most as slow as presets, which it does not know."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from training.models import BLOCKS, CONV
from training.steps import write_step

from onnxpar.cost.topology import Topology
from onnxpar.layout.mesh import Mesh
from onnxpar.planner import sharder
from onnxpar.planner.loader import Loader
from onnxpar.planner.options import Options
from onnxpar.report.compare_strategies import Candidate, choices, try_candidate

LAYERS = 8
DEEP = f"""deep (float[4096,16] x, {", ".join(f"float[16,16] w{i}" for i in range(LAYERS))})
=> (float[4096,16] y{LAYERS - 1}) {{ y0 = MatMul(x, w0)
{" ".join(f"r{i} = Relu(y{i}) y{i + 1} = MatMul(r{i}, w{i + 1})" for i in range(LAYERS - 1))} }}"""
"""A large batch, and weights of which each gradient is small."""
FAR = Topology.of(
    {
        "levels": [{"name": "host", "size": 16, "latency": 5e-4, "bandwidth": 1e10}],
        "device": {"flops": 1e10, "memory_bandwidth": 1e10, "launch": 1e-8},
    }
)
"""What talking takes is the latency."""
NEAR = Topology.of(
    {
        "levels": [{"name": "host", "size": 16, "latency": 1e-7, "bandwidth": 1e10}],
        "device": {"flops": 1e9, "memory_bandwidth": 1e9, "launch": 1e-8},
    }
)


def candidates(step: Path, mesh: str, topology: Topology) -> Iterator[Candidate]:
    """The presets that apply, and the search as the last."""
    for options in choices(step, Options(mesh=Mesh.parse(mesh), topology=topology)):
        found = try_candidate(step, options, Loader(step))
        if isinstance(found, Candidate):
            yield found


CASES = {
    "blocks, far": (BLOCKS, FAR, "tp=2"),
    "blocks, near": (BLOCKS, NEAR, "dp=2,tp=2"),
    "conv, far": (CONV, FAR, "dp=2,tp=2"),
    "conv, near": (CONV, NEAR, "tp=2"),
    "deep, far": (DEEP, FAR, "tp=2"),
    "deep, near": (DEEP, NEAR, "dp=2,tp=2"),
}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(("model", "topology", "mesh"), CASES.values(), ids=CASES)
def test_no_preset_is_faster(model: str, topology: Topology, mesh: str, tmp_path: Path) -> None:
    *presets, auto = candidates(write_step(model, tmp_path, optimizer="adam"), mesh, topology)
    assert auto.strategy == "auto" and len(presets) > 1
    for preset in presets:
        assert auto.seconds <= preset.seconds * (1 + 1e-9), preset.label


def test_gradients_are_summed_together(tmp_path: Path) -> None:
    """Each alone would take longer than the whole batch on every rank."""
    step = write_step(DEEP, tmp_path)
    plan, _ = sharder.plan(step, Options(mesh=Mesh.parse("tp=2"), search="auto", topology=FAR))
    assert plan.inputs[0].layout is not None
    assert plan.inputs[0].layout.local_shape(plan.mesh, 0) == (2048, 16)
    assert [c.kind for c in plan.collectives].count("AllReduce") <= 2
