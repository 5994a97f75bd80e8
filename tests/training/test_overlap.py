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
from onnx import helper
from training.steps import CROSS_ENTROPY, ThreadTrainer, batches, same, states, write_step

from onnxpar.compiler.plan import Plan
from onnxpar.cost.topology import Topology
from onnxpar.lowering.fill_windows import Filling, find_fillings
from onnxpar.passes.lower import overlap_collectives
from onnxpar.planner import sharder
from onnxpar.report.compare_training import compare_training
from onnxpar.report.explain import explain
from onnxpar.search.objective import Objective
from onnxpar.training import grad

MODELS = Path(__file__).parents[2] / "models"
DEEP = """deep (float[7,6] x, float[6,9] w1, float[9] w2, float[9,8] w3, float[8] w4,
float[8,8] w5, float[8,5] w6) => (float[7,5] y)
{ a = Gemm(x, w1, w2)  b = Relu(a)  c = Gemm(b, w3, w4)  d = Tanh(c)  e = MatMul(d, w5)
  f = Relu(e)  y = MatMul(f, w6) }"""
TURNED = """turned (float[4,3,6] x, float[6,8] w1, float[5,8] w2) => (float[4,3,5] y)
{ a = MatMul(x, w1)  b = Tanh(a)  t = Transpose(w2)  y = MatMul(b, t) }"""
"""Forwards, ranks gather the transposed weight; backwards, that transposed again."""
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
    return par, sharder.shard(step, par, replace(options(layout), **how))


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


@pytest.mark.slow
@pytest.mark.matrix
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
    local = ("Complete", "After", "Gate", "FusedElementwise")  # no loop reads before a completion
    collectives = {op: n for op, n in counts.items() if op not in local}
    if fusion != "cost":  # without overlap, these buckets are those by size
        assert collectives == {op: n for op, n in Counter(plain).items() if op not in local}
    assert counts["Complete"] or "tensor-parallel" in layout or fusion == "size"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero3 2", "zero3 4"])
def test_one_node_prepares_several_gathers(layout: str, tmp_path: Path) -> None:
    """It runs before the first of them starts."""
    step = write_step(TURNED, tmp_path, loss="mse", optimizer="adam")
    with_, ops = trained(step, layout, "on", "none")
    without, _ = trained(step, layout, "off", "none")
    assert "StartAllGather" in ops
    same(with_, without)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("layout", ["data-parallel 2", "zero3 2", "hybrid dp=2,tp=2"])
def test_a_transformer_trains_as_on_one_rank(layout: str, transformer: Path) -> None:
    with_, ops = trained(transformer, layout, "on", "none")
    assert ops.count("Complete") > 10
    without, _ = trained(transformer, layout, "off", "none")
    same(with_, without)


def hosts_of(ranks: int) -> Topology:
    """Hosts whose links take about as long as a layer of the transformer."""
    host = {"name": "host", "size": ranks, "latency": "50 us", "bandwidth": "2 GB/s"}
    network = {"name": "network", "latency": "1 ms", "bandwidth": "10 MB/s"}
    return Topology.of({"levels": [host, network], "device": {"flops": "1 GFLOP/s"}})


@pytest.fixture
def fillings(monkeypatch: pytest.MonkeyPatch) -> list[Filling]:
    """The nodes that the last plan moved to where a collective is under way."""
    found: list[Filling] = []

    def find(*args: Any) -> list[Filling]:
        found[:] = find_fillings(*args)
        return found

    monkeypatch.setattr(overlap_collectives, "find_fillings", find)
    return found


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize(
    "layout, ranks_per_host",
    [("hybrid dp=2,tp=2", 2), ("hybrid dp=2,tp=2", 1), ("tensor-parallel 4", 2),
     ("tensor-parallel 2", 1), ("data-parallel 4", 2)],
)  # fmt: skip
def test_moved_nodes_train_to_the_same_bits(
    layout: str, ranks_per_host: int, transformer: Path, fillings: list[Filling]
) -> None:
    how = {"topology": hosts_of(ranks_per_host), "fusion": "none"}
    two, plan = shard(transformer, layout, **how)
    assert fillings, "nothing has moved"
    one, _ = shard(transformer, layout, overlap="off", **how)
    assert "Complete" in ops_of(two)
    assert "Complete" not in ops_of(one)
    found = []
    for par in (two, one):
        with ThreadTrainer(par) as trainer:
            for batch in batches(plan, 2):
                trainer.step(batch, 0.05)
            found.append(states(trainer))
    same(*found)


