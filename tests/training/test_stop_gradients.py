"""What torch's gradients know and a file may not say: detach(), straight-through estimators,
`padding_idx`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from committed import MODELS
from training.steps import Array, ThreadTrainer, run_unsplit, shard, write_model

from onnxpar.base.errors import StrategyError
from onnxpar.graph.training_spec import Step
from onnxpar.training import grad

FOLDER = MODELS / "autograd"
CROSS_ENTROPY = "softmax-cross-entropy"
STE = "straight_through"


def expected(name: str) -> dict[str, Array]:
    """What torch has for a network, by the rest of the array's name."""
    with np.load(FOLDER / "expected.npz") as arrays:
        return {n.removeprefix(f"{name}."): arrays[n] for n in arrays if n.startswith(f"{name}.")}


def check_gradients(name: str, step: Path) -> None:
    """An AssertionError where a step has other gradients than torch."""
    wanted = expected(name)
    (found,), _ = run_unsplit(step, [{n: wanted[n] for n in ("x", "labels")}], [0.0])
    gradients = {n: value for n, value in wanted.items() if n.endswith(".grad")}
    assert gradients
    for parameter, gradient in gradients.items():
        np.testing.assert_allclose(found[parameter], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("exporter", ["dynamo", "optimized"])
@pytest.mark.parametrize("name", ["detach", STE, "padding"])
def test_gradients_are_those_of_torch(name: str, exporter: str, tmp_path: Path) -> None:
    """Where the file says it, without a word."""
    step = tmp_path / "step.onnx"
    grad(FOLDER / f"{name}.{exporter}.onnx", step, loss=CROSS_ENTROPY, optimizer="none")
    check_gradients(name, step)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_stop_them_too(ranks: int, tmp_path: Path) -> None:
    """And AdamW does to a row for padding what torch's does: only decay."""
    model, step = FOLDER / "padding.dynamo.onnx", tmp_path / "step.onnx"
    grad(model, step, loss=CROSS_ENTROPY, optimizer="adamw", weight_decay=0.2, decay_all=True)
    wanted = expected("padding")
    par, _ = shard(step, f"data-parallel {ranks}")
    with ThreadTrainer(par) as trainer:
        for _ in range(3):
            trainer.step({n: wanted[n] for n in ("x", "labels")}, 0.1)
        table = trainer.session.states.read("table.weight")
    np.testing.assert_allclose(table, wanted["trained"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_row_for_padding_is_never_trained(lazy: bool, tmp_path: Path) -> None:
    """In a table that is only looked up, also if a step updates the rows that it looks up; by
    negative indices, too."""
    text = """m (int64[4,2] x, float[5,3] w) => (float[4,2,3] y) { y = Gather(w, x) }"""
    x = np.array([[1, 4], [-1, 2], [1, -4], [4, 0]])
    target = np.ones((4, 2, 3), np.float32)
    how = {"lazy": ["w"]} if lazy else {}
    step = tmp_path / "step.onnx"
    model = write_model(text, tmp_path)
    grad(model, step, loss="mse", optimizer="sgd", padding_idx={"w": -1}, **how)
    (found,), _ = run_unsplit(step, [{"x": x, "target": target}], [1.0])
    (start,), _ = run_unsplit(step, [{"x": x, "target": target}], [0.0])
    w = start["w.next"]
    wanted = w.copy()
    for i in x[(x != 4) & (x != -1)]:
        wanted[i] -= 2 * (w[i] - 1) / target.size
    np.testing.assert_allclose(found["w.next"], wanted, rtol=1e-5)


@pytest.mark.parametrize("name", ["/Sub_output_0", "/Sub", "/Sub*"])
def test_users_say_where(name: str, tmp_path: Path) -> None:
    """By the name of a tensor or a node, for an exporter that drops detach()."""
    model, step = FOLDER / f"{STE}.legacy.onnx", tmp_path / "step.onnx"
    with pytest.warns(UserWarning, match="straight-through.*--stop-gradient '/Sub_output_0'"):
        grad(model, step, loss=CROSS_ENTROPY, optimizer="none")
    grad(model, step, loss=CROSS_ENTROPY, optimizer="none", stop_gradient=[name])
    check_gradients(STE, step)


LAYERS = """m (float[4,3] x, float[3,3] w1, float[3,2] w2) => (float[4,2] y)
{ [a] h = MatMul(x, w1)  [r] r = Relu(h)  [b] y = MatMul(r, w2) }"""


def written(text: str, folder: Path, loss: str = "mse", **how: object) -> Step:
    return grad(write_model(text, folder), folder / "s.onnx", loss=loss, optimizer="sgd", **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["h", "r", "a", "w1"])
def test_what_is_before_a_stop_is_not_trained(name: str, tmp_path: Path) -> None:
    step = written(LAYERS, tmp_path, stop_gradient=[name])
    assert [s.of for s in step.parameters] == ["w2"]
    assert step.cautions == []


def test_a_stop_in_a_branch(tmp_path: Path) -> None:
    text = """m (float[4] x, float[4] w1, bool c) => (float[4] y) { h = Mul(x, w1)
    y = If (c) <then_branch = t () => (float[4] u) { e = Exp(h)  u = Add(e, h) },
                else_branch = f () => (float[4] v) { v = Neg(h) }> }"""
    written(text, tmp_path, stop_gradient=["e"])
    x, target = np.full(4, 2.0, np.float32), np.zeros(4, np.float32)
    feeds = {"x": x, "c": np.array(True), "target": target}
    (found,), _ = run_unsplit(tmp_path / "s.onnx", [feeds], [1.0])
    (start,), _ = run_unsplit(tmp_path / "s.onnx", [feeds], [0.0])
    w = start["w1.next"]
    y = np.exp(x * w) + x * w
    np.testing.assert_allclose(w - found["w1.next"], 2 * y * x / 4, rtol=1e-4)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (
            {"stop_gradient": ["W1"]},
            "--stop-gradient W1 matches no tensor or node; did you mean 'w1'",
        ),
        ({"stop_gradient": ["z*"]}, "--stop-gradient z. matches no tensor or node; there are 'w1'"),
        ({"stop_gradient": ["y"]}, "no weight is left to train"),
        ({"padding_idx": {"w1": 0}}, "--padding-idx w1 matches no table that a Gather looks up"),
    ],
)
def test_names_that_are_unknown(how: dict[str, object], told: str, tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=told):
        written(LAYERS, tmp_path, **how)


def test_a_row_that_a_table_does_not_have(tmp_path: Path) -> None:
    text = "m (int64[4] x, float[5,3] w) => (float[4,3] y) { y = Gather(w, x) }"
    with pytest.raises(StrategyError, match="w=5: the table has 5 rows; give a number from -5 to"):
        written(text, tmp_path, padding_idx={"w": 5})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("text", "loss", "told"),
    [
        ("[a_detach] h = Identity(g)  y = MatMul(h, w2)", "mse", "--stop-gradient 'a_detach'"),
        ("[r] h = Round(g)  y = MatMul(h, w2)", "mse", "w1: the loss depends on this only through"),
        ("q = Sign(g)  d = Sub(q, g)  h = Add(g, d)  y = MatMul(h, w2)", "mse", "-gradient 'd'"),
        ("q = Abs(g)  d = Add(q, g)  h = Sub(d, g)  y = MatMul(h, w2)", "mse", "straight-through"),
        (
            "m = MatMul(g, w2)  d = Sub(m, w3)  s = Mul(d, d)  y = ReduceMean(s)",
            "y",
            "of the model",
        ),
        ("q = Round(g)  h = Add(q, g)  y = MatMul(h, w2)", "mse", ""),
    ],
)
def test_what_looks_as_if_torch_had_other_gradients(
    text: str, loss: str, told: str, tmp_path: Path
) -> None:
    shape = "" if loss == "y" else "[4,2]"
    model = f"""m (float[4,3] x, float[3,3] w1, float[3,2] w2, float[4,2] w3) => (float{shape} y)
    {{ g = MatMul(x, w1)  {text} }}"""
    if loss == "y":
        model = model.replace("ReduceMean(s)", "ReduceMean<keepdims = 0>(s)")
    step = written(model, tmp_path, loss, frozen=["w3"] if "w3)" in text else [])
    cautions = [c for c in step.cautions if "is not trained" not in c]
    assert [told in caution for caution in cautions] == [True] * bool(told)


