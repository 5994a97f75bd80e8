"""Mixed precision: a model computes in 16 bits, its parameters keep theirs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from agreement import options
from committed import MODELS
from training.models import BLOCKS, CONV
from training.steps import (
    CROSS_ENTROPY,
    MLP,
    Array,
    ThreadTrainer,
    batches,
    check_training,
    plan_of,
    quiet,
    run_unsplit,
    shard,
    write_step,
)

from onnxpar.base.errors import StrategyError
from onnxpar.planner import sharder
from onnxpar.training import grad
from onnxpar.training.loss_scale import LossScale

DRAW = np.random.default_rng(11)


def batch(scale: float = 1.0) -> dict[str, Array]:
    x = (scale * DRAW.standard_normal((8, 6))).astype(np.float32)
    return {"x": x, "labels": DRAW.integers(0, 5, 8)}


@pytest.mark.parametrize(("precision", "error"), [("float16", 4e-3), ("bfloat16", 3e-2)])
def test_gradients_are_near_those_of_32_bits(precision: str, error: float, tmp_path: Path) -> None:
    """Those of bfloat16 are rounded; of float16, onnxruntime's CPU leaves out what it can."""
    (tmp_path / "wide").mkdir()
    narrow = write_step(MLP, tmp_path, optimizer="none", precision=precision)
    wide = write_step(MLP, tmp_path / "wide", optimizer="none")
    feeds = [batch()]
    (a, step), (b, _) = (run_unsplit(path, feeds, [0.0]) for path in (narrow, wide))
    np.testing.assert_allclose(a[0]["loss"], b[0]["loss"], rtol=error)
    for name in ("w1.grad", "w2.grad", "w3.grad", "w4.grad"):
        assert a[0][name].dtype == np.float32
        scale = np.abs(b[0][name]).max()
        np.testing.assert_allclose(a[0][name], b[0][name], rtol=0, atol=4 * error * scale)
        if precision == "bfloat16":
            assert np.abs(a[0][name] - b[0][name]).max() > 1e-5 * scale
    assert step.precision == precision


def test_parameters_and_ports_keep_their_types(tmp_path: Path) -> None:
    path = write_step(MLP, tmp_path, optimizer="adam", precision="float16")
    model = onnx.load(path)
    ports = (*model.graph.input, *model.graph.output)
    types = {p.name: p.type.tensor_type.elem_type for p in ports}
    assert {onnx.TensorProto.FLOAT16} & {*types.values()} == set()
    assert {types[f"w1{s}"] for s in ("", ".next", ".exp_avg")} == {onnx.TensorProto.FLOAT}
    products = [n for n in model.graph.node if n.op_type in ("Gemm", "MatMul")]
    casts = {n.output[0] for n in model.graph.node if n.op_type == "Cast"}
    assert products and any(name in casts for n in products for name in n.input)


def test_an_update_that_is_not_finite_is_skipped(tmp_path: Path) -> None:
    """The factor is halved; parameters, state and counts stay as they were."""
    path = write_step(MLP, tmp_path, optimizer="adam", precision="float16", clip_norm=1.0)
    good = batch()
    bad = {**good, "x": np.full((8, 6), np.inf, np.float32)}
    found, step = run_unsplit(path, [*[good] * 6, bad, good], [0.01] * 8)
    assert step.metrics == ["skipped", "gradient_norm"]
    told = found[-3:]  # by then the factor is small enough
    assert [float(t["skipped"]) for t in told] == [0, 1, 0]
    scale = float(told[0]["loss_scale.next"])
    assert [float(t["loss_scale.next"]) for t in told] == [scale, scale / 2, scale / 2]
    good_steps = int(told[0]["loss_scale.good_steps.next"])
    assert [int(t["loss_scale.good_steps.next"]) for t in told] == [good_steps, 0, 1]
    assert [int(t["step.next"]) for t in told] == [good_steps, good_steps, good_steps + 1]
    for slot in step.slots:
        if not slot.input.startswith("loss_scale"):
            np.testing.assert_array_equal(told[1][slot.output], told[0][slot.output])
    assert all(np.isfinite(t[s.output]).all() for t in found for s in step.slots)
    assert not np.array_equal(told[2]["w1.next"], told[1]["w1.next"])


def test_the_factor_grows_after_many_good_steps(tmp_path: Path) -> None:
    path = write_step(MLP, tmp_path, precision="float16")
    model = onnx.load(path)
    spec = model.SerializeToString()
    session = ort.InferenceSession(spec, quiet())
    feeds = {**batch(), "learning_rate": np.array(0, np.float32)}
    names = ["loss_scale.next", "loss_scale.good_steps.next"]
    for good, expected in ((1998, (1024, 1999)), (1999, (2048, 0))):
        given = {
            "loss_scale": np.array(1024, np.float32),
            "loss_scale.good_steps": np.array(good),
        }
        scale, count = session.run(names, feeds | given)
        assert (float(scale), int(count)) == expected


