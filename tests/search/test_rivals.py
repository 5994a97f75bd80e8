"""The search is as fast as every preset and as Megatron's plan, which it does not know, and finds
by itself what experts do."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest
from bench import model_shapes
from bench.rivals import HOSTS, SAME, TOPOLOGIES, WORKLOADS, meshes, rivals, searched

import onnxpar
from onnxpar.compiler.plan import Plan
from onnxpar.layout.mesh import Mesh
from onnxpar.planner.options import Options

CASES = [
    *((name, "hosts of 8", 2) for name in WORKLOADS),
    ("GPT-2 XL, 1 x 16", "one host", 8),
    ("BERT large, 1 x 128", "hosts of 8", 64),
    ("Llama 3 8B, 1 x 1", "hosts of 8", 1024),
    ("GShard, 1 x 64", "one host", 4),
    ("DLRM, 8192", "one host", 64),
    ("ResNet-50, 1", "hosts of 8", 8),
]
"""The rest is in tests/bench/bench_rivals.py, as it takes minutes."""


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(("name", "machine", "ranks"), CASES)
def test_nothing_is_faster(name: str, machine: str, ranks: int, tmp_path: Path) -> None:
    """Neither over the mesh that was found nor over its own."""
    work, topology = WORKLOADS[name], TOPOLOGIES[machine]
    model = work.write(tmp_path / "model.onnx")
    best = searched(model, Options(devices=ranks, topology=topology)).predicted.total
    some = (m for m in meshes(ranks) if ranks <= 8 or m.sizes["tp"] in (8, ranks))
    for mesh in some:
        given = Options(mesh=mesh, topology=topology)
        own = searched(model, given).predicted.total
        assert best <= own * (1 + SAME), mesh
        for rival, seconds in rivals(work, model, given).items():
            assert own <= seconds * (1 + SAME), (mesh, rival)


@pytest.mark.slow
def test_rivals_apply(tmp_path: Path) -> None:
    """Otherwise nothing would be compared."""
    work = WORKLOADS["GPT-2 XL, 1024 x 64"]
    model = work.write(tmp_path / "model.onnx")
    found = {str(mesh): {*rivals(work, model, Options(mesh=mesh))} for mesh in meshes(4)}
    both = {"megatron", "sequence-parallel"}
    assert found == {
        "tp=4": {"data-parallel", "tensor-parallel", *both},
        "dp=2,tp=2": {"hybrid", *both},
    }
    experts = WORKLOADS["GShard, 1024 x 64"]
    model = experts.write(tmp_path / "experts.onnx")
    assert "expert-parallel" in rivals(experts, model, Options(mesh=Mesh.parse("tp=4")))


def found_for(model: Path, ranks: int) -> Plan:
    return onnxpar.plan(model, devices=ranks, search="auto", topology=HOSTS)


def kinds(plan: Plan) -> list[str]:
    return [entry.kind for entry in plan.collectives]


def split_along(plan: Plan) -> dict[int, set[str]]:
    """The weights of which ranks hold parts, by dimension, without the numbers of layers. Vectors
    are as what they are added to."""
    found: dict[int, set[str]] = defaultdict(set)
    for weight in plan.weights:
        dims = weight.layout_text[1:-1].split(", ")
        for i, axes in enumerate(dims if len(dims) > 1 else ()):
            if axes != "-":
                found[i].add(weight.name.split(".")[0])
    return found


FEW_TOKENS = {
    "gpt2": (
        partial(model_shapes.gpt2, seq=16, layers=4, width=1600, heads=25),
        {0: {"o", "down", "wte"}, 1: {"qkv", "up"}},
    ),
    "llama": (
        partial(model_shapes.llama, seq=1),
        {0: {"o", "down"}, 1: {"q", "k", "v", "gate", "up", "head"}},
    ),
    "bert": (
        partial(model_shapes.bert, seq=16),
        {0: {"o", "down"}, 1: {"q", "k", "v", "up", "classifier"}},
    ),
}
"""Models, and the weights of which ranks hold rows and columns."""


@pytest.mark.matrix
@pytest.mark.parametrize("name", FEW_TOKENS)
def test_few_tokens_take_two_all_reduces_in_a_layer(name: str, tmp_path: Path) -> None:
    """Shoeybi et al., "Megatron-LM" (2019): where reading the weights is what takes the time."""
    write, weights = FEW_TOKENS[name]
    plan = found_for(write(tmp_path / "model.onnx", batch=1), 2)
    assert kinds(plan) == ["AllReduce"] * 2 * 4
    assert split_along(plan) == weights


@pytest.mark.matrix
@pytest.mark.parametrize("name", [n for n in WORKLOADS if "1024" in n or "8192" in n])
def test_a_large_batch_is_split(name: str, tmp_path: Path) -> None:
    plan = found_for(WORKLOADS[name].write(tmp_path / "model.onnx"), 2)
    assert not plan.collectives and not split_along(plan)
    for port in plan.inputs:
        assert port.layout is not None and port.shape is not None
        assert port.layout.local_shape(plan.mesh, 0) == (port.shape[0] // 2, *port.shape[1:])


@pytest.mark.slow
def test_experts_are_split_where_their_weights_take_long(tmp_path: Path) -> None:
    """Lepikhin et al., "GShard" (2020): tokens like a batch, and one all-to-all to the experts and
    one back."""
    plan = found_for(model_shapes.gshard(tmp_path / "model.onnx", batch=64, seq=64), 8)
    assert kinds(plan) == ["AllToAll"] * 2 * 3
    assert split_along(plan) == {0: {"wi", "wo"}}
    layout = plan.inputs[0].layout
    assert layout is not None and layout.local_shape(plan.mesh, 0) == (8, 64)


@pytest.mark.slow
def test_tables_that_no_rank_could_hold_are_split(tmp_path: Path) -> None:
    """Naumov et al., "Deep Learning Recommendation Model" (2019): tables are dealt out, samples are
    too, and what is looked up goes from one to the other, not the tables."""
    model = model_shapes.dlrm(tmp_path / "model.onnx", batch=1024)
    limit = 1.2e9
    plan = onnxpar.plan(model, devices=2, topology=HOSTS, memory_limit=limit)
    assert sum(plan.memory.values()) <= limit < sum(w.bytes for w in plan.weights)
    assert any("table" in names for names in split_along(plan).values())
    assert kinds(plan) and {*kinds(plan)} <= {"AllToAll", "ReduceScatter"}
    assert sum(entry.bytes for entry in plan.collectives) < 1e8
    dense = plan.inputs[0].layout
    assert dense is not None and dense.local_shape(plan.mesh, 0) == (512, 13)