@pytest.mark.slow
def test_plans_count_what_moved_nodes_keep(transformer: Path, fillings: list[Filling]) -> None:
    """Operands of products that wait for a sum live longer. Within a memory limit, none moves."""
    how = {"topology": hosts_of(2)}
    with_, without = (
        shard(transformer, "tensor-parallel 4", overlap=each, **how)[1] for each in ("auto", "off")
    )
    assert fillings
    most, least = (p.memory["activations_per_rank"] for p in (with_, without))
    assert least < most < 1.2 * least
    rest = with_.memory["weights_per_rank"] + with_.memory["states_per_rank"]
    limited = Objective(memory=rest + (most + least) / 2)
    fillings.clear()
    _, within = shard(transformer, "tensor-parallel 4", objective=limited, **how)
    assert not fillings and within.memory["activations_per_rank"] == least


@pytest.mark.slow
@pytest.mark.usefixtures("medium")
def test_training_over_a_slow_link_agrees_with_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONNXPAR_LINK", "latency=2ms,bandwidth=1MB/s")
    step = write_step(DEEP, tmp_path)
    for layout in ("data-parallel 3", "zero3 3", "hybrid dp=2,tp=2"):
        par, plan = shard(step, layout, topology=SLOW, fusion="none")
        assert "Complete" in ops_of(par)
        with ThreadTrainer(par) as trainer:
            report = compare_training(step, trainer, list(batches(plan, 2)), 0.05)
        assert report.ok, report.text()


def test_gradients_are_sent_behind_the_backward_pass(tmp_path: Path) -> None:
    """Each gradient starts when it is there, and the first update waits for the first of them."""
    par, _ = shard(write_step(DEEP, tmp_path), "data-parallel 2", topology=SLOW, fusion="none")
    ops = ops_of(par)
    # that of the number of labels, and four gradients: nothing is left behind the last two
    assert ops.count("StartAllReduce") == 5
    gradients = ops.index("Complete") + 1
    update = ops.index("Complete", gradients)
    assert ops[gradients:update].count("StartAllReduce") == 4


def test_gradients_of_a_hybrid_are_sent_beside_the_sums_of_its_layers(tmp_path: Path) -> None:
    """No sum over tp waits for a gradient that is on its way, so all of these start first."""
    step = write_step(DEEP, tmp_path)
    par, plan = shard(step, "hybrid dp=2,tp=2", overlap="on", fusion="none")
    model = onnx.load(par / "rank_0001.onnx", load_external_data=False)
    of = {
        n.name: {a.name: helper.get_attribute_value(a) for a in n.attribute}
        for n in model.graph.node
    }
    nodes = [n for n in model.graph.node if n.op_type.endswith("AllReduce")]
    streams = {(tuple(of[n.name]["group"]), of[n.name].get("stream", 0)) for n in nodes}
    assert plan.streams == len({stream for _, stream in streams}) > 1
    assert len(dict(streams)) == len(streams), "a group is in two streams"
    ops = ops_of(par)
    first, last = ops.index("StartAllReduce"), len(ops) - ops[::-1].index("Complete")
    assert "AllReduce" in ops[first:last]


@pytest.mark.slow
def test_buckets_are_cut_only_where_ranks_communicate_while_they_compute(tmp_path: Path) -> None:
    step = write_step(DEEP, tmp_path)

    def buckets(fusion: str, **how: Any) -> int:
        return len(shard(step, "data-parallel 2", fusion=fusion, **how)[1].collectives)

    few = buckets("size")
    assert buckets("cost", topology=SLOW) > few
    assert buckets("cost", overlap="on") >= few
    assert buckets("cost", topology=SLOW, overlap="off") == buckets("cost") == few


@pytest.mark.slow
def test_predictions_leave_out_what_is_hidden(tmp_path: Path) -> None:
    """Not more than there is, and nothing on one host; candidates compare the same times."""
    step = write_step(DEEP, tmp_path)
    how = {"topology": SLOW, "fusion": "none"}
    with_, without = (shard(step, "data-parallel 2", overlap=o, **how)[1] for o in ("auto", "off"))
    assert with_.predicted is not None and without.predicted is not None
    assert with_.predicted.compute == without.predicted.compute
    assert 0 < with_.hidden <= without.predicted.communication
    shown = without.predicted.communication - with_.hidden
    assert with_.predicted.communication == pytest.approx(shown)
    for overlap, plan in (("auto", with_), ("off", without)):
        explained = explain(step, replace(options("data-parallel 2"), overlap=overlap, **how))
        assert plan.predicted is not None
        assert explained.predicted.total == pytest.approx(plan.predicted.total)
    assert shard(step, "data-parallel 2", overlap="on", fusion="none")[1].hidden == 0


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


@pytest.mark.matrix
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


@pytest.mark.slow
def test_what_is_too_short_to_pay_stays_in_one_op(tmp_path: Path) -> None:
    """The device computes a layer in less time than a copy takes."""
    fast = Topology(SLOW.levels)
    par, _ = shard(write_step(DEEP, tmp_path), "zero3 2", topology=fast, fusion="none")
    few = ops_of(par).count("Complete")
    par, _ = shard(write_step(DEEP, tmp_path), "zero3 2", topology=SLOW, fusion="none")
    assert few < ops_of(par).count("Complete")
