"""Which dimension of each input numbers samples: a mask or positions first, time before samples,
inputs that all samples share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from training.steps import Array, ThreadTrainer, run_unsplit, shard, write_model, write_step

from onnxpar.base.errors import StrategyError
from onnxpar.graph.training_spec import Step
from onnxpar.training import grad

DRAW = np.random.default_rng(5)
CROSS_ENTROPY = "softmax-cross-entropy"

MASK_FIRST = """m (float[5,5] mask, float[3,5,4] x, float[4,4] w1, float[4,2] w2)
=> (float[3,5,2] y)
{ q = MatMul(x, w1)  k = Transpose<perm = [0, 2, 1]>(x)  s = MatMul(q, k)  m = Add(s, mask)
  p = Softmax<axis = -1>(m)  h = MatMul(p, x)  y = MatMul(h, w2) }"""
SQUARE = MASK_FIRST.replace("[3,5,", "[5,5,")
"""As many positions as samples."""
POSITIONS_FIRST = """m (int64[5] at, int64[3,5] ids, float[7,4] w1, float[5,4] w2, float[4,2] w3)
=> (float[3,5,2] y)
{ t = Gather(w1, ids)  p = Gather(w2, at)  a = Add(t, p)  h = Tanh(a)  y = MatMul(h, w3) }"""
TIME_FIRST = """m (float[5,3,4] x, float[4,4] w1, float[4,2] w2) => (float[5,3,2] y)
<int64 axis = {0}>
{ h = MatMul(x, w1)  c = CumSum(h, axis)  r = Tanh(c)  y = MatMul(r, w2) }"""
TIME_IN = """m (float[5,3,4] x, float[4,4] w1, float[4,2] w2) => (float[3,5,2] y)
{ h = MatMul(x, w1)  t = Transpose<perm = [1, 0, 2]>(h)  r = Tanh(t)  y = MatMul(r, w2) }"""
SHARED = """m (float[4] scale, float[3,4] x, float[4,2] w1) => (float[3,2] y)
{ a = Mul(x, scale)  h = Tanh(a)  y = MatMul(h, w1) }"""
LOSS_INSIDE = """m (float[5] weights, float[3,5,4] x, int64[3,5] y, float[4,6] w1) => (float l)
<int64[2] flat = {15, 6}, int64[1] one = {-1}, int64[1] last = {1}>
{ h = MatMul(x, w1)  r = Tanh(h)  t = Transpose<perm = [0, 2, 1]>(r)
  each = SoftmaxCrossEntropyLoss<reduction = "none">(t, y)  e = Mul(each, weights)
  m = ReduceMean<keepdims = 0>(e, last)  l = ReduceMean<keepdims = 0>(m) }"""

FOUND = [
    (MASK_FIRST, CROSS_ENTROPY, {"x": 0, "labels": 0}),
    (SQUARE, CROSS_ENTROPY, {"x": 0, "labels": 0}),
    (POSITIONS_FIRST, CROSS_ENTROPY, {"ids": 0, "labels": 0}),
    (TIME_FIRST, "mse", {"x": 1, "target": 1}),
    (TIME_IN, CROSS_ENTROPY, {"x": 1, "labels": 0}),
    (SHARED, CROSS_ENTROPY, {"x": 0, "labels": 0}),
    (LOSS_INSIDE, "l", {"x": 0, "y": 0}),
]


def read(step: Path) -> Step:
    import onnx

    found = Step.of(onnx.load(step))
    assert found is not None
    return found


def feeds_of(text: str, batches: int) -> dict[str, Array]:
    """Inputs of a step of so many batches."""
    b = 3 * batches if text is not SQUARE else 5 * batches
    draw, ints = DRAW.standard_normal, DRAW.integers
    if text in (MASK_FIRST, SQUARE):
        feeds = {"mask": draw((5, 5)), "x": draw((b, 5, 4)), "labels": ints(0, 2, (b, 5))}
    elif text is POSITIONS_FIRST:
        at, ids = np.array([4, 2, 0, 1, 3]), ints(0, 7, (b, 5))
        feeds = {"at": at, "ids": ids, "labels": ints(0, 2, (b, 5))}
    elif text is TIME_FIRST:
        feeds = {"x": draw((5, b, 4)), "target": draw((5, b, 2))}
    elif text is TIME_IN:
        feeds = {"x": draw((5, b, 4)), "labels": ints(0, 2, (b, 5))}
    elif text is SHARED:
        feeds = {"scale": draw(4), "x": draw((b, 4)), "labels": ints(0, 2, b)}
    else:
        feeds = {"weights": draw(5), "x": draw((b, 5, 4)), "y": ints(0, 6, (b, 5))}
    return {n: v.astype(np.float32) if v.dtype == float else v for n, v in feeds.items()}


def large(text: str) -> str:
    """The model of a batch that is twice as large."""
    if text is SQUARE:
        return text.replace("[5,5,4]", "[10,5,4]").replace("[5,5,2]", "[10,5,2]")
    return text.replace("[5,3,", "[5,6,").replace("[3,", "[6,")


@pytest.mark.parametrize(("text", "loss", "dims"), FOUND)
def test_micro_batches_are_as_one_batch(
    text: str, loss: str, dims: dict[str, int], tmp_path: Path
) -> None:
    """The same as the model of a batch that is twice as large, where there are no micro-batches."""
    (tmp_path / "large").mkdir()
    step = write_step(text, tmp_path, loss, "sgd", accumulate=2)
    whole = write_step(large(text), tmp_path / "large", loss, "sgd")
    assert read(step).batch == dims == read(whole).batch
    feeds = feeds_of(text, 2)
    (found,), _ = run_unsplit(step, [feeds], [0.5])
    (wanted,), _ = run_unsplit(whole, [feeds], [0.5])
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.matrix(3)
@pytest.mark.parametrize(("text", "loss", "dims"), FOUND)
@pytest.mark.parametrize(("ranks", "accumulate"), [(3, 1), (2, 2)])
def test_ranks_split_the_batch(
    text: str, loss: str, dims: dict[str, int], ranks: int, accumulate: int, tmp_path: Path
) -> None:
    """And nothing else; from data with an epoch of two steps."""
    step = write_step(text, tmp_path, loss, "sgd", accumulate=accumulate)
    feeds = feeds_of(text, 2 * accumulate)
    par, plan = shard(step, f"data-parallel {ranks}")
    layouts = {p.name: [] if p.layout is None else p.layout.dims for p in plan.inputs}
    split = {
        n: [i for i, dim in enumerate(layouts[n]) if "dp" in str(dim)] for n in read(step).data
    }
    assert split == {n: [dims[n]] if n in dims else [] for n in split}
    with ThreadTrainer(par) as trainer:
        data = trainer.batches_of(feeds)
        assert data.batches == 2
        batches = list(data.epoch(0, None))
        losses = [trainer.step(batch, 0.5)["loss"] for batch in batches]
    found, _ = run_unsplit(step, batches, [0.5, 0.5])
    np.testing.assert_allclose(losses, [float(each["loss"]) for each in found], rtol=1e-5)


def test_gradients_of_positions_first_in_a_closed_form(tmp_path: Path) -> None:
    text = """m (float[4] scale, float[2,4] x, float[4] w1) => (float[2,4] y)
    { a = Mul(x, scale)  y = Mul(a, w1) }"""
    step = write_step(text, tmp_path, "mse", "sgd", accumulate=3)
    feeds = {"scale": DRAW.random(4), "x": DRAW.random((6, 4)), "target": DRAW.random((6, 4))}
    feeds = {n: v.astype(np.float32) for n, v in feeds.items()}
    (start,), _ = run_unsplit(step, [feeds], [0.0])
    (found,), _ = run_unsplit(step, [feeds], [1.0])
    w, ax = start["w1.next"], feeds["x"] * feeds["scale"]
    gradient = (2 * (ax * w - feeds["target"]) * ax).sum(0) / 24
    np.testing.assert_allclose(w - found["w1.next"], gradient, rtol=1e-4, atol=1e-6)


def test_a_batch_that_is_not_full_along_time(tmp_path: Path) -> None:
    """Copies of samples do not count, along the second dimension of a target."""
    step = write_step(TIME_FIRST, tmp_path, "mse", "sgd")
    x, target = DRAW.standard_normal((5, 2, 4)), DRAW.standard_normal((5, 2, 2))
    two = {"x": x.astype(np.float32), "target": target.astype(np.float32)}
    par, _ = shard(step, "data-parallel 2")
    with ThreadTrainer(par) as trainer:
        (batch,) = trainer.batches_of(two).epoch(0, None)
        loss = trainer.step(batch, 0.0)["loss"]
    small = write_step(TIME_FIRST.replace("[5,3,", "[5,2,"), tmp_path, "mse", "sgd")
    (wanted,), _ = run_unsplit(small, [two], [0.0])
    np.testing.assert_allclose(loss, wanted["loss"], rtol=1e-5)


POINTWISE = """m (float[3,5] x, float[3,5] z, float[5] w1) => (float[3,5] y)
{ a = Mul(x, w1)  y = Add(a, z) }"""
ONE = """m (float[1,5] x, float[5,5] mask, float[5,2] w1) => (float[1,2] y)
{ a = MatMul(x, mask)  y = MatMul(a, w1) }"""


def test_what_users_say_counts(tmp_path: Path) -> None:
    step = write_step(POINTWISE, tmp_path, "mse", batch_dim={"x": 1})
    assert read(step).batch == {"x": 1, "z": 1, "target": 1}
    step = write_step(POINTWISE, tmp_path, "mse", batch_dim={"z": None})
    assert read(step).batch == {"x": 0, "target": 0}
    assert read(write_step(ONE, tmp_path, "mse")).batch == {"x": 0, "target": 0}
    step = write_step(ONE, tmp_path, "mse", batch_dim={"mask": None}, accumulate=2)
    assert read(step).batch == {"x": 0, "target": 0}


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (
            {"accumulate": 2},
            r"it cannot be told .* x \[1, 5\], mask \[5, 5\]; give --batch-dim NAME=K for each",
        ),
        ({"batch_dim": {"y": 0}}, "--batch-dim y: there is no such input; it has: x, mask"),
        ({"batch_dim": {"x": 2}}, "--batch-dim x=2: it has 2 dimensions; give the number of one"),
        ({"batch_dim": {"x": 0, "mask": 0}}, "different numbers of samples: 1 of 'x', 5 of 'mask'"),
    ],
)
def test_what_cannot_be_told(how: dict[str, object], told: str, tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=told):
        grad(write_model(ONE, tmp_path), tmp_path / "s", loss="mse", optimizer="sgd", **how)  # type: ignore[arg-type]
