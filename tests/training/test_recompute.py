"""Activations that are computed again for the backward pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from committed import MODELS
from training.models import BLOCKS, DROPOUT
from training.steps import CROSS_ENTROPY, Array, check_training, run_unsplit, write_step

from onnxpar.base.errors import StrategyError
from onnxpar.training import grad

DRAW = np.random.default_rng(12)
DEEP = """deep (float[8,6] x, float[6,9] w0, float[9,9] w1, float[9,9] w2, float[9,9] w3,
float[9,5] w4) => (float[8,5] y)
{ a = MatMul(x, w0)  b = Relu(a)  c = MatMul(b, w1)  d = Tanh(c)  e = MatMul(d, w2)  f = Tanh(e)
  g = MatMul(f, w3)  h = Tanh(g)  y = MatMul(h, w4) }"""


def batch(kind: str) -> dict[str, Array]:
    if kind == "blocks":
        return {"i": DRAW.integers(0, 40, (4, 6)), "labels": DRAW.integers(0, 5, (4, 6))}
    x = DRAW.standard_normal((8, 6)).astype(np.float32)
    return {"x": x, "labels": DRAW.integers(0, 5, 8)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deep", "blocks"])
def test_the_same_numbers(kind: str, tmp_path: Path) -> None:
    """To the bit: it is the same computation, twice."""
    text = {"deep": DEEP, "blocks": BLOCKS}[kind]
    (tmp_path / "again").mkdir()
    kept = write_step(text, tmp_path, optimizer="adam")
    again = write_step(text, tmp_path / "again", optimizer="adam", recompute=True)
    nodes = [len(onnx.load(path).graph.node) for path in (kept, again)]
    assert nodes[1] > nodes[0]
    feeds = [batch(kind) for _ in range(3)]
    (a, _), (b, _) = (run_unsplit(path, feeds, [0.01] * 3) for path in (kept, again))
    for x, y in zip(a, b, strict=True):
        for name in x:
            np.testing.assert_allclose(y[name], x[name], rtol=1e-6, atol=1e-9, err_msg=name)


def test_what_is_computed_twice_draws_the_same(tmp_path: Path) -> None:
    text = DROPOUT.replace("y = MatMul(d, w2)", "e = Tanh(d)  f = Tanh(e)  y = MatMul(f, w2)")
    (tmp_path / "again").mkdir()
    kept = write_step(text, tmp_path, optimizer="none")
    again = write_step(text, tmp_path / "again", optimizer="none", recompute=True)
    feeds = [batch("deep") | {"seed": np.array(3)}]
    (a, _), (b, _) = (run_unsplit(path, feeds, [0.0]) for path in (kept, again))
    for name in a[0]:
        np.testing.assert_allclose(b[0][name], a[0][name], rtol=1e-6, atol=1e-9, err_msg=name)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "layout", ["data-parallel 2", "zero3 2", "tensor-parallel 2", "sequence-parallel 2"]
)
def test_ranks_agree_with_one(layout: str, tmp_path: Path) -> None:
    check_training(write_step(BLOCKS, tmp_path, recompute=True), layout, 4, 0.01)


@pytest.mark.slow
def test_with_all_else(tmp_path: Path) -> None:
    step = write_step(
        DEEP,
        tmp_path,
        optimizer="adamw",
        recompute=True,
        accumulate=2,
        clip_norm=1.0,
        precision="float16",
        loss_scale="256",
    )
    check_training(step, "zero3 dp=2,tp=2", 4, 0.001)


@pytest.mark.slow
def test_a_transformer(tmp_path: Path) -> None:
    path = tmp_path / "step.onnx"
    model = MODELS / "llama.dynamo.static.onnx"
    grad(model, path, loss=CROSS_ENTROPY, optimizer="sgd", recompute=True)
    check_training(path, "zero3 2", 3)


def test_a_model_without_blocks(tmp_path: Path) -> None:
    text = """m (float[4] x, float[4] w) => (float c)
    { p = Mul(x, w)  c = ReduceSum<keepdims = 0>(p) }"""
    with pytest.raises(StrategyError, match="--recompute: the model cannot be cut into blocks"):
        write_step(text, tmp_path, "c", recompute=True)


TWO = """two (float[8,6] x, float[6,9] w0, float[9,9] w1, float[9,9] w2, float[9,5] w3)
=> (float[8,5] y)
{ a = MatMul(x, w0)  b = Tanh(a)  c = Sigmoid(b)  d = MatMul(b, w1)  e = Tanh(d)  f = Mul(e, c)
  g = Tanh(f)  h = MatMul(g, w2)  i = Tanh(h)  j = Add(i, f)  y = MatMul(j, w3) }"""


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "globs,again,kept",
    [
        (["Tanh_e", "Mul_f"], {"Tanh_e"}, {"Mul_f"}),
        (["Tanh_b", "Sigmoid_c", "MatMul_d", "Tanh_e"], {"Tanh_b"}, {"Sigmoid_c", "Tanh_e"}),
        (["MatMul_*", "Tanh_*"], {"Tanh_g"}, {"Tanh_b", "Tanh_e", "Tanh_i", "Mul_f"}),
        (["*"], {"Tanh_b", "Tanh_i", "Mul_f"}, set()),
    ],
)
def test_named_nodes_are_computed_again(
    globs: list[str], again: set[str], kept: set[str], tmp_path: Path
) -> None:
    """What only they read; also where a group has several results, and is left and entered again.
    The numbers stay the same, and no node waits for what comes from it."""
    (tmp_path / "again").mkdir()
    first = write_step(TWO, tmp_path, optimizer="adam")
    second = write_step(TWO, tmp_path / "again", optimizer="adam", recompute_nodes=globs)
    copies = {n.name.split("/")[-1] for n in onnx.load(second).graph.node if "recompute/" in n.name}
    assert again <= copies and not kept & copies
    feeds = [batch("deep") for _ in range(3)]
    (a, _), (b, _) = (run_unsplit(path, feeds, [0.01] * 3) for path in (first, second))
    for x, y in zip(a, b, strict=True):
        for name in x:
            np.testing.assert_allclose(y[name], x[name], rtol=1e-6, atol=1e-9, err_msg=name)
    check_training(second, "data-parallel 2", 2)


APART = """apart (float[3,2,4] x, float[1,5,4] w, float[1,5,5] r, float[5,5] v)
=> (float[1,2,5] y)
{ , a = RNN<hidden_size=5>(x, w, r)  b = Mul(a, a)  c = MatMul(b, v)
  most = Constant<value_float=0.5>()  d = Clip(c, , most)  e = Mul(d, d)  y = MatMul(e, v) }"""


def test_what_is_left_out_connects_no_nodes(tmp_path: Path) -> None:
    """A node without its first result, and one without an operand."""
    step = write_step(APART, tmp_path, recompute_nodes=["RNN_*", "Mul_*", "Clip_*"])
    copied = [n.name for n in onnx.load(step).graph.node if "recompute/block." in n.name]
    assert {name.split("/")[1] for name in copied} == {"block.0", "block.1"}


def test_named_nodes_that_cannot_be_computed_again(tmp_path: Path) -> None:
    for globs, words in (
        (["nope"], "'nope' matches no node; there are 'MatMul_a'"),
        (["Mul_f"], "other nodes read every result"),
    ):
        with pytest.raises(StrategyError, match=words):
            write_step(TWO, tmp_path, recompute_nodes=globs)
    with pytest.raises(StrategyError, match="give only one of them"):
        write_step(TWO, tmp_path, recompute=True, recompute_nodes=["*"])
