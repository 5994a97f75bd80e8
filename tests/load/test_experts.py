"""Mixtures of experts as exporters write them: found, split in every way, and equal to the unsplit
model under onnxruntime."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from agreement import check_outputs, options, run_ranks, run_unsplit

from onnxpar.base.errors import StrategyError
from onnxpar.graph.subgraphs import all_nodes
from onnxpar.load.load import load
from onnxpar.planner import sharder

MODELS = Path(__file__).parents[2] / "models" / "experts"
ALL = sorted(path.name.removesuffix(".onnx") for path in MODELS.glob("*_*.onnx"))
ALL += ["mixtral.loop.dynamo", "mixtral.loop.legacy"]
OPEN = ["mixtral.loop.dynamo", "qwen3_moe.batched_mm.dynamo"]
IDS = np.arange(48).reshape(4, 12)
"""Every expert gets some of these tokens: some exports need as many experts with tokens as they had
when they were traced."""


def feeds_of(path: Path, ids: np.ndarray) -> dict[str, np.ndarray]:
    ports = [port.name for port in onnx.load(path).graph.input]
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    return {name: feeds[name] for name in ports}


def check(path: Path, layout: str, folder: Path, ids: np.ndarray = IDS) -> sharder.Plan:
    """Shards a model, and compares it with the unsplit one; returns the plan."""
    plan = sharder.shard(path, folder / "model.par", options(layout))
    feeds = feeds_of(path, ids)
    got = run_ranks(folder / "model.par", feeds)
    check_outputs(got, run_unsplit(path, feeds), [port.name for port in plan.outputs])
    return plan


def collectives(plan: sharder.Plan) -> dict[str, int]:
    return dict(Counter(c.kind for c in plan.collectives))


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", ALL)
def test_experts_become_a_dimension(name: str) -> None:
    graph = load(MODELS / f"{name}.onnx").graph
    ops = Counter(node.op for node in all_nodes(graph))
    count = 5 if name.startswith("qwen") else 4
    products = [
        node
        for node in graph.nodes
        if node.op == "MatMul" and len(node.outputs[0].shape) == 3 and "/experts/" in node.name
    ]
    assert not ops["NonZero"]
    assert len(products) == (3 if "loop" in name else 2)
    assert {node.outputs[0].shape[0] for node in products} == {count}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["expert-parallel 2", "expert-parallel 3", "data-parallel 3"])
@pytest.mark.parametrize("name", ALL)
def test_ranks_agree_with_the_unsplit_model(name: str, layout: str, tmp_path: Path) -> None:
    check(MODELS / f"{name}.onnx", layout, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "layout",
    [
        "expert-parallel 4",
        "expert-parallel 5",
        "expert-parallel dp=2,ep=2",
        "expert-parallel ep=2,tp=2",
        "tensor-parallel 2",
        "tensor-parallel 3",
        "hybrid dp=2,tp=2",
    ],
)
@pytest.mark.parametrize("name", ["mixtral.loop.legacy", "gpt_oss.batched_mm.legacy"])
def test_other_meshes(name: str, layout: str, tmp_path: Path) -> None:
    check(MODELS / f"{name}.onnx", layout, tmp_path)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["expert-parallel 2", "expert-parallel 4", "data-parallel 2"])
@pytest.mark.parametrize("name", OPEN)
def test_open_sizes(name: str, layout: str, tmp_path: Path) -> None:
    path = MODELS / f"{name}.onnx"
    sharder.shard(path, tmp_path / "model.par", options(layout))
    for shape in ((1, 1), (1, 7), (3, 1), (4, 12)):  # a single token has 2 experts of 4 or 5
        feeds = feeds_of(path, (IDS[: shape[0], : shape[1]] + 7) % 48)
        got = run_ranks(tmp_path / "model.par", feeds)
        check_outputs(got, run_unsplit(path, feeds), ["logits"])


@pytest.mark.slow
def test_ranks_gather_tokens_and_sum_results(tmp_path: Path) -> None:
    plan = check(MODELS / "mixtral.loop.legacy.onnx", "expert-parallel 2", tmp_path)
    assert collectives(plan) == {"AllGather": 3, "ReduceScatter": 1}
    ids, weights, tokens = 24 * 2 * 8, 24 * 2 * 4, 24 * 16 * 4
    found = sorted(c.bytes for c in plan.collectives if c.kind == "AllGather")
    assert found == sorted([ids, weights, tokens])
    assert [c.bytes for c in plan.collectives if c.kind == "ReduceScatter"] == [tokens]
    layouts = {w.name: w.layout_text for w in plan.weights if "weight." in w.name}
    assert set(layouts.values()) == {"[ep, -, -]"} and len(layouts) == 3


@pytest.mark.slow
def test_data_parallel_ranks_send_nothing(tmp_path: Path) -> None:
    for name in ("mixtral.loop.legacy", "qwen3_moe.eager.legacy", "qwen3_moe.batched_mm.dynamo"):
        plan, _ = sharder.plan(MODELS / f"{name}.onnx", options("data-parallel 2"))
        assert plan.collectives == []


@pytest.mark.slow
def test_experts_beside_the_batch_and_columns() -> None:
    path = MODELS / "mixtral.loop.legacy.onnx"
    plan, _ = sharder.plan(path, options("expert-parallel dp=2,ep=2"))
    (total,) = plan.collectives
    assert (total.kind, total.group, total.bytes) == ("AllReduce", (0, 1), 24 * 16 * 4)
    plan, _ = sharder.plan(path, options("expert-parallel ep=2,tp=2"))
    layouts = {w.layout_text for w in plan.weights if "weight." in w.name}
    assert layouts == {"[ep, -, tp]", "[ep, tp, -]"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, width", [("expert-parallel 2", 24), ("expert-parallel ep=2,tp=2", 12)]
)
def test_a_rank_computes_its_experts_rows_alone(layout: str, width: int, tmp_path: Path) -> None:
    path = MODELS / "mixtral.loop.legacy.onnx"
    sharder.shard(path, tmp_path / "model.par", options(layout))
    graph = onnx.load(tmp_path / "model.par/rank_0000.onnx", load_external_data=False).graph
    products = [n for n in graph.node if n.op_type == "MatMul" and "/experts/" in n.name]
    stored = {t.name: list(t.dims) for t in graph.initializer}
    assert Counter(node.op_type for node in graph.node)["NonZero"] == 1
    sizes = [[16, width]] * 4 + [[width, 16]] * 2
    assert [stored[n.input[1]] for n in products] == sizes


@pytest.mark.slow
def test_weights_in_another_file(tmp_path: Path) -> None:
    model = onnx.load(MODELS / "mixtral.loop.legacy.onnx")
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, size_threshold=0)
    check(tmp_path / "model.onnx", "expert-parallel 3", tmp_path)


@pytest.mark.slow
def test_experts_that_differ_stay_apart(tmp_path: Path) -> None:
    model = onnx.load(MODELS / "mixtral.loop.legacy.onnx")
    node = next(n for n in model.graph.node if n.op_type == "Sigmoid" and "experts.2" in n.name)
    node.op_type = "Tanh"
    onnx.save(model, tmp_path / "model.onnx")
    assert "NonZero" in {n.op for n in load(tmp_path / "model.onnx").graph.nodes}
    check(tmp_path / "model.onnx", "data-parallel 2", tmp_path)
    with pytest.raises(StrategyError, match="no weight with a matrix for each expert"):
        sharder.plan(tmp_path / "model.onnx", options("expert-parallel 2"))


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["expert-parallel 2", "expert-parallel 4", "data-parallel 3"])
def test_an_if_for_each_expert(layout: str, tmp_path: Path) -> None:
    path = MODELS / "mixture.scripted.onnx"
    assert "If" not in {node.op for node in load(path).graph.nodes}
    sharder.shard(path, tmp_path / "model.par", options(layout))
    x = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    for rows in (x, np.repeat(x[:1], 6, axis=0)):  # then two experts have no token
        got = run_ranks(tmp_path / "model.par", {"x": rows})
        check_outputs(got, run_unsplit(path, {"x": rows}), ["y"])


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["else", "condition"])
def test_an_if_that_does_something_else_stays(wrong: str, tmp_path: Path) -> None:
    model = onnx.load(MODELS / "mixture.scripted.onnx")
    guards = [node for node in model.graph.node if node.op_type == "If"]
    if wrong == "else":
        branch = next(a.g for a in guards[1].attribute if a.name == "else_branch")
        branch.node[0].op_type = "Neg"
    else:  # the condition of another expert
        guards[1].input[0] = guards[0].input[0]
    onnx.save(model, tmp_path / "model.onnx")
    assert "If" in {node.op for node in load(tmp_path / "model.onnx").graph.nodes}
    sharder.shard(tmp_path / "model.onnx", tmp_path / "model.par", options("data-parallel 2"))
    x = np.repeat(np.random.default_rng(0).standard_normal((1, 8)), 6, axis=0).astype(np.float32)
    got = run_ranks(tmp_path / "model.par", {"x": x})
    check_outputs(got, run_unsplit(tmp_path / "model.onnx", {"x": x}), ["y"])


LOOP = """<ir_version: 8, opset_import: ["" : 18]>
routed (float[6,4] x, int64[6,2] ids, float[6,2] weights) => (float[6,4] y) <
  int64 depth = {2}, int64[2] marks = {0, 1}, int64 e0 = {0},
  int64 e1 = {1}, int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}
