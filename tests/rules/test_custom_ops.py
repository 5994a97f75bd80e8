"""Custom ops of onnxruntime: their libraries in every session, and shapes from their rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxpar
from onnxpar.base import custom_ops
from onnxpar.base.custom_ops import libraries
from onnxpar.base.errors import InputError, RankError, StrategyError
from onnxpar.cli.command_line import main
from onnxpar.graph import custom_shapes
from onnxpar.rules import rule as rules
from onnxpar.rules.rule import Rule, einsum, rule

EXTENSIONS = "ai.onnx.contrib"
Arrays = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules, shapes and libraries of a test are gone after it."""
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))
    monkeypatch.setattr(custom_shapes, "_functions", {})
    monkeypatch.setattr(custom_ops, "_libraries", {})


@pytest.fixture
def extensions() -> str:
    """The file of onnxruntime-extensions, which has ops that ONNX lacks."""
    return str(pytest.importorskip("onnxruntime_extensions").get_library_path())


def save(nodes: Sequence[onnx.NodeProto], weights: Arrays, path: Path, x: Sequence[object]) -> Path:
    ports = [[helper.make_tensor_value_info("x", TensorProto.FLOAT, x)]]
    ports += [[helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]]
    stored = [numpy_helper.from_array(w, name) for name, w in weights.items()]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(EXTENSIONS, 1)]
    graph = helper.make_graph(nodes, "custom", *ports, stored)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


def signed_mlp(path: Path) -> Path:
    """Two products around the positive minus twice the negative parts of 24 columns."""
    random = np.random.default_rng(0)
    nodes = [
        helper.make_node("MatMul", ["x", "up"], ["h"], name="fc1"),
        helper.make_node("NegPos", ["h"], ["neg", "pos"], name="act", domain=EXTENSIONS),
        helper.make_node("Add", ["neg", "neg"], ["twice"], name="add"),
        helper.make_node("Sub", ["pos", "twice"], ["s"], name="sub"),
        helper.make_node("MatMul", ["s", "down"], ["y"], name="fc2"),
    ]
    weights = {
        "up": random.standard_normal((16, 24), np.float32),
        "down": random.standard_normal((24, 8), np.float32),
    }
    return save(nodes, weights, path, ["batch", "seq", 16])


def register(text: Callable[[int], str], op: str = "NegPos", **how: object) -> None:
    @rule(op, domain=EXTENSIONS, **how)  # type: ignore[arg-type]
    def found(node: gs.Node) -> Rule:
        return einsum(node, text(len(node.inputs[0].shape)))


def elementwise(rank: int) -> str:
    dims = " ".join(f"d{i}" for i in range(rank))
    return f"{dims} -> {dims}; {dims}"


