"""Heads of which a step computes a sample of the classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument, RuntimeException
from training.steps import (
    Array,
    ThreadTrainer,
    batches,
    check_training,
    plan_of,
    run_unsplit,
    shard,
)

from onnxpar.base.errors import StrategyError
from onnxpar.cli.command_line import main
from onnxpar.graph.training_spec import MAGNITUDES
from onnxpar.training import grad

CLASSES, WIDTH = 48, 5
NETWORK = "h = MatMul(x, w1)  e = Tanh(h)  f = LpNormalization<axis = 1>(e)"
HEADS = {
    "rows": "n = LpNormalization<axis = 1>(w)  t = Transpose<perm = [1, 0]>(n)",
    "columns": "t = LpNormalization<axis = 0>(w)",
    "as torch exports it": """a = ReduceL2<keepdims = 1>(w, one)  b = Clip(a, tiny)
    c = Expand(b, whole)  n = Div(w, c)  t = Transpose<perm = [1, 0]>(n)""",
}
FULL = {"loss": "arcface", "optimizer": "none", "logit_scale": 4.0}


def model(samples: int = 4, head: str = "rows", rows: Array | None = None) -> onnx.ModelProto:
    """A network and a head of normalized centres: of 48 classes, or of the centres `rows`."""
    draw = np.random.default_rng(5)
    w1, w = draw.standard_normal((7, WIDTH)), draw.standard_normal((CLASSES, WIDTH))
    w = w if rows is None else w[rows]
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
    faces (float[{samples},7] x) => (float[{samples},{len(w)}] cosines)
    <int64[1] one = {{1}}, float tiny = {{1e-12}}, int64[2] whole = {{{len(w)}, {WIDTH}}}>
    {{ {NETWORK}  {HEADS[head]}  cosines = MatMul(f, t) }}"""
    made = onnx.parser.parse_model(text)
    for name, value in (("w1", w1), ("w", w.T if head == "columns" else w)):
        made.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
    return made


def write(folder: Path, made: onnx.ModelProto, **how: Any) -> Path:
    given = FULL | {"sample_rate": 0.5, "sample_groups": 6} | how
    grad(made, folder / "step.onnx", **given)
    return folder / "step.onnx"


def feeds(labels: list[int], seed: int = 0) -> dict[str, Array]:
    x = np.random.default_rng(len(labels)).standard_normal((len(labels), 7)).astype(np.float32)
    return {"x": x, "labels": np.array(labels), "seed": np.array(seed)}


def run(step: Path, given: dict[str, Array]) -> dict[str, Array]:
    return run_unsplit(step, [given], [0.1])[0][0]


def touched(gradient: Array) -> Array:
    """The rows with a gradient: the classes that the step computed."""
    return np.flatnonzero(np.abs(gradient).sum(1))


LABELS = [3, 40, 3, 41]