> {
  hot = OneHot <axis = -1> (ids, depth, marks)
  mask = Transpose <perm = [2, 1, 0]> (hot)
EXPERTS
}"""
ONE = """
  p@ = Gather <axis = 0> (mask, e@)
  b@ = Cast <to = 9> (p@)
  n@ = NonZero (b@)
  t@ = Transpose <perm = [1, 0]> (n@)
  s@ = Slice (t@, zero, one, one)
  slot@ = Squeeze (s@, one)
  q@ = Slice (t@, one, two, one)
  token@ = Squeeze (q@, one)
  x@ = Gather <axis = 0> (x, token@)
  m@ = MatMul (x@, w@)
  r@ = Relu (m@)
  k@ = Concat <axis = 1> (q@, s@)
  v@ = GatherND (weights, k@)
  u@ = Unsqueeze (v@, one)
  c@ = Mul (r@, u@)
"""
ADDED = '  y@ = ScatterND <reduction = "add"> (FROM, q@, c@)\n'
REPLACED = """
  shape@ = Shape (c@)
  at@ = Expand (q@, shape@)
  f@ = ScatterElements <axis = 0> (start, at@, c@)
  y@ = Add (FROM, f@)
"""


def routed(scatter: str, experts: tuple[int, int] = (0, 1)) -> onnx.ModelProto:
    """Two experts for two slots of six tokens, which may be the same expert."""
    first = (ONE + scatter.replace("FROM", "start")).replace("@", "0")
    second = (ONE + scatter.replace("FROM", "y0")).replace("@", "1").replace("y1 =", "y =")
    model = onnx.parser.parse_model(LOOP.replace("EXPERTS", first + second))
    for tensor in model.graph.initializer:
        if tensor.name in ("e0", "e1"):
            number = experts[int(tensor.name[1])]
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.array(number), tensor.name))
    random = np.random.default_rng(0)
    start = np.zeros((6, 4), np.float32)
    weights = random.standard_normal((2, 4, 4)).astype(np.float32)
    for name, value in (("start", start), ("w0", weights[0]), ("w1", weights[1])):
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return model


@pytest.mark.matrix
@pytest.mark.parametrize("experts", [(0, 1), (1, 0)])
@pytest.mark.parametrize("scatter", [ADDED, REPLACED])
def test_a_token_with_one_expert_twice(
    scatter: str, experts: tuple[int, int], tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(routed(scatter, experts), path)
    random = np.random.default_rng(1)
    feeds = {
        "x": random.standard_normal((6, 4)).astype(np.float32),
        "ids": np.array([[0, 0], [1, 1], [0, 1], [1, 0], [1, 1], [0, 1]]),
        "weights": random.random((6, 2), np.float32),
    }
    plan = sharder.shard(path, tmp_path / "model.par", options("expert-parallel 2"))
    assert {w.layout_text for w in plan.weights if "weight" in w.name} == {"[ep, -, -]"}
    check_outputs(run_ranks(tmp_path / "model.par", feeds), run_unsplit(path, feeds), ["y"])
