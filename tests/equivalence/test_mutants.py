"""Faults put into written files are refused; changes that alter no result are accepted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import onnx
import pytest
from agreement import options
from onnx import NodeProto, numpy_helper

import onnxpar
from onnxpar.equivalence.draws import Draws
from onnxpar.equivalence.program import read_program
from onnxpar.equivalence.stored import WeightFiles
from onnxpar.planner import sharder

MODELS = Path(__file__).parents[2] / "models"
LLAMA = MODELS / "llama.dynamo.static.onnx"
Change = Callable[[onnx.GraphProto], None]


@cache
def bundle(layout: str) -> Path:
    """The ranks of a Llama."""
    folder = Path(mkdtemp()) / "model.par"
    sharder.shard(LLAMA, folder, options(layout))
    return folder


def changed(layout: str, folder: Path, change: Change, ranks: list[int]) -> Path:
    """A copy of a bundle in which the files of some ranks are changed."""
    par = folder / "model.par"
    shutil.copytree(bundle(layout), par)
    for rank in ranks:
        path = par / f"rank_{rank:04d}.onnx"
        model = onnx.load(path)
        change(model.graph)
        onnx.save(model, path)
    return par


def node(graph: onnx.GraphProto, end: str) -> NodeProto:
    return next(n for n in graph.node if n.name.endswith(end))


def edit(end: str, by: Callable[[np.ndarray], None]) -> Change:
    """Changes a constant whose name has this end."""

    def change(graph: onnx.GraphProto) -> None:
        tensor = next(t for t in graph.initializer if t.name.endswith(end))
        value = numpy_helper.to_array(tensor).copy()
        by(value)
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))

    return change


def add(index: int, amount: float) -> Callable[[np.ndarray], None]:
    def by(value: np.ndarray) -> None:
        value.reshape(-1)[index] += np.asarray(amount, value.dtype)

    return by


def reverse(value: np.ndarray) -> None:
    value[:] = value[::-1].copy()


def attribute(end: str, name: str, value: object) -> Change:
    """Gives a node another attribute."""

    def change(graph: onnx.GraphProto) -> None:
        own = node(graph, end)
        kept = [a for a in own.attribute if a.name != name]
        del own.attribute[:]
        own.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])

    return change


def read(end: str, index: int, name: str) -> Change:
    """Makes a node read another tensor."""

    def change(graph: onnx.GraphProto) -> None:
        node(graph, end).input[index] = next(
            out for n in graph.node for out in n.output if out.endswith(name)
        )

    return change


def swap(end: str) -> Change:
    def change(graph: onnx.GraphProto) -> None:
        own = node(graph, end)
        own.input[0], own.input[1] = own.input[1], own.input[0]

    return change


def drop(end: str) -> Change:
    """Lets all nodes read the operand of a collective in the place of its result."""

    def change(graph: onnx.GraphProto) -> None:
        gone = node(graph, end)
        for own in graph.node:
            for i, name in enumerate(own.input):
                if name == gone.output[0]:
                    own.input[i] = gone.input[0]

    return change


ATTENTION = "layers.0/self_attn"
SUM = "o_proj/MatMul_output_0@1"
FAULTS: dict[str, tuple[Change, list[int]]] = {
    "an element of a weight": (edit("layers.0.mlp.up_proj.weight", add(77, 1e-3)), [1]),
    "an element of a norm's weight": (edit("0.post_attention_layernorm.weight", add(5, 1)), [0]),
    "an element of a table": (edit("embed_tokens.weight", add(4000, 1e-3)), [0]),
    "columns of a weight in another order": (edit("k_proj.weight", reverse), [0, 1]),
    "a scale": (edit("val_36", add(0, 1)), [0, 1]),
    "an epsilon on one rank": (edit("val_39", add(0, 1e-6)), [1]),
    "the start of a table": (edit("Gather::constant2", add(0, 1)), [1]),
    "the axis of a Softmax": (attribute(f"{ATTENTION}/Softmax", "axis", -2), [0, 1]),
    "a perm": (attribute(f"{ATTENTION}/Transpose", "perm", [0, 2, 3, 1]), [0, 1]),
    "the op of an all-reduce": (attribute(SUM, "op", "max"), [0, 1]),
    "a group": (attribute(SUM, "group", [0]), [0]),
    "groups in other orders": (attribute(SUM, "group", [1, 0]), [0]),
    "a tag that two collectives have": (attribute(SUM, "tag", 1), [0, 1]),
    "a stream on one rank": (attribute(SUM, "stream", 1), [0]),
    "an all-reduce that is left out": (drop(SUM), [0, 1]),
    "an all-reduce of whole values": (read(SUM, 0, "0/input_layernorm/Mul_1_output_0"), [0, 1]),
    "operands of a Sub": (swap("Gather::Sub8"), [0, 1]),
    "another tensor of the same shape": (
        read("0/self_attn/k_proj/MatMul", 0, "embed_tokens/Gather_output_0@1"), [0, 1],
    ),
    "keys in the place of values": (
        read("0/self_attn/MatMul_1", 1, "self_attn/Expand_output_0"), [0, 1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_refused(name: str, tmp_path: Path) -> None:
    change, ranks = FAULTS[name]
    par = changed("tensor-parallel 2", tmp_path, change, ranks)
    result = onnxpar.verify(LLAMA, par)
    assert not result.ok
    assert "not proved" in result.text()


SAME: dict[str, Change] = {
    "a group in another order on all ranks": attribute(SUM, "group", [1, 0]),
    "operands of an Add": swap("layers.0/Add"),
    "a row that is masked": edit("Gather::constant1", add(0, 1)),
}


@pytest.mark.parametrize("name", SAME)
def test_changes_that_alter_nothing_are_accepted(name: str, tmp_path: Path) -> None:
    par = changed("tensor-parallel 2", tmp_path, SAME[name], [0, 1])
    result = onnxpar.verify(LLAMA, par)
    assert result.ok, result.text()


def plan_changes() -> Iterator[tuple[str, Callable[[dict], None]]]:
    def other_axis(plan: dict) -> None:
        plan["outputs"][0]["layout"]["dims"][0]["axes"] = [["tp", 2, 1]]

    def whole_input(plan: dict) -> None:
        plan["inputs"][0]["layout"]["dims"][0].pop("axes")

    yield "an output in another layout", other_axis
    yield "an input in another layout", whole_input


@pytest.mark.parametrize(("name", "change"), plan_changes())
def test_a_wrong_plan_is_refused(name: str, change: Callable[[dict], None], tmp_path: Path) -> None:
    par = changed("hybrid dp=2,tp=2", tmp_path, lambda _: None, [])
    plan = json.loads((par / "plan.json").read_text())
    change(plan)
    (par / "plan.json").write_text(json.dumps(plan))
    assert not onnxpar.verify(LLAMA, par).ok


def test_a_refusal_names_tensor_rule_and_readers(tmp_path: Path) -> None:
    change, ranks = FAULTS["columns of a weight in another order"]
    par = changed("tensor-parallel 2", tmp_path, change, ranks)
    text = onnxpar.verify(LLAMA, par).text()
    assert "no node of ranks is shown to compute MatMul 'node_linear_1'" in text
    assert "no node of ranks is shown to compute MatMul 'node_linear_1'" in text
    assert "readers node_view_1" in text


def test_no_window_hides_a_wrong_weight(tmp_path: Path) -> None:
    """The channel's input is zero behind a Relu on most inputs, but not on all."""
    model = MODELS / "resnet.dynamo.static.onnx"
    sharder.shard(model, tmp_path / "model.par", options("tensor-parallel 2"))
    path = tmp_path / "model.par" / "rank_0001.onnx"
    proto = onnx.load(path)
    edit("stages.1.layers.1.layer.0.convolution.weight", add(185, 1))(proto.graph)
    onnx.save(proto, path)
    assert not onnxpar.verify(model, tmp_path / "model.par").ok


def test_places_of_what_is_not_zero_are_drawn_with_zeros(tmp_path: Path) -> None:
    """Values without a zero would agree with ranks that take every element."""
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[64] x) => (int64[1,n] y)
    { y = NonZero(x) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "g.onnx")
    model = read_program(tmp_path / "g.onnx", WeightFiles())
    draws = Draws(model, model.nodes, (), 0, {})
    counts = [int((draws.value("x", (64,), 1, number) == 0).sum()) for number in range(4)]
    assert all(0 < count < 64 for count in counts) and len({*counts}) > 1


def test_labels_that_a_loss_ignores_are_drawn(tmp_path: Path) -> None:
    """Without one, a sum of losses that is divided by their number, or by that of all, agrees."""
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[16,5] x, int64[16] t) => (float y)
    { y = SoftmaxCrossEntropyLoss<ignore_index = -100>(x, t) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "g.onnx")
    model = read_program(tmp_path / "g.onnx", WeightFiles())
    draws = Draws(model, model.nodes, (), 0, {"t": (0, 5)})
    counts = [int((draws.value("t", (16,), 7, number) == -100).sum()) for number in range(4)]
    assert counts[::2] == [0, 0] and all(0 < count < 16 for count in counts[1::2])
