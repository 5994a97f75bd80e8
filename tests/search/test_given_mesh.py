"""A mesh that is given is searched no worse than any search for a mesh has found on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from agreement import check_agrees
from committed import MODELS
from search.test_meshes import ONE, TWO, matmuls

from onnxpar.cost.topology import Topology
from onnxpar.layout.mesh import Mesh
from onnxpar.planner import sharder
from onnxpar.planner.context import load_model, make_context
from onnxpar.planner.options import Options
from onnxpar.search.given_mesh import best_on_mesh
from onnxpar.search.meshes import best_mesh
from onnxpar.search.search import solve


def both(
    path: Path, devices: int, topology: Topology | None, order: int = 1
) -> tuple[float, float, Mesh]:
    """Seconds that a search for a mesh finds, and those on that mesh, its axes in order or not."""
    model = load_model(path, Options(devices=devices))
    ctx = make_context(model, Options(devices=devices, search="propagation"))
    factors = ctx.sharding.factors

    def on_mesh(sharding, given, kept, below):  # type: ignore[no-untyped-def]
        return solve(model.graph, sharding, model.states, given, kept=kept, below=below)

    found = best_mesh(model, factors, devices, topology, on_mesh)
    mesh = Mesh(found.mesh.shape[::order])
    again = best_on_mesh(factors, mesh, topology, on_mesh)
    assert again.mesh == mesh
    return found.seconds, again.seconds, mesh


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "devices", "order"),
    [
        ("bert_encoder.dynamo.static.onnx", 64, 1),
        ("gpt2.dynamo.static.onnx", 8, -1),
        ("resnet.legacy.static.onnx", 6, -1),
        ("dlrm.dynamo.static.onnx", 16, 1),
    ],
)
def test_never_worse_than_the_search_for_a_mesh(name: str, devices: int, order: int) -> None:
    searched, given, mesh = both(MODELS / name, devices, None, order)
    assert given <= searched * (1 + 1e-9), mesh


@pytest.mark.parametrize("topology", [ONE, TWO])
def test_the_order_of_axes_on_a_dimension(topology: dict[str, object], tmp_path: Path) -> None:
    searched, given, mesh = both(matmuls(tmp_path, 4), 8, Topology.of(topology))
    assert given <= searched * (1 + 1e-9), mesh


def test_axes_of_one_rank_may_stand_in_a_mesh(tmp_path: Path) -> None:
    path = matmuls(tmp_path, 4)
    for text in ("dp=1,tp=4", "tp=1", "a=1,b=1"):
        produced, _ = sharder.plan(path, Options(mesh=Mesh.parse(text)))
        assert str(produced.mesh) == text and produced.preset == "auto"


@pytest.mark.slow
def test_a_plan_on_a_mesh_that_is_given_is_right(tmp_path: Path) -> None:
    """Axes stand on dimensions in another order than in the mesh; ranks agree with one."""
    path = MODELS / "gpt2.dynamo.static.onnx"
    check_agrees(path, tmp_path, Options(mesh=Mesh.parse("tp=2,dp=4"), check_layouts=True))
