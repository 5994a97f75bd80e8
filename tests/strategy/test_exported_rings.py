"""ring-attention on attention in basic ops, as exporters write it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from agreement import (
    TIMEOUT,
    check_agrees,
    check_outputs,
    feeds_for,
    options,
    relative_error,
    run_ranks,
    run_unsplit,
)
from committed import MODELS, ODD, dims_of
from onnx import numpy_helper
from small_models import write_text
from training.steps import CROSS_ENTROPY, check_training

from onnxpar.compiler.plan import Plan
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.runtime.session.threads import ThreadSession
from onnxpar.training import grad

LAYERS, POSITIONS = 2, 4 * 16
"""Of the committed static exports: a batch of 4 sequences of 16 tokens."""


def moved(plan: Plan) -> dict[str, tuple[int, int]]:
    """The number and the bytes of the collectives of each kind."""
    found: dict[str, tuple[int, int]] = {}
    for each in plan.collectives:
        count, size = found.get(each.kind, (0, 0))
        found[each.kind] = count + 1, size + each.bytes
    return found


def ring(layout: str) -> Options:
    return options(f"ring-attention {layout}")


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("export", ["dynamo", "legacy"])
@pytest.mark.parametrize(
    ("model", "width"),
    [("llama", 24), ("mixtral", 24), ("gpt2", 48), ("falcon", 6)],
)
def test_exports(model: str, export: str, width: int, tmp_path: Path) -> None:
    """Keys and values travel, of as many heads as a model has before it repeats them for query
    heads; nothing is gathered."""
    plan = check_agrees(MODELS / f"{model}.{export}.static.onnx", tmp_path, ring("4"))
    assert moved(plan) == {"CollectivePermute": (LAYERS * 3, LAYERS * 3 * POSITIONS * width * 2)}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["2", "3", "5", "dp=2,cp=2", "cp=2,tp=2"])
@pytest.mark.parametrize(
    "model", ["bert.legacy", "bert.dynamo", "bert_encoder.dynamo", "t5.legacy"]
)
def test_other_exports(model: str, layout: str, tmp_path: Path) -> None:
    """BERT's pooler reads the first position, which all ranks have: in the ring it counts once. T5
    adds a bias for each pair of positions, and its decoder attends to another sequence."""
    plan = check_agrees(MODELS / f"{model}.static.onnx", tmp_path, ring(layout))
    assert "CollectivePermute" in moved(plan)
    assert not moved(plan).keys() & {"AllGather", "AllToAll"}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["3", "dp=2,cp=2"])
@pytest.mark.parametrize("model", ["gpt2.dynamo", "llama.legacy", "bert.dynamo"])
def test_open_lengths(model: str, layout: str, tmp_path: Path) -> None:
    """One program for all lengths; positions travel with the keys, and choose columns of masks."""
    path, par = MODELS / f"{model}.dynamic.onnx", tmp_path / "model.par"
    plan = sharder.shard(path, par, ring(layout))
    assert "CollectivePermute" in moved(plan)
    with ThreadSession(par, timeout=TIMEOUT) as session:
        for length in (1, 2, 7, 12):
            dims = dims_of(path.name, {**ODD, "batch": 2, "seq": length})
            whole = Options(devices=1, preset="tensor-parallel", dims=dims)
            feeds = feeds_for(sharder.plan(path, whole)[0])
            names = [p.name for p in plan.outputs]
            check_outputs(session.run(None, feeds), run_unsplit(path, feeds), names)


BASIC = """<ir_version: 8, opset_import: ["" : 17]>
m ({type}[2,10,24] x, {more}{type}[24,{q}] w1, {type}[24,{k}] w2, {type}[24,{k}] w3)
=> ({type}[2,10,{q}] y{results})
<int64[4] hq = {{0, 0, {heads}, 4}}, int64[4] hk = {{0, 0, {shared}, 4}},
 int64[3] back = {{0, 0, {q}}}, {type} scale = {{0.5}}, {type} zero = {{0}}, {type} cap = {{2}},
 {type} low = {{-3.4028234663852886e38}}, int64[1] one = {{1}}, int64[1] two = {{2}},
 int64[5] rows = {{2, {shared}, {copies}, 10, 4}},
 int64[5] tiles = {{2, {copies}, {shared}, 10, 4}},
 int64[4] all = {{2, {heads}, 10, 4}}, int64[3] three = {{16, 10, 4}},
 int64[3] turned = {{16, 4, 10}}>
{{ q = MatMul(x, w1)  k = MatMul(x, w2)  v = MatMul(x, w3)
q1 = Reshape(q, hq)  k1 = Reshape(k, hk)  v1 = Reshape(v, hk)
qt = Transpose<perm = [0, 2, 1, 3]>(q1)  kt = Transpose<perm = [0, 2, {order}]>(k1)
vt = Transpose<perm = [0, 2, 1, 3]>(v1)
{between}
at = Transpose<perm = [0, 2, 1, 3]>(a)  y = Reshape(at, back) }}"""
PLAIN = "p = MatMul(qt, kt)  s = Mul(p, scale)  {scores}  w = Softmax<axis = -1>({last})"
PLAIN += "  {guard}  a = MatMul({weights}, vt)"


def basic(
    folder: Path,
    between: str,
    more: str = "",
    heads: int = 8,
    shared: int = 8,
    order: str = "3, 1",
    type_: str = "float",
    results: str = "",
) -> Path:
    """A layer of attention in basic ops."""
    text = BASIC.format(
        type=type_,
        more=more,
        between=between,
        heads=heads,
        shared=shared,
        copies=heads // shared,
        q=heads * 4,
        k=shared * 4,
        order=order,
        results=results,
    )
    return write_text(text, folder / "m.onnx")


def scores(steps: str = "", last: str = "s", is_guarded: bool = False) -> str:
    """Attention with these steps from `s` to `last`."""
    guard = "n = IsNaN(w)  g = Where(n, zero, w)" if is_guarded else ""
    weights = "g" if is_guarded else "w"
    return PLAIN.format(scores=steps, last=last, guard=guard, weights=weights)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("is_guarded", [False, True])
@pytest.mark.parametrize("hidden", [-np.inf, np.finfo(np.float32).min, -1e30, -5.0])
def test_queries_that_see_nothing(
    hidden: float, is_guarded: bool, ranks: int, tmp_path: Path
) -> None:
    """A query of which all scores are minus infinity gets what the model gives it: NaN, or zeros.
    One of which all are the least number gets the mean of all values."""
    between = scores("m = Add(s, mask)", "m", is_guarded)
    model = basic(tmp_path, between, "float[10,10] mask, ")
    sharder.shard(model, tmp_path / "m.par", ring(str(ranks)))
    draw = np.random.default_rng(0)
    mask = np.where(draw.random((10, 10)) < 0.5, 0, hidden).astype(np.float32)
    mask[3] = mask[8] = hidden
    mask[5] = 0
    feeds = {"x": draw.standard_normal((2, 10, 24)).astype(np.float32), "mask": mask}
    check_outputs(run_ranks(tmp_path / "m.par", feeds), run_unsplit(model, feeds), ["y"])


CHAINS = {
    "nothing": ("", "s", ""),
    "soft limit": ("t = Div(s, cap)  u = Tanh(t)  z = Mul(u, cap)", "z", ""),
    "two masks": (
        "t = Where(seen, s, low)  z = Add(bias, t)",
        "z",
        "bool[2,1,10,10] seen, float[8,1,10] bias, ",
    ),
    "keys": ("z = Where(seen, low, s)", "z", "bool[10] seen, "),
    "queries": ("z = Mul(s, scales)", "z", "float[10,1] scales, "),
    "a term": ("z = Sub(terms, s)", "z", "float[2,8,10,10] terms, "),
}


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["2", "3", "dp=2,cp=2", "cp=2,tp=2"])
@pytest.mark.parametrize("chain", CHAINS)
def test_steps_of_scores(chain: str, layout: str, tmp_path: Path) -> None:
    """What is between the product and the softmax is computed for each block."""
    steps, last, more = CHAINS[chain]
    plan = check_agrees(basic(tmp_path, scores(steps, last), more), tmp_path, ring(layout))
    ranks = 2 if "=" in layout else int(layout)
    assert {k: n for k, (n, _) in moved(plan).items()} == {"CollectivePermute": ranks - 1}


def test_numbers_of_64_bits(tmp_path: Path) -> None:
    model = basic(tmp_path, scores(), type_="double")
    plan = sharder.shard(model, tmp_path / "m.par", ring("3"))
    assert moved(plan).keys() == {"CollectivePermute"}
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 10, 24))}
    (got,), (wanted,) = run_ranks(tmp_path / "m.par", feeds), run_unsplit(model, feeds)
    assert relative_error(got, wanted) <= 1e-14


def test_heads_in_the_batch(tmp_path: Path) -> None:
    """Three dimensions: the first has samples and heads."""
    merged = "q3 = Reshape(qt, three)  k3 = Reshape(kt, turned)  v3 = Reshape(vt, three)"
    between = f"{merged}  {scores('z = Add(s, mask)', 'z')}".replace(
        "MatMul(qt, kt)", "MatMul(q3, k3)"
    )
    between = between.replace("a = MatMul(w, vt)", "o = MatMul(w, v3)  a = Reshape(o, all)")
    model = basic(tmp_path, between, "float[16,1,10] mask, ")
    plan = check_agrees(model, tmp_path, ring("3"))
    assert moved(plan).keys() == {"CollectivePermute"}


REPEATED = """k2 = Unsqueeze(kt, {axis})  k3 = Expand(k2, {copies})  k4 = Reshape(k3, all)
kr = Transpose<perm = [0, 1, 3, 2]>(k4)
v2 = Unsqueeze(vt, {axis})  v3 = Expand(v2, {copies})  vr = Reshape(v3, all)  """


@pytest.mark.parametrize("is_tiled", [False, True])
def test_repeated_heads(is_tiled: bool, tmp_path: Path) -> None:
    """Copies of a head in a row do not travel; copies of all heads in a row are not its copies."""
    how = ("one", "tiles") if is_tiled else ("two", "rows")
    between = REPEATED.format(**dict(zip(("axis", "copies"), how, strict=True)))
    between += scores().replace("kt)", "kr)").replace("vt)", "vr)")
    model = basic(tmp_path, between, shared=4, order="1, 3")
    plan = check_agrees(model, tmp_path, ring("2"))
    heads = 8 if is_tiled else 4
    assert moved(plan) == {"CollectivePermute": (1, 2 * 5 * heads * 4 * 2 * 4)}


def test_scores_that_a_model_returns_are_kept(tmp_path: Path) -> None:
    model = basic(tmp_path, scores(), results=", float[2,8,10,10] w")
    plan = check_agrees(model, tmp_path, ring("2"))
    assert "CollectivePermute" not in moved(plan)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_training_steps_are_split_as_by_context_parallel(model: str, tmp_path: Path) -> None:
    """Their backward pass reads the weights of the forward pass."""
    step, network = tmp_path / "step.onnx", MODELS / f"{model}.legacy.training.onnx"
    grad(network, step, loss=CROSS_ENTROPY, optimizer="sgd")
    plan = check_training(step, "ring-attention 3", 2)
    assert moved(plan)["AllGather"][0] == 4


@pytest.mark.parametrize("ranks", [2, 3])
def test_no_keys(ranks: int, tmp_path: Path) -> None:
    """Over an open number of keys: a product over none is zero, and so is a mean of no values; keys
    that are all masked give NaN, as in a softmax."""
    text = f"""<ir_version: 9, opset_import: ["" : 18]>
    m (float[N,H,8] x, float[N,W,8] e, float[N,1,W] mask) => (float[N,H,6] y) {{
        {" ".join(f"{r} = MatMul({a}, {w})" for r, a, w in ("qxa", "keb", "vec"))}
        t = Transpose<perm = [0, 2, 1]>(k)  p = MatMul(q, t)  s = Add(p, mask)
        z = Softmax<axis = -1>(s)  y = MatMul(z, v) }}"""
    proto, random = onnx.parser.parse_model(text), np.random.default_rng(0)
    for name in "abc":
        weight = random.standard_normal((8, 6), np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(weight, name))
    onnx.save(proto, tmp_path / "m.onnx")
    plan = sharder.shard(tmp_path / "m.onnx", tmp_path / "m.par", ring(str(ranks)))
    assert "CollectivePermute" in moved(plan)
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        for keys, masked in ((5, 0.0), (1, 0.0), (0, 0.0), (5, -np.inf), (1, -np.inf)):
            sizes = {"x": (2, 3, 8), "e": (2, keys, 8)}
            feeds = {n: random.standard_normal(size, np.float32) for n, size in sizes.items()}
            feeds["mask"] = np.full((2, 1, keys), masked, np.float32)
            check_outputs(session.run(None, feeds), run_unsplit(tmp_path / "m.onnx", feeds), ["y"])