@pytest.mark.matrix
@pytest.mark.parametrize("head", HEADS)
def test_a_step_is_that_of_the_classes_it_samples(head: str, tmp_path: Path) -> None:
    """The reference is the unsampled head of these classes alone."""
    told = run(write(tmp_path, model(head=head)), feeds(LABELS))
    of_head = told["w.grad"].T if head == "columns" else told["w.grad"]
    sample = touched(of_head)
    assert {*LABELS} <= {*sample.tolist()}
    assert (np.bincount(sample // 8, minlength=6) == 4).all()
    alone = model(rows=sample)
    step = tmp_path / "alone.onnx"
    grad(alone, step, **FULL)
    given = feeds(np.searchsorted(sample, LABELS).tolist())
    expected = run(step, {name: given[name] for name in ("x", "labels")})
    np.testing.assert_allclose(told["loss"], expected["loss"], rtol=1e-6)
    np.testing.assert_allclose(told["w1.grad"], expected["w1.grad"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_head[sample], expected["w.grad"], rtol=1e-5, atol=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize(("groups", "larger", "kept"), [(10, 8, 4), (5, 3, 5), (9, 3, 4)])
@pytest.mark.parametrize("head", ["rows", "columns"])
def test_groups_need_not_divide_the_classes(
    head: str, groups: int, larger: int, kept: int, tmp_path: Path
) -> None:
    """The first groups have a class more than others; as many are drawn from each."""
    least = CLASSES // groups
    starts = np.cumsum([0] + [least + 1] * larger + [least] * (groups - larger))
    assert starts[-1] == CLASSES
    labels = [0, CLASSES - 1, CLASSES - 1, 7]
    step = write(tmp_path, model(head=head), sample_groups=groups)
    told = run(step, feeds(labels))
    of_head = told["w.grad"].T if head == "columns" else told["w.grad"]
    sample = touched(of_head)
    assert {*labels} <= {*sample.tolist()}
    assert (np.histogram(sample, starts)[0] == kept).all()
    alone = tmp_path / "alone.onnx"
    grad(model(rows=sample), alone, **FULL)
    given = feeds(np.searchsorted(sample, labels).tolist())
    expected = run(alone, {name: given[name] for name in ("x", "labels")})
    np.testing.assert_allclose(told["loss"], expected["loss"], rtol=1e-6)
    np.testing.assert_allclose(of_head[sample], expected["w.grad"], rtol=1e-5, atol=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("groups", [1, 6, 12])
def test_a_sample_of_all_classes_is_the_unsampled_head(groups: int, tmp_path: Path) -> None:
    """Of groups that are not larger than the batch, each class is kept."""
    labels = np.random.default_rng(1).integers(0, CLASSES, CLASSES // groups).tolist()
    given = feeds(labels)
    made = model(len(labels))
    sampled = run(write(tmp_path, made, sample_groups=groups), given)
    step = tmp_path / "whole.onnx"
    grad(made, step, **FULL, sample_rate=1.0)
    whole = run(step, {name: given[name] for name in ("x", "labels")})
    for name, value in whole.items():
        np.testing.assert_allclose(sampled[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_negative_classes_are_drawn_evenly_and_anew_for_each_seed(tmp_path: Path) -> None:
    step = write(tmp_path, model())
    samples = [touched(run(step, feeds(LABELS, seed))["w.grad"]) for seed in range(200)]
    assert len({tuple(s) for s in samples}) == 200
    counts = np.bincount(np.concatenate(samples), minlength=CLASSES)
    for group in range(6):
        own = counts[8 * group : 8 * group + 8]
        positive = {label for label in LABELS if label // 8 == group}
        share = (4 - len(positive)) / (8 - len(positive))
        for at, count in enumerate(own):
            if 8 * group + at in positive:
                assert count == 200
            else:
                assert abs(count - 200 * share) < 4.5 * (200 * share * (1 - share)) ** 0.5
    np.testing.assert_array_equal(samples[7], touched(run(step, feeds(LABELS, 7))["w.grad"]))


def test_a_group_has_room_for_all_labels(tmp_path: Path) -> None:
    """Five different labels of a group of 8, at a rate of 3 in 8."""
    labels = [16, 17, 18, 21, 23]
    told = run(write(tmp_path, model(5), sample_rate=0.4), feeds(labels))
    assert {*labels} <= {*touched(told["w.grad"]).tolist()}


def test_labels_that_are_ignored_or_no_classes(tmp_path: Path) -> None:
    step = write(tmp_path, model())
    part = run(step, feeds([3, -100, 40, -100]))
    two = feeds([3, -100, 40, -100])
    grad(model(2), tmp_path / "two.onnx", **FULL)
    assert np.isfinite(part["loss"]) and not np.isnan(part["w.grad"]).any()
    sample = touched(part["w.grad"])
    alone = tmp_path / "alone.onnx"
    grad(model(rows=sample), alone, **FULL)
    kept = np.array([np.searchsorted(sample, 3), -100, np.searchsorted(sample, 40), -100])
    expected = run(alone, {"x": two["x"], "labels": kept})
    np.testing.assert_allclose(part["loss"], expected["loss"], rtol=1e-6)
    for wrong in (-1, CLASSES, -CLASSES):
        with pytest.raises((InvalidArgument, RuntimeException), match="out of"):
            run(step, feeds([3, wrong, 40, 1]))


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("layout", "loss", "lazy"),
    [
        ("class-parallel 2", "arcface", []),
        ("class-parallel 3", "softmax-cross-entropy", ["w"]),
        ("class-parallel 3", "cosface", []),
        ("class-parallel 4", "arcface", ["w"]),
        ("class-parallel dp=2,tp=2", "cosface", []),
    ],
)
def test_ranks_sample_what_one_samples(
    layout: str, loss: str, lazy: list[str], tmp_path: Path
) -> None:
    """Over groups that ranks share evenly or not."""
    how: dict[str, Any] = {"loss": loss, "optimizer": "adam", "lazy": lazy}
    how["logit_scale"] = None if loss == "softmax-cross-entropy" else 8.0
    check_training(write(tmp_path, model(), **how), layout, 4)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("layout", "groups", "lazy"),
    [
        ("class-parallel 2", 10, ["w"]),
        ("class-parallel 3", 10, []),
        ("class-parallel 5", 10, []),
        ("class-parallel 2", 5, []),
        ("class-parallel 2", 7, ["w"]),
        ("hybrid dp=2,tp=2", 10, []),
    ],
)
def test_ranks_share_groups_of_two_sizes(
    layout: str, groups: int, lazy: list[str], tmp_path: Path
) -> None:
    """No more is sent than for groups of one size. One group alone is on every rank, however."""
    how: dict[str, Any] = {"optimizer": "adam", "lazy": lazy, "logit_scale": 8.0}
    plan = check_training(write(tmp_path, model(), sample_groups=groups, **how), layout, 3)
    if groups != 7 and layout.startswith("class"):
        even = plan_of(write(tmp_path, model(), sample_groups=6, **how), layout)
        assert [c.kind for c in plan.collectives] == [c.kind for c in even.collectives]
        assert plan.collectives[0].bytes == even.collectives[0].bytes


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("layout", "how"),
    [
        ("class-parallel 2", {"head": "columns", "lazy": ["w"], "optimizer": "adagrad"}),
        ("data-parallel 3", {"lazy": ["w"], "optimizer": "sgd"}),
        ("hybrid dp=2,tp=2", {"head": "columns", "optimizer": "adam"}),
        ("tensor-parallel 2", {"precision": "bfloat16", "optimizer": "sgd"}),
        ("class-parallel 3", {"accumulate": 3, "clip_norm": 0.5, "optimizer": "momentum"}),
        ("class-parallel 3", {"interclass_filtering_threshold": 0.2, "optimizer": "adam"}),
        ("zero3 2", {"recompute": True, "optimizer": "adamw"}),
        ("zero2 3", {"lazy": ["w"], "optimizer": "adam"}),
        ("tp=3", {"optimizer": "sgd"}),
    ],
)
def test_other_presets_and_options(layout: str, how: dict[str, Any], tmp_path: Path) -> None:
    made = model(head=how.pop("head", "rows"))
    check_training(write(tmp_path, made, **how), layout, 3)


@pytest.mark.slow
def test_a_lazy_step_changes_what_it_samples(tmp_path: Path) -> None:
    """With plain gradient descent, it is the dense step."""
    dense = run(write(tmp_path, model(), optimizer="sgd"), feeds(LABELS))
    lazy = run(write(tmp_path, model(), optimizer="sgd", lazy=["w"]), feeds(LABELS))
    for name, value in dense.items():
        if name == MAGNITUDES:  # of what changes: rows that are left out do not count
            continue
        np.testing.assert_allclose(lazy[name], value, rtol=1e-6, err_msg=name)
    before = next(numpy_helper.to_array(t) for t in model().graph.initializer if t.name == "w")
    step = write(tmp_path, model(), optimizer="adam", lazy=["w"])
    told = run(step, feeds(LABELS))
    changed = touched(told["w.next"] - before)
    assert len(changed) == 24
    np.testing.assert_array_equal(touched(told["w.exp_avg.next"]), changed)
    par, plan = shard(step, "class-parallel 3")
    (batch,) = batches(plan, 1)
    with ThreadTrainer(par) as trainer:
        trainer.step(batch, 0.1, 0)
        after = trainer.session.states.read("w")
    assert len(touched(after - before)) == 24


def test_evaluation_ranks_all_classes(tmp_path: Path) -> None:
    """It counts the label among all classes, not among the sampled ones."""
    made = model()
    step = write(tmp_path, made)
    whole = tmp_path / "whole.onnx"
    grad(made, whole, **FULL)
    given = feeds(LABELS)
    expected = run(whole, {name: given[name] for name in ("x", "labels")})
    told = run(step, given)
    for name in ("evaluation.loss", "evaluation.accuracy"):
        np.testing.assert_allclose(told[name], expected[name], rtol=1e-6)


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(model(), tmp_path / "model.onnx")
    path, step = str(tmp_path / "model.onnx"), str(tmp_path / "step.onnx")
    how = ["--loss", "arcface", "--optimizer", "sgd", "--sample-rate", "0.5", "-o", step]
    assert main(["grad", path, *how]) == 0
    out = capsys.readouterr().out
    assert "a step samples 32 of 48 classes, 4 from each of 8 groups: w\n" in out
    assert "x, labels, learning_rate, seed;" in out
    assert main(["check", step, "--train", "--devices", "2", "--steps", "2"]) == 0


BIAS = """<ir_version: 8, opset_import: ["" : 18]>
m (float[4,7] x, float[7,48] w, float[48] b) => (float[4,48] y)
{ h = MatMul(x, w)  y = Add(h, b) }"""
MIXED = """<ir_version: 8, opset_import: ["" : 18]>
m (float[4,7] x, float[7,48] w) => (float[4,48] y)
{ h = MatMul(x, w)  y = Softmax<axis = 1>(h) }"""
LONG = """<ir_version: 8, opset_import: ["" : 18]>
m (float[4,3,7] x, float[7,48] w) => (float[4,3,48] y) { y = MatMul(x, w) }"""
NONE = """<ir_version: 8, opset_import: ["" : 18]>
m (float[4,48] x, float[48,7] w, float[7] v) => (float[4,48] y)
{ h = MatMul(x, w)  s = Mul(h, v)  t = ReduceSum<keepdims = 1>(s)  y = Add(x, t) }"""


def parsed(text: str) -> onnx.ModelProto:
    """A model whose inputs `w`, `v` and `b` are weights."""
    made = onnx.parser.parse_model(text)
    for port in [p for p in made.graph.input if p.name in "wvb"]:
        shape = [d.dim_value for d in port.type.tensor_type.shape.dim]
        value = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        made.graph.initializer.append(numpy_helper.from_array(value, port.name))
        made.graph.input.remove(port)
    return made


@pytest.mark.parametrize(
    ("text", "how", "message"),
    [
        (None, {"sample_rate": 0.0}, "--sample-rate 0.0: must be above 0 and at most 1"),
        (None, {"sample_rate": 1.5}, "--sample-rate 1.5: must be above 0"),
        (None, {"sample_rate": 1.0}, "--sample-groups 6: classes are sampled only with"),
        (None, {"sample_groups": 0}, "--sample-groups 0: must be 1 or more"),
        (None, {"sample_groups": 49}, "--sample-groups 49: the head has only 48 classes; give at"),
        (None, {"sample_groups": 13}, "some groups of 48 classes have only 3, but a step keeps 4"),
        (None, {"loss": "mse", "logit_scale": None}, "the loss 'mse' has no classes"),
        (None, {"class_axis": 0}, "--class-axis 0: classes are sampled of scores of shape"),
        (BIAS, {}, "Add '.*' reads 'b' by class, too, besides 'w'"),
        (MIXED, {}, "Softmax '.*' combines the classes of 'w'"),
        (LONG, {}, r"has the shape \[4, 3, 48\]; only scores of shape \[samples, classes\]"),
        (NONE, {}, "combines the classes of 'w'"),
        (None, {"preset": "manual", "devices": 2}, "--sample-rate: .* manual program"),
    ],
)
def test_errors(text: str | None, how: dict[str, Any], message: str, tmp_path: Path) -> None:
    made = model() if text is None else parsed(text)
    with pytest.raises(StrategyError, match=message):
        write(tmp_path, made, **how)
    assert not (tmp_path / "step.onnx").exists()
