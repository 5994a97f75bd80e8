"""context-parallel: sequences in parts, attention by gathered keys and values or by all-to-all."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from agreement import (
    TIMEOUT,
    check_agrees,
    check_outputs,
    feeds_for,
    options,
    run_ranks,
    run_unsplit,
)
from committed import MODELS, ODD, dims_of
from small_models import HEAD, write_text
from training import steps
from training.steps import CROSS_ENTROPY, check_training

from onnxpar.base.errors import StrategyError
from onnxpar.compiler.plan import Plan
from onnxpar.cost.topology import Topology
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.runtime.session.threads import ThreadSession
from onnxpar.training import grad

NO_LATENCY = Topology.of({"levels": [{"name": "host", "latency": "1 ns", "bandwidth": "1 GB/s"}]})
"""On these links, only bytes count: more and smaller messages win."""


def context(layout: str, by_bytes: bool = False, **how: object) -> Options:
    found = options(f"context-parallel {layout}", **how)  # type: ignore[arg-type]
    return replace(found, topology=NO_LATENCY) if by_bytes else found


def sent(plan: Plan) -> dict[str, tuple[int, int]]:
    """The number and the bytes of the collectives of each kind."""
    count = Counter(c.kind for c in plan.collectives)
    return {k: (n, sum(c.bytes for c in plan.collectives if c.kind == k)) for k, n in count.items()}


POSITIONS = 4 * 16
"""Of the committed static exports: a batch of 4 sequences of 16 tokens."""
LAYERS = 2


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("model", "width"),
    [("gpt2.legacy", 48), ("gpt2.dynamo", 48), ("llama.dynamo", 24), ("llama.legacy", 24)],
)
def test_keys_and_values_are_gathered(model: str, width: int, ranks: int, tmp_path: Path) -> None:
    """As in Llama 3: two all-gathers per layer, of keys before they are repeated for query
    heads."""
    plan = check_agrees(MODELS / f"{model}.static.onnx", tmp_path, context(str(ranks)))
    assert {kind: n for kind, (n, _) in sent(plan).items()} == {"AllGather": 2 * LAYERS}
    gathered = [c.bytes for c in plan.collectives]
    whole = POSITIONS * width * 4
    assert all(abs(b - whole * (ranks - 1) / ranks) <= whole / 16 for b in gathered)
    layouts = {p.name: p.layout.text(plan.mesh) for p in plan.outputs if p.layout is not None}
    assert layouts["logits"] == "[-, cp, -]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "widths"),
    [("gpt2.legacy", (48, 48, 48, 48)), ("llama.dynamo", (48, 24, 24, 48))],
)
def test_positions_are_exchanged_for_heads(
    model: str, widths: tuple[int, ...], tmp_path: Path
) -> None:
    """As in DeepSpeed-Ulysses: three all-to-alls before the attention of a layer, and one after."""
    plan = check_agrees(MODELS / f"{model}.static.onnx", tmp_path, context("4", by_bytes=True))
    total = LAYERS * sum(POSITIONS * w * 4 // 4 * 3 // 4 for w in widths)
    assert sent(plan) == {"AllToAll": (4 * LAYERS, total)}


@pytest.mark.slow
def test_heads_that_ranks_do_not_divide_are_not_exchanged(tmp_path: Path) -> None:
    """3 key heads over 4 ranks; and a sequence of which BERT cuts off the first token."""
    for model in ("llama_heads9.dynamo", "bert.legacy"):
        folder = tmp_path / model
        folder.mkdir()
        how = context("4", by_bytes=True)
        plan = check_agrees(MODELS / f"{model}.static.onnx", folder, how)
        assert sent(plan).keys() == {"AllGather"} and len(plan.collectives) == 2 * LAYERS


@pytest.mark.matrix
@pytest.mark.parametrize("by_bytes", [False, True])
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("t5.legacy.static", "4"),
        ("falcon.legacy.static", "3"),
        ("mixtral.legacy.static", "4"),
        ("gpt2.legacy.static", "dp=2,cp=2"),
        ("llama.legacy.static", "cp=2,tp=2"),
        ("gpt_neox.dynamo.static", "cp=4,tp=2"),
        ("llama.legacy.static", "8"),
    ],
)
def test_agrees(model: str, layout: str, by_bytes: bool, tmp_path: Path) -> None:
    """Encoders and decoders, rotary positions, experts, and meshes with other axes."""
    check_agrees(MODELS / f"{model}.onnx", tmp_path, context(layout, by_bytes))


def test_axes_of_a_mesh(tmp_path: Path) -> None:
    """dp splits samples, cp positions, and tp layers: an all-reduce of the tensor-parallel layers
    has a part of the sequence."""
    plan = check_agrees(MODELS / "llama.dynamo.static.onnx", tmp_path, context("cp=2,tp=2"))
    part = POSITIONS // 2 * 48 * 4
    assert sent(plan)["AllGather"] == (2 * LAYERS, LAYERS * 2 * POSITIONS * 12 * 4 // 2)
    assert sent(plan)["AllReduce"] == (2 * LAYERS + 1, (2 * LAYERS + 1) * part)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["3", "dp=2,cp=2"])
@pytest.mark.parametrize("model", ["gpt2.dynamo", "llama.legacy", "bert.dynamo"])
def test_open_lengths(model: str, layout: str, tmp_path: Path) -> None:
    """One program for lengths that the ranks do not divide, and for one token over all of them."""
    path, par = MODELS / f"{model}.dynamic.onnx", tmp_path / "model.par"
    plan = sharder.shard(path, par, context(layout))
    names = [p.name for p in plan.outputs]
    with ThreadSession(par, timeout=TIMEOUT) as session:
        for length in (1, 2, 7, 12):
            dims = dims_of(path.name, {**ODD, "batch": 2, "seq": length})
            whole = Options(devices=1, preset="tensor-parallel", dims=dims)
            feeds = feeds_for(sharder.plan(path, whole)[0])
            check_outputs(session.run(None, feeds), run_unsplit(path, feeds), names)


PROJECTED = """m (float[2,12,24] x, {more}float[24,{q}] w1, float[24,{k}] w2, float[24,{k}] w3,
float[{q},24] w4) => (float[2,12,24] y)
{{ q = MatMul(x, w1)  k = MatMul(x, w2)  v = MatMul(x, w3)  {attention}  y = MatMul(a, w4) }}"""
SHARED = "q_num_heads = 8, kv_num_heads = 4"
FUSED = {
    "causal": (32, 16, "", f"a = Attention<is_causal = 1, {SHARED}>(q, k, v)"),
    "mask": (32, 16, "bool[2,1,12,12] mask, ", f"a = Attention<{SHARED}>(q, k, v, mask)"),
    "MultiHeadAttention": (
        32,
        32,
        "",
        "a = com.microsoft.MultiHeadAttention<num_heads = 8>(q, k, v)",
    ),
    "causal MultiHeadAttention": (
        32,
        32,
        "",
        "a = com.microsoft.MultiHeadAttention<num_heads = 8, unidirectional = 1>(q, k, v)",
    ),
    "GroupQueryAttention": (
        64,
        32,
        "int32[2] past, int32 total, ",
        "a, pk, pv = com.microsoft.GroupQueryAttention<num_heads = 8, kv_num_heads = 4>"
        "(q, k, v, , , past, total)",
    ),
    "LinearAttention": (
        32,
        32,
        "",
        "a, s = com.microsoft.LinearAttention"
        '<q_num_heads = 8, kv_num_heads = 8, update_rule = "linear">(q, k, v)',
    ),
}
ONLY_HEADS = ("GroupQueryAttention",)
"""Ops that need the whole sequence of queries."""


@pytest.mark.matrix
@pytest.mark.parametrize("by_bytes", [False, True])
@pytest.mark.parametrize("op", FUSED)
def test_fused_ops(op: str, by_bytes: bool, tmp_path: Path) -> None:
    q, k, more, attention = FUSED[op]
    opsets = '<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>'
    text = PROJECTED.format(q=q, k=k, more=more, attention=attention)
    model = write_text(opsets + text, tmp_path / "m.onnx")
    plan = sharder.shard(model, tmp_path / "m.par", context("4", by_bytes))
    if op == "GroupQueryAttention":
        x = np.random.default_rng(0).standard_normal((2, 12, 24)).astype(np.float32)
        feeds = {"x": x, "past": np.full(2, 11, np.int32), "total": np.array(12, np.int32)}
    else:
        feeds = feeds_for(plan)
    names = [p.name for p in plan.outputs]
    check_outputs(run_ranks(tmp_path / "m.par", feeds), run_unsplit(model, feeds), names)
    if op == "LinearAttention":  # what 3 other ranks do to states, [2, 8, 4, 4 + 4]
        assert sent(plan) == {"AllGather": (1, 3 * 4 * 2 * 8 * 4 * 8)}
    elif op in ONLY_HEADS or by_bytes:
        total = 4 * 2 * 12 * sum((q, k, k, q)) // 4 * 3 // 4
        assert sent(plan) == {"AllToAll": (4, total)}
    else:
        assert sent(plan) == {"AllGather": (2, 2 * 4 * 2 * 12 * k * 3 // 4)}


INSIDE = """<ir_version: 10, opset_import: ["" : 17, "com.microsoft" : 1]>
m (float[{batch},{seq},24] x, float[24,96] w1, float[96] w2, float[32,24] w3)
=> (float[{batch},{seq},24] y)
{{ a = com.microsoft.Attention<num_heads = 8{causal}>(x, w1, w2)  y = MatMul(a, w3) }}"""


@pytest.mark.parametrize("causal", ["", ", unidirectional = 1"])
def test_an_op_that_projects_its_input(causal: str, tmp_path: Path) -> None:
    """Ranks gather keys and values in one collective; in a strategy file, its width may be split,
    too: then they add their products."""
    model = write_text(INSIDE.format(batch=2, seq=12, causal=causal), tmp_path / "m.onnx")
    for ranks in (2, 3, 5):
        plan = check_agrees(model, tmp_path, context(str(ranks)))
        assert sent(plan) == {"AllGather": (1, 4 * 2 * 12 * 64 * (ranks - 1) // ranks)}
    by_width = options("tp=3", strategy={"tensors": {"x": [None, None, "tp"]}})
    plan = check_agrees(model, tmp_path, by_width)
    assert {c.kind: c.bytes for c in plan.collectives} == {"AllReduce": 4 * 2 * 12 * 96 * 4 // 3}


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["3", "dp=2,cp=2"])
@pytest.mark.parametrize("causal", ["", ", unidirectional = 1"])
def test_an_op_that_projects_its_input_of_any_length(
    causal: str, layout: str, tmp_path: Path
) -> None:
    """Also with fewer positions than ranks."""
    text = INSIDE.format(batch="batch", seq="seq", causal=causal)
    model, par = write_text(text, tmp_path / "m.onnx"), tmp_path / "m.par"
    sharder.shard(model, par, context(layout))
    with ThreadSession(par, timeout=TIMEOUT) as session:
        for shape in ((2, 7, 24), (1, 1, 24), (3, 2, 24)):
            x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
            check_outputs(session.run(None, {"x": x}), run_unsplit(model, {"x": x}), ["y"])


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "layout", "by_bytes", "large"),
    [
        ("gpt2", "2", False, {"AllGather": 4, "ReduceScatter": 2, "AllReduce": 1}),
        ("gpt2", "4", True, {"AllToAll": 16, "AllReduce": 1}),
        ("llama", "3", False, {"AllGather": 4, "ReduceScatter": 4, "AllReduce": 1}),
        ("llama", "4", True, {"AllToAll": 16, "AllReduce": 1}),
        ("llama", "dp=2,cp=2", False, {"AllGather": 4, "ReduceScatter": 2, "AllReduce": 1}),
        ("gpt_neox", "cp=2,tp=2", False, None),
        ("bert", "2", False, None),
    ],
)
def test_training(
    model: str, layout: str, by_bytes: bool, large: dict[str, int] | None, tmp_path: Path
) -> None:
    """The backward pass reads what the forward pass gathered. Gradients of keys and values are
    reduce-scattered (in one bucket per layer, if the ranks divide the sequence), and those of
    weights all-reduced, as under data parallelism."""
    step = tmp_path / "step.onnx"
    network = MODELS / f"{model}.legacy.training.onnx"
    grad(network, step, loss=CROSS_ENTROPY, optimizer="sgd")
    with patch.object(steps, "options", lambda layout, **how: context(layout, by_bytes, **how)):
        plan = check_training(step, layout, 2)
    if large is not None:
        assert Counter(c.kind for c in plan.collectives if c.bytes > 64) == large


@pytest.mark.slow
def test_training_by_micro_batches(tmp_path: Path) -> None:
    """The tables are looked up in the body of a Scan; blocks are computed again."""
    step = tmp_path / "step.onnx"
    network = MODELS / "llama.legacy.training.onnx"
    grad(network, step, loss=CROSS_ENTROPY, optimizer="adamw", accumulate=2, recompute=True)
    plan = check_training(step, "context-parallel dp=2,cp=2", 2)
    layouts = {p.name: p.layout.text(plan.mesh) for p in plan.inputs if p.layout is not None}
    assert layouts["input_ids"] == "[2*dp, cp]"


@pytest.mark.slow
def test_auto_splits_a_long_sequence_of_one_sample() -> None:
    """The search finds it without a preset: two all-gathers per layer, and the weights are
    whole."""
    how = Options(devices=4, dims={"batch": 1, "seq": 512}, check_layouts=True)
    plan, _ = sharder.plan(MODELS / "llama.dynamo.dynamic.onnx", how)
    layouts = {p.name: p.layout.text(plan.mesh) for p in plan.outputs if p.layout is not None}
    assert layouts["logits"] == "[-, sp, -]"
    assert Counter(c.kind for c in plan.collectives) == {"AllGather": 2 * LAYERS}


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        ("gpt2.dynamo.static", "dp=2,tp=2", "needs a mesh with an axis cp, not dp=2,tp=2"),
        ("llama_decode.dynamo.static", "2", "no input has a sequence of more than one position"),
        ("vit.legacy.static", "2", "no input has a sequence of more than one position"),
    ],
)
def test_models_without_a_sequence_are_refused(model: str, layout: str, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        sharder.plan(MODELS / f"{model}.onnx", context(layout))


def test_a_loop_over_positions_is_refused_by_its_name(tmp_path: Path) -> None:
    """An export of a recurrence takes each position from the sequence, one after the other."""
    taken = "  ".join(
        f"x{i} = Gather <axis = 1> (x, n{i})  h{i} = MatMul (x{i}, w)  s{i} = Add (h{i}, {before})"
        for i, before in enumerate(["h0", "s0", "s1", "s2"])
    )
    indices = ", ".join(f"int64 n{i} = {{{i}}}" for i in range(4))
    text = f"{HEAD} m (float[2,4,6] x, float[6,6] w) => (float[2,6] s3) <{indices}> {{ {taken} }}"
    model = write_text(text, tmp_path / "m.onnx")
    with pytest.raises(StrategyError, match="takes the positions of 'x' apart, as an unrolled"):
        sharder.plan(model, context("2"))
