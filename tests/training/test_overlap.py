"""Steps whose ranks communicate while they compute train to the same bits as those that do not."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from agreement import options
from training.steps import CROSS_ENTROPY, ThreadTrainer, batches, same, states, write_step

from onnxpar.checking.compare_training import compare_training
from onnxpar.compiler.plan import Plan
from onnxpar.cost.topology import Topology
from onnxpar.passes import overlap_collectives
from onnxpar.pipeline import pipeline
from onnxpar.training import grad

MODELS = Path(__file__).parents[2] / "models"
DEEP = """deep (float[7,6] x, float[6,9] w1, float[9] w2, float[9,8] w3, float[8] w4,
float[8,8] w5, float[8,5] w6) => (float[7,5] y)
{ a = Gemm(x, w1, w2)  b = Relu(a)  c = Gemm(b, w3, w4)  d = Tanh(c)  e = MatMul(d, w5)
  f = Relu(e)  y = MatMul(f, w6) }"""
SLOW = Topology.of(
    {
        "levels": [
            {"name": "host", "size": 1, "latency": "50 us", "bandwidth": "2 GB/s"},
            {"name": "network", "latency": "1 ms", "bandwidth": "100 MB/s"},
        ],
        "device": {"flops": "1 MFLOP/s"},
    }
)
"""Hosts of one rank each that compute slowly: it pays to hide all that can be hidden."""

LAYOUTS = (
    "data-parallel 2",
    "data-parallel 3",
    "data-parallel 5",
    "zero1 2",
    "zero2 3",
    "zero3 2",
    "zero3 3",
    "zero3 5",
    "tensor-parallel 2",
    "hybrid dp=2,tp=2",
)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The step of a small perceptron."""
    return write_step(DEEP, tmp_path_factory.mktemp("deep"), optimizer="adam")


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The step of a committed export."""
    step = tmp_path_factory.mktemp("transformer") / "step.onnx"
    grad(MODELS / "gpt2.legacy.training.onnx", step, loss=CROSS_ENTROPY, optimizer="adam")
    return step


def shard(step: Path, layout: str, **how: Any) -> tuple[Path, Plan]:
    """Shards a step with these options; returns the folder."""
    par = step.with_name(f"{layout}.{len(list(step.parent.iterdir()))}.par")
    return par, pipeline.shard(step, par, replace(options(layout), **how))


def ops_of(par: Path, rank: int = 0) -> list[str]:
    """The plugin's ops of a rank, in order."""
    model = onnx.load(par / f"rank_{rank:04d}.onnx", load_external_data=False)
    return [node.op_type for node in model.graph.node if node.domain == "onnxpar"]


@functools.cache
def shard_once(step: Path, layout: str, overlap: str, fusion: str) -> tuple[Path, Plan]:
    """Shards a step for all media."""
    return shard(step, layout, overlap=overlap, fusion=fusion)


def trained(step: Path, layout: str, overlap: str, fusion: str) -> tuple[dict[str, Any], list[str]]:
    """All that ranks keep after a few steps, and their ops."""
    par, plan = shard_once(step, layout, overlap, fusion)
    with ThreadTrainer(par) as trainer:
        for batch in batches(plan, 3):
            trainer.step(batch, 0.05)
        return states(trainer), ops_of(par)


@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("fusion", ["none", "cost", "size"])
@pytest.mark.parametrize(
    "layout",
    LAYOUTS,
)
def test_same_bits_with_and_without(layout: str, fusion: str, deep: Path) -> None:
    """7 samples and 5 columns: shards differ, and some ranks of five have one sample."""
    with_, ops = trained(deep, layout, "on", fusion)
    without, plain = trained(deep, layout, "off", fusion)
    same(with_, without)
    counts = Counter(op.removeprefix("Start") for op in ops)
    assert counts["Complete"] == sum(op.startswith("Start") for op in ops)
    assert {
        op: n for op, n in counts.items() if op not in ("Complete", "After", "Gate")
    } == Counter(plain)
    assert counts["Complete"] or "tensor-parallel" in layout or fusion == "size"


@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("layout", ["data-parallel 2", "zero3 2", "hybrid dp=2,tp=2"])
def test_a_transformer_trains_as_on_one_rank(layout: str, transformer: Path) -> None:
    with_, ops = trained(transformer, layout, "on", "none")
    assert ops.count("Complete") > 10
    without, _ = trained(transformer, layout, "off", "none")
    same(with_, without)


@pytest.mark.usefixtures("medium")
def test_training_over_a_slow_link_agrees_with_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONNXPAR_LINK", "latency=2ms,bandwidth=1MB/s")
    step = write_step(DEEP, tmp_path)
    for layout in ("data-parallel 3", "zero3 3"):
        par, plan = shard(step, layout, topology=SLOW, fusion="none")
        assert "Complete" in ops_of(par)
        with ThreadTrainer(par) as trainer:
            report = compare_training(step, trainer, list(batches(plan, 2)), 0.05)
        assert report.ok, report.text()


def test_gradients_are_sent_behind_the_backward_pass(tmp_path: Path) -> None:
    """Each gradient starts when it is there, and the first update waits for the first of them."""
    par, _ = shard(write_step(DEEP, tmp_path), "data-parallel 2", topology=SLOW, fusion="none")
    ops = ops_of(par)
    assert ops.count("StartAllReduce") == 4  # nothing is left to compute behind the last two
    first = ops.index("Complete")
    assert ops[:first].count("StartAllReduce") == ops.count("StartAllReduce")


def test_parameters_are_gathered_for_two_nodes_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node has at most two parameters; what starts next does so once the last but one is
    complete."""
    monkeypatch.setattr(overlap_collectives, "PART_BYTES", 1)
    par, _ = shard(write_step(DEEP, tmp_path), "zero3 2", topology=SLOW)
    under_way = 0
    for op in [op for op in ops_of(par) if op.endswith(("AllGather", "Complete"))][:8]:
        under_way += {"StartAllGather": 1, "Complete": -1, "AllGather": 0}[op]
        assert 0 <= under_way <= 4
    assert "StartAllGather" in ops_of(par)


@pytest.mark.parametrize(
    ("layout", "topology"),
    [
        ("data-parallel 2", None),
        ("zero3 2", None),
        ("data-parallel 2", Topology.of({"levels": [
            {"name": "host", "size": 2, "latency": "1 ms", "bandwidth": "1 MB/s"},
            {"name": "network", "latency": "1 ms", "bandwidth": "100 MB/s"}]})),
    ],
)  # fmt: skip
def test_on_one_host_ranks_do_not_start_anything(
    layout: str, topology: Topology | None, tmp_path: Path
) -> None:
    step = write_step(DEEP, tmp_path)
    par, plan = shard(step, layout, topology=topology, fusion="none")
    assert plan.collectives
    assert not [op for op in ops_of(par) if op in ("Complete", "After")]


def test_what_is_too_short_to_pay_stays_in_one_op(tmp_path: Path) -> None:
    """The device computes a layer in less time than a copy takes."""
    fast = Topology(SLOW.levels)
    par, _ = shard(write_step(DEEP, tmp_path), "zero3 2", topology=fast, fusion="none")
    few = ops_of(par).count("Complete")
    par, _ = shard(write_step(DEEP, tmp_path), "zero3 2", topology=SLOW, fusion="none")
    assert few < ops_of(par).count("Complete")
