"""Ranks that compute the whole model run it as its file has it: bit for bit what onnxruntime makes
of the unsplit model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from agreement import TIMEOUT, check_outputs
from committed import MODELS
from onnx import TensorProto, helper, numpy_helper
from optimized_models import HEADS, LEVELS, SOURCES, Level, make_variant, random_feeds
from speech_models import Array, text, write_speech

from onnxpar.api import shard
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.feeds import make_feeds
from onnxpar.runtime.session.threads import ThreadSession

EVERY = sorted(
    str(path.relative_to(MODELS))
    for path in MODELS.rglob("*.onnx")
    if "llm" not in path.parts  # tests/llm runs those, with caches of their own
)
FORMS = ["plain", "dynamic", "qdq"]


def unsplit(path: Path, level: Any = Level.ORT_ENABLE_ALL) -> ort.InferenceSession:
    """A session of one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = level
    options.log_severity_level = 4
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def check_bits(got: list[Any], wanted: list[Any]) -> None:
    """An AssertionError unless all bits agree; outputs that are no tensors are equal."""
    for a, b in zip(got, wanted, strict=True):
        if not isinstance(b, np.ndarray) or b.dtype == object:
            np.testing.assert_equal(a, b)
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes(), f"error {np.abs(a - b).max()}"


def feeds_of(par: Path, least: int) -> dict[str, Array]:
    """Random inputs; open sizes are `least` and more, indices are in range."""
    bundle = Bundle.load(par)
    sizes = {symbol: least + i for i, symbol in enumerate(bundle.symbols)}
    specs = [(n, kind, bundle.inputs[n].shape_at(sizes)) for n, kind, _ in bundle.input_specs]
    return make_feeds(specs, {n: tuple(r) for n, r in bundle.data["ranges"].items()}, least)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("model", EVERY)
def test_committed(model: str, tmp_path: Path) -> None:
    path, par = MODELS / model, tmp_path / "m.par"
    shard(path, par, devices=1)
    whole = unsplit(path)
    with ThreadSession(par, timeout=TIMEOUT) as session:
        for least in (5, 2) if session.get_inputs() and Bundle.load(par).symbols else (0,):
            feeds = feeds_of(par, least)
            check_bits(session.run(None, feeds), whole.run(None, feeds))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models are written that onnxruntime's tools make."""
    logging.disable(logging.WARNING)
    return tmp_path_factory.mktemp("made")


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("form", FORMS)
def test_lengths_of_speech(form: str, folder: Path) -> None:
    path = write_speech(form, folder)
    shard(path, folder / "m.par", devices=1)
    compare_speech(path, folder / "m.par", check_bits)


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "ranks"), [(None, 2), ("tensor-parallel", 3)])
def test_lengths_of_quantized_speech_over_ranks(
    preset: str | None, ranks: int, folder: Path
) -> None:
    path = write_speech("dynamic", folder)
    plan = shard(path, folder / "m.par", devices=ranks, preset=preset)
    assert plan.collectives
    compare_speech(path, folder / "m.par", check_close)


def check_close(got: list[Any], wanted: list[Any]) -> None:
    """The same lengths, and the same values but for rounding in fused kernels."""
    check_outputs(got, wanted, ["wave"])


def compare_speech(path: Path, par: Path, check: Callable[[list[Any], list[Any]], None]) -> None:
    """Compares the waves of several texts."""
    whole = unsplit(path)
    frames = set()
    with ThreadSession(par, timeout=TIMEOUT) as session:
        for seed in range(4):
            feeds = text(4 + 3 * seed, seed)
            wanted = whole.run(None, feeds)
            check(session.run(None, feeds), wanted)
            frames.add(wanted[0].shape[1])
    assert len(frames) > 1, "lengths depend on the text"


@pytest.mark.matrix
@pytest.mark.parametrize("variant", [*LEVELS, "transformer", "dynamic", "qdq"])
@pytest.mark.parametrize("source", SOURCES)
def test_fused_ops_stay_fused(source: str, variant: str, folder: Path, tmp_path: Path) -> None:
    if variant == "transformer" and source not in HEADS:
        pytest.skip("not a transformer")
    path = make_variant(source, variant, folder)
    model = onnx.load(path)
    shard(path, tmp_path / "m.par", devices=1)
    feeds = random_feeds(model)
    level = Level.ORT_DISABLE_ALL if variant in LEVELS else Level.ORT_ENABLE_ALL
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    with ThreadSession(tmp_path / "m.par", options, timeout=TIMEOUT) as session:
        check_bits(session.run(None, feeds), unsplit(path, level).run(None, feeds))
    assert ops_of(tmp_path / "m.par") == [node.op_type for node in model.graph.node]