@pytest.mark.parametrize("op", ["m = Greater(g, x)", "m = Cast<to = 7>(g)"])
def test_a_way_that_has_no_gradient_is_told_of(op: str, tmp_path: Path) -> None:
    text = f"""m (float[4,3] x, float[3,3] w1, float[3,2] w2) => (float[4,2] y)
    {{ g = MatMul(x, w1)  {op}  h = Cast<to = 1>(m)  y = MatMul(h, w2) }}"""
    with pytest.warns(UserWarning, match=r"w1 \(3x3\) is not trained: .* without a gradient"):
        step = written(text, tmp_path)
    assert [s.of for s in step.parameters] == ["w2"]


@pytest.mark.filterwarnings("ignore")
def test_a_row_of_zeros_looks_like_padding(tmp_path: Path) -> None:
    path = FOLDER / "padding.legacy.onnx"
    proto = onnx.load(path)
    (table,) = (t for t in proto.graph.initializer if t.name == "table.weight")
    values = onnx.numpy_helper.to_array(table).copy()
    values[3] = 0
    table.CopyFrom(onnx.numpy_helper.from_array(values, table.name))
    step = grad(proto, tmp_path / "s.onnx", loss=CROSS_ENTROPY, optimizer="sgd")
    (told,) = step.cautions
    assert told.endswith("Give --padding-idx table.weight=3")
    rows = {"table.weight": 3}
    step = grad(proto, tmp_path / "s.onnx", loss=CROSS_ENTROPY, optimizer="sgd", padding_idx=rows)
    assert step.cautions == []


def test_a_padding_row_that_users_name(tmp_path: Path) -> None:
    step, rows = tmp_path / "step.onnx", {"table.*": 3}
    model = FOLDER / "padding.legacy.onnx"
    grad(model, step, loss=CROSS_ENTROPY, optimizer="none", padding_idx=rows)
    check_gradients("padding", step)