@pytest.mark.parametrize("preset", ["tensor-parallel", "data-parallel"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_custom_op_is_split_by_its_rule(
    preset: str, ranks: int, extensions: str, tmp_path: Path
) -> None:
    register(elementwise)
    model, par = signed_mlp(tmp_path / "m.onnx"), tmp_path / "m.par"
    plan = onnxpar.shard(model, par, devices=ranks, preset=preset, libraries=[extensions])
    assert "act" not in {whole.node for whole in plan.whole}, plan
    options = ort.SessionOptions()
    options.register_custom_ops_library(extensions)
    whole = ort.InferenceSession(str(model), options)
    random = np.random.default_rng(1)
    with onnxpar.InferenceSession(par) as session:
        for batch, seq in ((1, 1), (2, 3), (1, 40), (7, 5), (31, 2), (0, 3)):
            feeds = {"x": random.standard_normal((batch, seq, 16), np.float32)}
            expected, got = whole.run(None, feeds)[0], session.run(None, feeds)[0]
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_a_session_takes_libraries_that_the_process_does_not_use(
    extensions: str, tmp_path: Path
) -> None:
    model, par = signed_mlp(tmp_path / "m.onnx"), tmp_path / "m.par"
    onnxpar.shard(model, par, devices=2)
    with pytest.raises(RankError, match=r"NegPos.*--library FILE"):
        onnxpar.InferenceSession(par)
    feeds = {"x": np.ones((1, 2, 16), np.float32)}
    with onnxpar.InferenceSession(par, libraries=[extensions]) as session:
        assert session.run(None, feeds)[0].shape == (1, 2, 8)
    assert not libraries()


def test_commands_that_run_a_model_take_libraries(
    extensions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, par = signed_mlp(tmp_path / "m.onnx"), tmp_path / "m.par"
    register(elementwise)
    assert main(["check", str(model), "--devices", "2"]) == 2
    told = capsys.readouterr().err
    assert "does not load the unsplit model" in told and "--library FILE" in told
    asked = ["--library", extensions]
    assert main(["shard", str(model), "--devices", "2", "-o", str(par), *asked]) == 0
    assert main(["run", str(par), "--random", *asked]) == 0
    assert main(["check", str(model), "--devices", "2", "--preset", "tensor-parallel", *asked]) == 0
    assert "all outputs agree" in capsys.readouterr().out


@pytest.mark.parametrize("file", ["missing.so", "m.onnx"])
def test_a_file_that_is_no_library_is_an_error(file: str, tmp_path: Path) -> None:
    model = signed_mlp(tmp_path / "m.onnx")
    with pytest.raises(InputError, match=f"--library .*{file}: onnxruntime does not load it"):
        onnxpar.plan(model, devices=2, libraries=[str(tmp_path / file)])
    assert not libraries()


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("b c -> (c b)", ["5*batch"]),
        ("b c -> c b", [5, "batch"]),
        ("b c -> b + c", ["batch + 5"]),
        ("b c -> 1 b", [1, "batch"]),
        ("b c -> ()", []),
    ],
)
def test_the_text_of_a_rule_gives_shapes_at_open_sizes(
    text: str, shape: list[object], tmp_path: Path
) -> None:
    register(lambda _: text, "Bend")
    nodes = [helper.make_node("Bend", ["x"], ["y"], domain=EXTENSIONS)]
    plan = onnxpar.plan(save(nodes, {}, tmp_path / "m.onnx", ["batch", 5]), devices=2)
    assert plan.to_json()["outputs"][0]["shape"] == shape


def test_a_function_gives_the_shapes_that_a_rule_cannot(tmp_path: Path) -> None:
    def halves(node: gs.Node) -> list[list[int]]:
        rows, columns = node.inputs[0].shape
        return [[rows, columns // 2]]

    register(lambda _: "b c -> b d", "Halve", shapes=halves)
    nodes = [helper.make_node("Halve", ["x"], ["y"], domain=EXTENSIONS)]
    plan = onnxpar.plan(save(nodes, {}, tmp_path / "m.onnx", ["batch", 10]), devices=2)
    assert plan.to_json()["outputs"][0]["shape"] == ["batch", 5]


def test_a_function_for_shapes_that_fails_is_an_error_of_the_plugin(tmp_path: Path) -> None:
    register(lambda _: "b c -> b d", "Halve", shapes=lambda node: [[1], [1]])
    nodes = [helper.make_node("Halve", ["x"], ["y"], domain=EXTENSIONS)]
    model = save(nodes, {}, tmp_path / "m.onnx", ["batch", 10])
    with pytest.raises(StrategyError, match="2 shapes for 1 result"):
        onnxpar.plan(model, devices=2)


def test_a_rule_whose_results_have_sizes_of_their_own_asks_for_shapes(tmp_path: Path) -> None:
    register(lambda _: "b c -> b d", "Halve")
    nodes = [helper.make_node("Halve", ["x"], ["y"], name="half", domain=EXTENSIONS)]
    model = save(nodes, {}, tmp_path / "m.onnx", ["batch", 10])
    with pytest.raises(StrategyError, match=r"Halve 'half'.*size of d.*shapes="):
        onnxpar.plan(model, devices=2)
