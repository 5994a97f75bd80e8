"""Heads whose classes are split over all ranks, beside a data-parallel network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from committed import MODELS
from onnx import numpy_helper
from training.models import CONV
from training.steps import check_training, plan_of, write_step

from onnxpar.base.errors import StrategyError
from onnxpar.compiler.plan import Plan
from onnxpar.training import grad

SAMPLES, WIDTH = 8, 12
DIRECT = """n = LpNormalization<axis = 1>(w)  f = LpNormalization<axis = 1>(e)"""
EXPORTED = """k = ReduceL2<keepdims = 1>(w, one)  l = Clip(k, tiny)  n = Div(w, l)
    p = ReduceL2<keepdims = 1>(e, one)  q = Clip(p, tiny)  f = Div(e, q)"""
SMALL = 4 * SAMPLES * 2
"""Bytes of what ranks exchange for each sample: a number of 4 or of 8 bytes, over 2 ranks."""


def write(folder: Path, classes: int = 40, norms: str = DIRECT, **how: Any) -> Path:
    """A step of a network of two layers with normalized class centres."""
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
    faces (float[{SAMPLES},16] x) => (float[{SAMPLES},{classes}] cosines)
    <int64[1] one = {{1}}, float tiny = {{1e-12}}>
    {{ h = MatMul(x, w1)  r = Relu(h)  e = MatMul(r, w2)  {norms}
      t = Transpose<perm = [1, 0]>(n)  cosines = MatMul(f, t) }}"""
    model = onnx.parser.parse_model(text)
    draw = np.random.default_rng(3)
    for name, shape in (("w1", (16, 32)), ("w2", (32, WIDTH)), ("w", (classes, WIDTH))):
        value = draw.standard_normal(shape, np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    grad(model, folder / "step.onnx", **({"loss": "arcface", "optimizer": "adam"} | how))
    return folder / "step.onnx"


def layouts(plan: Plan) -> dict[str, str]:
    ports = [*plan.inputs, *plan.outputs]
    return {p.name: p.layout.text(plan.mesh) for p in ports if p.layout is not None}


def exchanged(plan: Plan) -> tuple[list[tuple[str, int]], list[str]]:
    """The collectives of a network and its head, as (kind, bytes), and the kinds of small ones."""
    large = [(c.kind, c.bytes) for c in plan.collectives if c.bytes > SMALL]
    return large, [c.kind for c in plan.collectives if c.bytes <= SMALL]


EMBEDDINGS = SAMPLES * WIDTH * 4 // 2
NETWORK = 4 * (16 * 32 + 32 * WIDTH)
OF_CENTRES = 4
"""Bytes of the sum of what the class centres become, which is beside the gradients."""


@pytest.mark.matrix
@pytest.mark.parametrize("norms", [DIRECT, EXPORTED], ids=["direct", "exported"])
@pytest.mark.parametrize(
    ("how", "small"),
    [
        ({"loss": "softmax-cross-entropy"}, 3),
        ({}, 5),
        ({"loss": "cosface"}, 5),
        ({"sample_rate": 0.4, "sample_groups": 2}, 6),
        ({"sample_rate": 0.4, "sample_groups": 2, "lazy": ["w"]}, 6),
    ],
)
def test_ranks_exchange_embeddings_and_a_number_per_sample(
    how: dict[str, Any], small: int, norms: str, tmp_path: Path
) -> None:
    """Embeddings are gathered, and their gradients reduce-scattered; the gradients of the network
    are summed; all else is small. Scores, one-hot labels and class centres stay where they are."""
    plan = plan_of(write(tmp_path, norms=norms, **how), "class-parallel 2")
    large, others = exchanged(plan)
    expected = [
        ("AllGather", EMBEDDINGS),
        ("ReduceScatter", EMBEDDINGS),
        ("AllReduce", NETWORK + OF_CENTRES),
    ]
    assert large == expected
    assert others == ["AllReduce"] * small
    texts = layouts(plan)
    for name in ("w", "w.next", "w.exp_avg", "w.exp_avg_sq.next"):
        assert texts[name] == "[dp, -]", name
    assert texts["x"] == "[dp, -]" and texts["w1"] == "[-, -]"


@pytest.mark.matrix
@pytest.mark.parametrize("norms", [DIRECT, EXPORTED], ids=["direct", "exported"])
@pytest.mark.parametrize(
    ("layout", "classes"),
    [("class-parallel 2", 40), ("class-parallel 3", 1500), ("class-parallel 4", 41), ("3", 41)],
)
def test_training(layout: str, classes: int, norms: str, tmp_path: Path) -> None:
    """Also by the search, and of classes that ranks cannot share evenly."""
    check_training(write(tmp_path, classes, norms), layout, 4)


def test_a_sampled_head_stays_in_memory(tmp_path: Path) -> None:
    step = write(tmp_path, sample_rate=0.4, sample_groups=2, lazy=["w"])
    with pytest.raises(StrategyError, match=r"place w=host: w: a step draws .*: --preset class"):
        plan_of(step, "class-parallel 2", strategy={"place": {"w": "host"}})


STRATEGY = {
    "mesh": {"dp": 2},
    "shard": {"MatMul_cosines": [[1, 1], [1, "dp"]]},
    "tensors": {"x": ["dp", None], "labels": ["dp"]},
}


@pytest.mark.matrix
@pytest.mark.parametrize("loss", ["softmax-cross-entropy", "arcface", "cosface"])
def test_labels_that_a_strategy_splits_are_gathered_not_their_classes(
    loss: str, tmp_path: Path
) -> None:
    """The scores of the loss and its gradient stay split by class."""
    step = write(tmp_path, loss=loss)
    plan = check_training(step, "dp=2", 3, strategy=STRATEGY)
    large, others = exchanged(plan)
    expected = [
        ("AllGather", EMBEDDINGS),
        ("ReduceScatter", EMBEDDINGS),
        ("AllReduce", NETWORK + OF_CENTRES),
    ]
    assert large == expected and "AllToAll" not in others


@pytest.mark.slow
def test_two_million_classes(tmp_path: Path) -> None:
    """Each rank plans its own classes, also of a sample of them."""
    text = """<ir_version: 8, opset_import: ["" : 18]>
    faces (float[64,16] x) => (float[64,2000000] cosines)
    { h = MatMul(x, w1)  e = Relu(h)  n = LpNormalization<axis = 1>(w)
      f = LpNormalization<axis = 1>(e)  t = Transpose<perm = [1, 0]>(n)  cosines = MatMul(f, t) }"""
    model = onnx.parser.parse_model(text)
    for name, shape in (("w1", (16, 4)), ("w", (2_000_000, 4))):
        value = np.full(shape, 0.5, np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    for rate in (1.0, 0.1):
        step = tmp_path / f"{rate}.onnx"
        grad(model, step, loss="arcface", optimizer="sgd", sample_rate=rate)
        plan = plan_of(step, "class-parallel 8")
        assert layouts(plan)["w"] == "[dp, -]"
        assert sum(c.bytes for c in plan.collectives) < 64 * 1024
        if rate == 1:
            plan = plan_of(step, "tensor-parallel 8")
            assert layouts(plan)["w"] == "[tp, -]"
            assert sum(c.bytes for c in plan.collectives) < 64 * 1024
        assert step.stat().st_size < 50_000_000


@pytest.mark.matrix
@pytest.mark.parametrize("norms", [DIRECT, EXPORTED], ids=["direct", "exported"])
@pytest.mark.parametrize("layout", ["tensor-parallel 4", "hybrid dp=2,tp=2"])
def test_tensor_parallel_splits_a_head_by_class(layout: str, norms: str, tmp_path: Path) -> None:
    """Not by the columns of its centres: the sum would be as large as all scores."""
    plan = plan_of(write(tmp_path, 20_000, norms), layout)
    assert layouts(plan)["w"] == "[tp, -]"
    assert not [c for c in plan.collectives if c.bytes >= 4 * 20_000 and "grad" not in c.tensor]


def test_a_deep_network_does_not_make_large_sums_cheap(tmp_path: Path) -> None:
    """By the number of collectives alone, a split of the centres' columns would cost less."""
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
    faces (float[32,3,28,28] x) => (float[32,20000] cosines)
    <int64[1] one = {{1}}, float tiny = {{1e-12}}>
    {{ a = Conv<strides = [4, 4], pads = [1, 1, 1, 1]>(x, w1)  b = Relu(a)
      c = Conv<strides = [4, 4], pads = [1, 1, 1, 1]>(b, w2)  d = Relu(c)  g = Flatten(d)
      e = MatMul(g, w3)  {EXPORTED}
      t = Transpose<perm = [1, 0]>(n)  cosines = MatMul(f, t) }}"""
    model = onnx.parser.parse_model(text)
    shapes = {"w1": (16, 3, 5, 5), "w2": (32, 16, 5, 5), "w3": (128, 64), "w": (20_000, 64)}
    for name, shape in shapes.items():
        value = np.ones(shape, np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    grad(model, tmp_path / "step.onnx", loss="arcface", optimizer="sgd")
    plan = plan_of(tmp_path / "step.onnx", "tensor-parallel 8")
    assert layouts(plan)["w"] == "[tp, -]"


@pytest.mark.slow
def test_the_search_splits_a_head_of_many_classes(tmp_path: Path) -> None:
    plan = plan_of(write(tmp_path, 200_000), "4")
    assert [c for c in plan.collectives if c.bytes > 10 * SAMPLES * WIDTH * 4 * 8] == []
    assert layouts(plan)["w"] in ("[tp, -]", "[dp, -]")


@pytest.mark.slow
def test_a_tied_vocabulary_is_a_head(tmp_path: Path) -> None:
    """Its lookups are split by row, and its scores by class."""
    step = tmp_path / "step.onnx"
    grad(MODELS / "gpt2.legacy.training.onnx", step, loss="softmax-cross-entropy", optimizer="sgd")
    plan = check_training(step, "class-parallel 2", 2)
    assert layouts(plan)["network.transformer.wte.weight"] == "[dp, -]"


@pytest.mark.parametrize(
    ("layout", "how", "message"),
    [
        ("class-parallel 6", {"classes": 5}, "over 6: 'w' has only 5 classes"),
        (
            "class-parallel 4",
            {"sample_rate": 0.5, "sample_groups": 2},
            "over 4: 'w' has only 2 classes, or groups of classes",
        ),
    ],
)
def test_errors(layout: str, how: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=message):
        plan_of(write(tmp_path, **how), layout)


def test_a_network_without_a_classifier(tmp_path: Path) -> None:
    text = "m (float[8,6] x, float[6] w) => (float[8,6] y) { y = Mul(x, w) }"
    with pytest.raises(StrategyError, match=r"the model has no classifier, .* use data-parallel"):
        plan_of(write_step(text, tmp_path, "mse"), "class-parallel 2")


def test_images(tmp_path: Path) -> None:
    """A convolutional network with batch-norm, over the whole batch."""
    check_training(write_step(CONV, tmp_path), "class-parallel 3", 3)