def ops_of(par: Path, rank: int = 0) -> list[str]:
    """The ops of a rank's graph."""
    graph = onnx.load(Bundle.load(par).rank_file(rank), load_external_data=False).graph
    return [node.op_type for node in graph.node]


def odd_model() -> onnx.ModelProto:
    """A model in old and rare forms: a function, a sparse weight, a default value of an input, a
    shape that nodes compute, a weight without a reader, a state, and a size of an output that is
    wrong."""
    function = helper.make_function(
        "own",
        "Twice",
        ["a"],
        ["b"],
        [helper.make_node("Add", ["a", "a"], ["b"])],
        [helper.make_opsetid("", 17)],
    )
    values = numpy_helper.from_array(np.array([2.0, 3.0], np.float32), "sparse")
    places = numpy_helper.from_array(np.array([1, 5]), "places")
    weight = np.random.default_rng(0).standard_normal((300, 4)).astype(np.float32)
    stored = [
        numpy_helper.from_array(weight, "weight"),
        numpy_helper.from_array(weight + 1, "unread"),
        numpy_helper.from_array(np.full(4, 0.3, np.float32), "scale"),
        numpy_helper.from_array(np.zeros(4, np.float32), "seen"),
        numpy_helper.from_array(np.array([0, 2, 2]), "shape"),
    ]
    nodes = [
        helper.make_node("Twice", ["x"], ["twice"], domain="own"),
        helper.make_node("MatMul", ["twice", "weight"], ["h"]),
        helper.make_node("Mul", ["h", "scale"], ["scaled"]),
        helper.make_node("ReduceSum", ["scaled", "axis"], ["sum"], keepdims=0),
        helper.make_node("Add", ["seen", "sum"], ["seen_next"]),
        helper.make_node("Reshape", ["scaled", "shape"], ["square"]),
        helper.make_node("Reshape", ["sparse", "six"], ["dense"]),
        helper.make_node("MatMul", ["dense", "weight6"], ["row"]),
        helper.make_node("Add", ["square", "row"], ["y"]),
    ]
    stored += [
        numpy_helper.from_array(np.array([0]), "axis"),
        numpy_helper.from_array(np.array([1, 6]), "six"),
        numpy_helper.from_array(weight[:6, :2].copy(), "weight6"),
    ]
    port = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "odd",
        [
            port("x", TensorProto.FLOAT, ["n", 300]),
            port("scale", TensorProto.FLOAT, [4]),
            port("seen", TensorProto.FLOAT, [4]),
        ],
        [port("y", TensorProto.FLOAT, [7, 2, 2]), port("seen_next", TensorProto.FLOAT, [4])],
        stored,
    )
    graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [6]))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=8)


@pytest.mark.matrix
@pytest.mark.parametrize("dims", [{}, {"n": 3}])
@pytest.mark.parametrize("ranks", [1, 3])
def test_rare_forms(dims: Mapping[str, int], ranks: int, tmp_path: Path) -> None:
    path, par = tmp_path / "odd.onnx", tmp_path / "m.par"
    onnx.save(odd_model(), path)
    plan = shard(
        path,
        par,
        devices=ranks,
        dims=dims,
        strategy={"tensors": {"weight": [None, None]}},
        states=[("seen", "seen_next")],
    )
    assert not plan.collectives
    ops = [node.op_type for node in odd_model().graph.node]
    assert ops_of(par, ranks - 1) == ["Add", *ops[1:]], "the function alone is replaced"
    whole, rng = unsplit(path), np.random.default_rng(1)
    x = rng.standard_normal((3, 300)).astype(np.float32)
    with ThreadSession(par, timeout=TIMEOUT) as session:
        check_bits(session.run(None, {"x": x}), whole.run(None, {"x": x}))
        fed = {"x": x, "scale": rng.standard_normal(4).astype(np.float32)}
        check_bits(session.run(None, fed), whole.run(None, fed))
        for seen in (np.zeros(4, np.float32), whole.run(["seen_next"], {"x": x})[0]):
            got = session.run(["seen_next"], {"x": x}, keep_states=True)
            check_bits(got, whole.run(["seen_next"], {"x": x, "seen": seen}))