@pytest.mark.parametrize(("text", "factor"), [("1024", 1024), ("none", None)])
def test_factors_that_are_given(text: str, factor: float | None, tmp_path: Path) -> None:
    """They change no gradient but by rounding, and are no state."""
    path = write_step(MLP, tmp_path, precision="float16", loss_scale=text, optimizer="sgd")
    told, step = run_unsplit(path, [batch()], [0.1])
    assert step.metrics == [] and {s.kind for s in step.slots} == {"parameter"}
    assert LossScale.parse(text, "float16") == (factor and LossScale(factor, dynamic=False))
    assert np.isfinite(told[0]["loss"])


@pytest.mark.parametrize("text", ["much", "0", "-2", "inf", "nan"])
def test_factors_that_do_not_fit(text: str) -> None:
    with pytest.raises(StrategyError, match=f"--loss-scale '{text}': give dynamic, none or"):
        LossScale.parse(text, None)


def test_an_unknown_precision(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="precision 'float8': give one of float16, bfloat16"):
        write_step(MLP, tmp_path, precision="float8")


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["data-parallel 2", "zero3 2", "tensor-parallel 3"])
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_ranks_agree_with_one(precision: str, layout: str, tmp_path: Path) -> None:
    step = write_step(MLP, tmp_path, optimizer="adam", precision=precision)
    check_training(step, layout, 6, 0.001)


@pytest.mark.matrix
@pytest.mark.parametrize(("text", "how"), [(CONV, {"batch_norm": "global"}), (BLOCKS, {})])
def test_normalizations(text: str, how: dict[str, object], tmp_path: Path) -> None:
    step = write_step(text, tmp_path, precision="float16", **how)
    check_training(step, "data-parallel 2", 4, 0.001)


@pytest.mark.slow
def test_a_transformer_trains(tmp_path: Path) -> None:
    """Its loss falls as it does in 32 bits."""
    losses = {}
    for precision in (None, "float16"):
        path = tmp_path / f"{precision}.onnx"
        model = MODELS / "gpt2.dynamo.static.onnx"
        grad(model, path, loss=CROSS_ENTROPY, optimizer="sgd", precision=precision)
        par, plan = shard(path, "zero2 2")
        (one,) = batches(plan, 1)
        with ThreadTrainer(par.rename(tmp_path / f"{precision}.par")) as trainer:
            losses[precision] = [trainer.step(one, 0.2)["loss"] for _ in range(5)]
    assert losses[None][-1] < 0.9 * losses[None][0]
    np.testing.assert_allclose(losses["float16"], losses[None], rtol=2e-2)


def test_gradients_travel_no_wider_than_parameters(tmp_path: Path) -> None:
    plan = plan_of(write_step(MLP, tmp_path, precision="bfloat16"), "data-parallel 2")
    largest = max(c.bytes for c in plan.collectives)
    assert largest <= (6 * 9 + 9 + 9 * 5 + 5) * 4


@pytest.mark.slow
def test_gradients_that_travel_in_16_bits_do_not_become_codes(tmp_path: Path) -> None:
    step = tmp_path / "step.onnx"
    model = MODELS / "gpt2.dynamo.static.onnx"
    grad(model, step, loss=CROSS_ENTROPY, optimizer="sgd", precision="float16", loss_scale="none")
    how = options("data-parallel 2")
    with pytest.raises(StrategyError, match="2bit: the step's gradients have 16 bits already"):
        sharder.plan(step, replace(how, compression="2bit"))
    sharder.plan(step, replace(how, compression="bfloat16"))  # as they do


MASKED = """<ir_version: 10, opset_import: ["" : 25]>
m (float[2,4,4] x, float[4,4] mask) => (float[2,4,4] y) {
q = MatMul(x, wq)  k = MatMul(x, wk)  v = MatMul(x, wv)
y = Attention<q_num_heads = 2, kv_num_heads = 2>(q, k, v, mask) }"""


@pytest.mark.parametrize("number", [-1e9, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize(("precision", "held"), [("float16", -65504.0), ("bfloat16", -3e38)])
def test_masks_beyond_16_bits(precision: str, held: float, number: float, tmp_path: Path) -> None:
    """Such a number is the least that 16 bits hold, not minus infinity, which hides a whole row:
    gradients, which read the mask in 32 bits, are those of what Attention computes."""
    if onnx.defs.onnx_opset_version() < 25:
        pytest.skip("this onnx does not have opset 25")
    proto = onnx.parser.parse_model(MASKED)
    random = np.random.default_rng(0)
    for name in ("wq", "wk", "wv"):
        weight = random.standard_normal((4, 4), np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    path, step = tmp_path / "m.onnx", tmp_path / "step.onnx"
    onnx.save(proto, path)
    how = {"precision": precision, "loss_scale": "none", "batch_dim": {"mask": None}}
    grad(path, step, loss="mse", optimizer="none", **how)
    session = ort.InferenceSession(step, quiet())
    feeds = {name: random.standard_normal((2, 4, 4), np.float32) for name in ("x", "target")}
    row = np.array([[0], [1], [0], [0]], np.float32) * np.ones(4, np.float32)
    names = ["loss", "wq.grad", "wk.grad", "wv.grad"]
    found, wanted, hidden = (
        session.run(names, feeds | {"mask": np.where(row, np.float32(n), 0)})
        for n in (number, held, -np.inf)
    )
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert abs(found[0] - hidden[0]) > 0.01
