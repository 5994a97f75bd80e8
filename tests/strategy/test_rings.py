"""ring-attention: keys and values travel between ranks, forward and backward."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from agreement import TIMEOUT, check_agrees, check_outputs, options, run_unsplit
from committed import MODELS
from small_models import write_text
from training.steps import check_training

import onnxpar
from onnxpar.base.errors import StrategyError
from onnxpar.compiler.plan import Plan
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.runtime.session.threads import ThreadSession
from onnxpar.search.objective import Objective
from onnxpar.training import grad

OPSET = '<ir_version: 10, opset_import: ["" : 25]>'
LAYER = """m (float[2,12,24] x, {more}float[24,32] w1, float[24,16] w2, float[24,16] w3,
float[32,24] w4) => (float[2,12,24] y)
{{ q = MatMul(x, w1)  k = MatMul(x, w2)  v = MatMul(x, w3)
a = Attention<q_num_heads = 8, kv_num_heads = 4{attrs}>({operands})  y = MatMul(a, w4) }}"""
CAUSAL = ", is_causal = 1"


def sent(plan: Plan) -> dict[str, tuple[int, int]]:
    """The number and the bytes of the collectives of each kind."""
    count = Counter(c.kind for c in plan.collectives)
    return {k: (n, sum(c.bytes for c in plan.collectives if c.kind == k)) for k, n in count.items()}


def calls(plan: Plan) -> dict[str, int]:
    """The number of the collectives of each kind."""
    return {kind: n for kind, (n, _) in sent(plan).items()}


def ring(layout: str, **how: object) -> Options:
    return options(f"ring-attention {layout}", **how)  # type: ignore[arg-type]


def layer(
    folder: Path,
    attrs: str = "",
    more: str = "",
    operands: str = "q, k, v",
    n: object = 12,
    sample: object = 2,
) -> Path:
    """One layer of attention: 8 query heads of 4 elements, and 4 key heads."""
    text = LAYER.format(attrs=attrs, more=more, operands=operands)
    text = text.replace("float[2,12,24]", f"float[{sample},{n},24]")
    return write_text(OPSET + text, folder / "m.onnx")


KEYS = 2 * 12 * (16 + 16) * 4
"""Bytes of keys and values in `layer`."""


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["2", "3", "4", "dp=2,cp=2", "cp=2,tp=2"])
def test_ring(layout: str, tmp_path: Path) -> None:
    """Keys and values travel together: each rank sends n-1 times one shard of both."""
    mesh = options(layout).mesh
    ranks = int(layout) if mesh is None else 2
    others = 1 if mesh is None else 2
    plan = check_agrees(layer(tmp_path, ""), tmp_path, ring(layout))
    moved = sent(plan)
    assert moved["CollectivePermute"] == (ranks - 1, (ranks - 1) * KEYS // ranks // others)
    assert not moved.keys() & {"AllGather", "AllToAll"}


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["2", "3", "4", "5", "8", "dp=2,cp=2"])
@pytest.mark.parametrize("attrs", [", is_causal = 1", ", is_causal = 1, left_window_size = 3"])
def test_causal_ring(attrs: str, layout: str, tmp_path: Path) -> None:
    """All-to-alls place queries, and keys with values, in zigzag, and the result back; with fewer
    than two positions per rank, the sequence stays as it is."""
    plan = check_agrees(layer(tmp_path, attrs), tmp_path, ring(layout))
    moved = {kind: n for kind, (n, _) in sent(plan).items()}
    mesh = options(layout).mesh
    ranks = int(layout) if mesh is None else 2
    wanted = {"AllToAll": 3} if 2 * ranks <= 12 else {}
    assert moved == {"CollectivePermute": ranks - 1, **wanted}


@pytest.mark.matrix
@pytest.mark.parametrize("attrs", ["", ", is_causal = 1"])
def test_ring_at_open_lengths(attrs: str, tmp_path: Path) -> None:
    """Positions travel with the keys; some ranks have none."""
    model, par = layer(tmp_path, attrs, n="seq"), tmp_path / "model.par"
    sharder.shard(model, par, ring("3"))
    with ThreadSession(par, timeout=TIMEOUT) as session:
        for length in (1, 2, 3, 7, 12):
            x = np.random.default_rng(length).standard_normal((2, length, 24)).astype(np.float32)
            check_outputs(session.run(None, {"x": x}), run_unsplit(model, {"x": x}), ["y"])


@pytest.mark.slow
def test_a_ring_needs_less_memory(tmp_path: Path) -> None:
    """No rank holds all keys and values. A limit on memory makes the search take the ring, if there
    is only one head."""
    model = layer(tmp_path, CAUSAL, n=64, sample=1)
    held = {}
    for how in (ring("4"), options("context-parallel 4")):
        plan, _ = sharder.plan(model, how)
        held[how.preset] = plan.memory["activations_per_rank"]
    assert held["ring-attention"] <= held["context-parallel"] - 64 * 16 * 4
    text = """m (float[1,1,64,8] x) => (float[1,1,64,8] y)
    { q = Sin(x)  k = Cos(x)  v = Relu(x)  y = Attention<is_causal = 1>(q, k, v) }"""
    one = write_text('<ir_version: 10, opset_import: ["" : 23]>' + text, tmp_path / "one.onnx")
    limit = Objective(memory=5 * 64 * 8 * 4 / 4)
    how = replace(options("cp=4"), search="auto", objective=limit)
    assert "CollectivePermute" in sent(check_agrees(one, tmp_path, how))


def test_what_has_no_ring_is_split_as_by_context_parallel(tmp_path: Path) -> None:
    """Attention in basic ops of 16 bits."""
    plan = check_agrees(MODELS / "gpt2_fp16.dynamo.static.onnx", tmp_path, ring("2"))
    assert calls(plan).keys() == {"AllGather"}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("attrs", ["", CAUSAL])
def test_the_search_knows_what_a_ring_costs(attrs: str, ranks: int, tmp_path: Path) -> None:
    """As many seconds as the collectives of the plan: with three all-to-alls if it is causal."""
    model = layer(tmp_path, attrs, n=16)
    costs = onnxpar.node_costs(model, "Attention_a", mesh=f"cp={ranks}").to_json()
    split = "[-, cp, -]"
    of_ring = [
        strategy["communication"]["inside"]["seconds"]
        for strategy in costs["nodes"][0]["strategies"]
        if {*strategy["inputs"], *strategy["outputs"]} == {split}
    ]
    plan, ctx = sharder.plan(model, ring(str(ranks)))
    axes = (plan.mesh.axis("cp"),)
    spent = [ctx.sharding.costs.collective(c.kind, axes, c.bytes) for c in plan.collectives]
    assert len(spent) == (ranks - 1 + (3 if attrs else 0))
    assert of_ring == [pytest.approx(sum(spent), rel=0.05)]


def test_queries_and_keys_over_axes_of_their_own(tmp_path: Path) -> None:
    """By a strategy file: keys over both axes, queries over one of them, is no ring; it is refused
    rather than computed as one."""
    model = layer(tmp_path, "")
    both = {"shard": {"Attention_a": {"s": "cp", "t": ["cp", "tp"]}}}
    with pytest.raises(StrategyError, match="factor t cannot be split over"):
        sharder.plan(model, options("cp=2,tp=2", strategy=both))
    apart = {"shard": {"Attention_a": {"s": "cp", "t": "tp"}}}
    plan = check_agrees(model, tmp_path, options("cp=2,tp=2", strategy=apart))
    assert sent(plan)["AllReduce"][0] == 2  # log-sum-exp over tp


MASKS = {
    "queries and keys": ("", "bool[2,1,{n},{n}] mask, "),
    "of each head": (CAUSAL, "bool[2,8,{n},{n}] mask, "),
    "keys": (CAUSAL, "bool[2,1,1,{n}] mask, "),
    "a number": (", softcap = 2.0", "float[{n},{n}] mask, "),
}


@pytest.mark.matrix
@pytest.mark.parametrize(("length", "layout"), [(12, "2"), (13, "3"), (3, "4"), (12, "dp=2,cp=2")])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str, length: int, layout: str, tmp_path: Path) -> None:
    """A mask is split by queries; each rank cuts the columns of the keys that it has. Forward and
    backward pass gather nothing; a mask without rows leaves the zigzag as it is."""
    attrs, more = MASKS[mask]
    model = layer(tmp_path, attrs, more.format(n=length), "q, k, v, mask", length)
    plan = check_agrees(model, tmp_path, ring(layout))
    ranks = 2 if "=" in layout else int(layout)
    is_placed = mask == "keys" and length >= 2 * ranks
    assert calls(plan) == {"CollectivePermute": ranks - 1, **({"AllToAll": 3} if is_placed else {})}
    grad(model, tmp_path / "step.onnx", loss="mse", optimizer="sgd")
    plan = check_training(tmp_path / "step.onnx", f"ring-attention {layout}", 2)
    wanted = {"CollectivePermute": 3 * ranks - 2, **({"AllToAll": 7} if is_placed else {})}
    assert {k: n for k, n in calls(plan).items() if k != "AllReduce"} == wanted


@pytest.mark.slow
def test_a_mask_at_open_lengths(tmp_path: Path) -> None:
    """The positions travel with the keys, and choose the columns."""
    model = layer(tmp_path, CAUSAL, "bool[2,1,N,N] mask, ", "q, k, v, mask", "N")
    sharder.shard(model, tmp_path / "model.par", ring("3"))
    with ThreadSession(tmp_path / "model.par", timeout=TIMEOUT) as session:
        for n in (1, 2, 7, 12):
            draw = np.random.default_rng(n)
            x = draw.standard_normal((2, n, 24)).astype(np.float32)
            feeds = {"x": x, "mask": draw.random((2, 1, n, n)) < 0.7}
            check_outputs(session.run(None, feeds), run_unsplit(model, feeds), ["y"])


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["2", "3", "4", "dp=2,cp=2", "cp=2,tp=2"])
@pytest.mark.parametrize("attrs", ["", CAUSAL, ", is_causal = 1, left_window_size = 3"])
def test_training(attrs: str, layout: str, tmp_path: Path) -> None:
    """Keys and values travel n-1 times in each pass, and their gradients n times, in bytes of the
    same number; in causal attention, seven all-to-alls place what both passes read and make."""
    model = layer(tmp_path, attrs)
    grad(model, tmp_path / "step.onnx", loss="mse", optimizer="sgd")
    plan = check_training(tmp_path / "step.onnx", f"ring-attention {layout}", 2)
    ranks = 2 if "=" in layout else int(layout)
    others = 2 if "=" in layout else 1
    moved = sent(plan)
    assert not moved.keys() & {"AllGather", "ReduceScatter"}
    assert moved["CollectivePermute"] == (3 * ranks - 2, (3 * ranks - 2) * KEYS // ranks // others)
    assert moved.get("AllToAll", (0, 0))[0] == (7 if attrs else 0)


@pytest.mark.slow
def test_training_with_fewer_positions_than_ranks(tmp_path: Path) -> None:
    grad(layer(tmp_path, CAUSAL, n=3), tmp_path / "step.onnx", loss="mse", optimizer="sgd")
    plan = check_training(tmp_path / "step.onnx", "ring-attention 5", 2)
    assert calls(plan)["CollectivePermute"] == 13


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("how", "calls_of_rings"),
    [
        ({"recompute": True}, (10, 9)),
        ({"accumulate": 2}, (7, 7)),
        ({"precision": "float16"}, (7, 7)),
        ({"precision": "bfloat16"}, (7, 7)),
        ({"frozen": ["w2"]}, (7, 7)),
        ({"frozen": ["w1"]}, (6, 7)),
    ],
    ids=lambda how: "-".join(map(str, how)),
)
def test_options_of_a_step(
    how: dict[str, object], calls_of_rings: tuple[int, int], tmp_path: Path
) -> None:
    """All-to-alls and permutes over 3 ranks. With recomputation, the backward pass reads the
    attention that it has computed again."""
    step = tmp_path / "step.onnx"
    grad(layer(tmp_path, CAUSAL), step, loss="mse", optimizer="sgd", **how)  # type: ignore[arg-type]
    found = calls(check_training(step, "ring-attention 3", 2))
    assert (found["AllToAll"], found["CollectivePermute"]) == calls_of_rings


BY_HEAD = """m ({type}[2,12,24] x, {more}{type}[24,32] w1, {type}[24,16] w2, {type}[24,16] w3,
{type}[32,24] w4) => ({type}[2,12,24] y)
<int64[4] hq = {{0, 0, 8, 4}}, int64[4] hk = {{0, 0, 4, 4}}, int64[3] back = {{0, 0, 32}}>
{{ q = MatMul(x, w1)  k = MatMul(x, w2)  v = MatMul(x, w3)
q4 = Reshape(q, hq)  k4 = Reshape(k, hk)  v4 = Reshape(v, hk)
qt = Transpose<perm = [0, 2, 1, 3]>(q4)  kt = Transpose<perm = [0, 2, 1, 3]>(k4)
vt = Transpose<perm = [0, 2, 1, 3]>(v4)
a4 = Attention<is_causal = 1, scale = 0.25>(qt, kt, vt{operands})
at = Transpose<perm = [0, 2, 1, 3]>(a4)  a = Reshape(at, back)  y = MatMul(a, w4) }}"""


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("type_", "more", "operands"),
    [("float", "", ""), ("double", "", ""), ("float", "int64[2] lengths, ", ",,,, lengths")],
)
def test_training_by_head(type_: str, more: str, operands: str, tmp_path: Path) -> None:
    """Operands with a dimension for heads; of numbers of 64 bits; and with a length per sample."""
    text = OPSET + BY_HEAD.format(type=type_, more=more, operands=operands)
    grad(write_text(text, tmp_path / "m.onnx"), tmp_path / "step.onnx", loss="mse", optimizer="sgd")
    plan = check_training(tmp_path / "step.onnx", "ring-attention 3", 2)
    assert calls(plan)["CollectivePermute"] == 7


@pytest.mark.slow
def test_training_between_sequences(tmp_path: Path) -> None:
    """12 queries attend to 7 positions of another sequence."""
    text = LAYER.replace("{more}", "float[2,7,24] z, ").replace("MatMul(x, w2)", "MatMul(z, w2)")
    text = text.replace("MatMul(x, w3)", "MatMul(z, w3)").format(attrs="", operands="q, k, v")
    model = write_text(OPSET + text, tmp_path / "m.onnx")
    grad(model, tmp_path / "step.onnx", loss="mse", optimizer="sgd")
    plan = check_training(tmp_path / "step.onnx", "ring-attention 4", 2)
    assert calls(plan) == {"CollectivePermute": 10, "AllReduce": 2}


def test_a_trained_mask_has_no_ring_backward(tmp_path: Path) -> None:
    """Its gradient is a sum over scores, which a ring never has together."""
    model = layer(tmp_path, "", "float[8,12,12] w5, ", "q, k, v, w5")
    grad(model, tmp_path / "step.onnx", loss="mse", optimizer="sgd")
    plan = check_training(tmp_path / "step.onnx", "ring-attention 3", 2)
    assert calls(plan)["CollectivePermute"] == 2 and "AllGather" in calls(plan)


def test_a_changed_gradient_is_not_taken_for_one(tmp_path: Path) -> None:
    """A step whose nodes are no longer those of the gradient is split as it is."""
    step = tmp_path / "step.onnx"
    grad(layer(tmp_path, CAUSAL), step, loss="mse", optimizer="sgd")
    proto = onnx.load(step)
    node = next(n for n in proto.graph.node if "Attention_a.grad/Sub" in n.name)
    node.op_type = "Add"
    onnx.save(proto, step)
    plan = check_training(step, "ring-attention 2", 2)
    assert calls(plan)["CollectivePermute"] == 1


def test_a_step_with_rings_needs_less_memory(tmp_path: Path) -> None:
    """No rank holds all keys, values or their gradients, or the scores of all keys."""
    grad(layer(tmp_path, CAUSAL, n=96), tmp_path / "step.onnx", loss="mse", optimizer="sgd")
    held = {}
    for preset in ("ring-attention", "context-parallel"):
        plan, _ = sharder.plan(tmp_path / "step.onnx", options(f"{preset} 4"))
        held[preset] = plan.memory["activations_per_rank"]
    scores = 2 * 8 * 24 * 96 * 4
    assert held["ring-attention"] <= held["context-parallel"] - scores


@pytest.mark.parametrize("opset", [23, 24, 25])
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_of_rows_that_a_mask_of_numbers_hides(
    opset: int, ranks: int, tmp_path: Path
) -> None:
    """By the least number, or by one beside which the logarithm of a sum of exponentials is lost:
    each rank computes the probabilities of the forward pass again."""
    if opset > onnx.defs.onnx_opset_version():
        pytest.skip("this onnx does not have the opset")
    model = layer(tmp_path, CAUSAL if ranks == 2 else "", "float[12,12] mask, ", "q, k, v, mask")
    proto = onnx.load(model)
    proto.opset_import[0].version = opset
    onnx.save(proto, model)
    step, par = tmp_path / "step.onnx", tmp_path / "step.par"
    grad(model, step, loss="mse", optimizer="sgd")
    onnxpar.shard(step, par, devices=ranks, preset="ring-attention", for_any_host=True)
    random = np.random.default_rng(ranks)
    mask = np.where(random.random((12, 12)) < 0.4, -1e4, 0).astype(np.float32)
    mask[2], mask[4], mask[7] = np.finfo(np.float32).min, -1e4, -1e9
    whole = ort.InferenceSession(str(step))
    feeds = {
        i.name: np.asarray(random.standard_normal(i.shape) * 0.5, np.float32)
        for i in whole.get_inputs()
    }
    feeds |= {"mask": mask, "samples": np.array(2, np.float32)}
    with ThreadSession(par, timeout=60) as session:
        names = ["loss", *(f"w{i}.next" for i in (1, 2, 3, 4))]
        found = session.run(names, feeds)
    for own, wanted in zip(found, whole.run(names, feeds), strict=True):
        np.testing.assert_allclose(own, wanted, rtol=2e-5, atol=2e-5)
