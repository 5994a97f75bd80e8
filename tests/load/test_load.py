"""Whatever onnxruntime loads is loaded, and nothing that it would have used is dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper
from tiny_models import (
    BOOL,
    FLOAT,
    INT,
    RANDOM,
    STRING,
    TP,
    W,
    X,
    agree,
    model,
    port,
    product,
    write,
)

import onnxpar
from onnxpar.base.errors import InputError, ModelError
from onnxpar.runtime.session.threads import ThreadSession

# opsets 7 to 9


def old(op: str, inputs: str = "h", outputs: str = "y", **attrs: Any) -> NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), **attrs)


OLD: dict[str, tuple[int, NodeProto, tuple[int, ...], int]] = {
    "slice": (9, old("Slice", starts=[1, 0], ends=[4, 2]), (3, 2), 1),
    "one axis": (7, old("Slice", starts=[1], ends=[9], axes=[1]), (6, 3), 1),
    "top": (9, old("TopK", outputs="y at", k=2, axis=1), (6, 2), 2),
    "dropout": (7, old("Dropout", outputs="y mask", ratio=0.5), (6, 4), 1),
    "flatten": (8, old("Flatten", axis=1), (6, 4), 1),
    "sum": (7, old("Sum", "h x"), (6, 4), 1),
}
"""Opset, node, and the shape and number of its outputs."""


@pytest.mark.parametrize("case", OLD)
@pytest.mark.parametrize("ir", [3, 8])
def test_old_opsets(tmp_path: Path, case: str, ir: int) -> None:
    opset, node, shape, count = OLD[case]
    outputs = [port("y", shape), port("at", shape, INT)][:count]
    nodes = [helper.make_node("Relu", ["x"], ["h"]), node]
    agree(model(nodes, [port("x", [6, 4])], outputs, opset=opset, ir=ir), tmp_path, {"x": X})


@pytest.mark.parametrize("with_inputs", [True, False])
def test_opset_6(tmp_path: Path, with_inputs: bool) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "mm"),
        helper.make_node("Clip", ["h"], ["c"], "clip", min=-1.0, max=1.5),
        helper.make_node("Slice", ["c"], ["y"], "slice", starts=[1], ends=[5]),
    ]
    proto = model(nodes, [port("x", [6, 4])], [port("y", [4, 6])], {"w": W}, 6, 3)
    if with_inputs:
        proto.graph.input.append(port("w", W.shape))
    agree(proto, tmp_path, {"x": X}, strategy=TP)


@pytest.mark.parametrize("opset", [7, 9])
def test_old_upsample(tmp_path: Path, opset: int) -> None:
    image = RANDOM.standard_normal((2, 3, 4, 4)).astype(np.float32)
    scales = np.array([1, 1, 2, 2], np.float32)
    given = {"scales": scales.tolist()} if opset < 9 else {}
    names = ["x"] if opset < 9 else ["x", "s"]
    node = helper.make_node("Upsample", names, ["y"], mode="nearest", **given)
    proto = model(
        [node], [port("x", [2, 3, 4, 4])], [port("y", [2, 3, 8, 8])], {"s": scales}, opset, 8
    )
    agree(proto, tmp_path, {"x": image})


def test_old_opsets_with_weights_elsewhere(tmp_path: Path) -> None:
    proto = product(opset=8, ir=4)
    onnx.save(
        proto,
        tmp_path / "saved.onnx",
        save_as_external_data=True,
        location="w.bin",
        size_threshold=0,
    )
    proto = onnx.load(tmp_path / "saved.onnx", load_external_data=False)
    assert proto.graph.initializer[0].data_location == TensorProto.EXTERNAL
    agree(proto, tmp_path, {"x": X}, strategy=TP)


def test_old_subgraphs(tmp_path: Path) -> None:
    node = helper.make_node("Slice", ["x"], ["z"], starts=[1], ends=[3])
    branch = helper.make_graph([node], "b", [], [port("z", [2, 4])])
    other = helper.make_graph(
        [helper.make_node("Slice", ["x"], ["z"], starts=[0], ends=[2])],
        "c",
        [],
        [port("z", [2, 4])],
    )
    nodes = [helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=other)]
    proto = model(nodes, [port("x", [6, 4]), port("c", [], BOOL)], [port("y", [2, 4])], opset=9)
    agree(proto, tmp_path, {"x": X, "c": np.array(True)}, 2, {"x": X, "c": np.array(False)})


def test_a_model_of_another_domain_alone(tmp_path: Path) -> None:
    node = helper.make_node(
        "Scaler", ["x"], ["y"], domain="ai.onnx.ml", offset=[0.5] * 4, scale=[2.0] * 4
    )
    proto = model([node], [port("x", [6, 4])], [port("y", [6, 4])], domains=["ai.onnx.ml"])
    del proto.opset_import[0]
    agree(proto, tmp_path, {"x": X})


def test_what_cannot_be_converted_is_named(tmp_path: Path) -> None:
    body = helper.make_graph(
        [helper.make_node("Add", ["a", "b"], ["c"]), helper.make_node("Identity", ["c"], ["d"])],
        "body",
        [port("a", [4]), port("b", [4])],
        [port("c", [4]), port("d", [4])],
    )
    node = helper.make_node(
        "Scan", ["lengths", "s", "x"], ["t", "y"], "scan", num_scan_inputs=1, body=body
    )
    lengths = helper.make_tensor_value_info("lengths", TensorProto.INT64, [1])
    ports = [lengths, port("s", [1, 4]), port("x", [1, 6, 4])]
    proto = model([node], ports, [port("t", [1, 4]), port("y", [1, 6, 4])], opset=8)
    refusal = (
        "Scan 'scan' of opset 8 has no equivalent in opset 18: it scans sequences of different"
    )
    with pytest.raises(ModelError, match=refusal):
        onnxpar.plan(write(proto, tmp_path), devices=2)


# initializers


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("preset", ["tensor-parallel", "data-parallel"])
def test_an_initializer_that_is_an_input_may_be_fed(
    tmp_path: Path, ranks: int, preset: str
) -> None:
    proto = product()
    proto.graph.input.append(port("w", [4, 6]))
    proto.graph.input.append(port("unused", [2]))
    proto.graph.initializer.append(numpy_helper.from_array(np.ones(2, np.float32), "unused"))
    other = {"x": X, "w": W * 2, "unused": np.zeros(2, np.float32)}
    plan = agree(proto, tmp_path, {"x": X}, ranks, other, {"x": X}, preset=preset)
    with ThreadSession(tmp_path / "m.par") as session:
        whole = ort.InferenceSession(str(tmp_path / "m.onnx"))
        assert [a.name for a in session.get_inputs()] == ["x"]
        names = [a.name for a in session.get_overridable_initializers()]
        assert names == [a.name for a in whole.get_overridable_initializers()] == ["w", "unused"]
    layout = next(p.layout for p in plan.inputs if p.name == "w")
    assert layout is not None and layout.is_whole == (preset == "data-parallel")


def test_before_ir_4_initializers_are_constants(tmp_path: Path) -> None:
    proto = product(opset=9, ir=3)
    proto.graph.input.append(port("w", [4, 6]))
    agree(proto, tmp_path, {"x": X}, strategy=TP)
    with ThreadSession(tmp_path / "m.par") as session, pytest.raises(InputError, match="no input"):
        session.run(None, {"x": X, "w": W})


def test_what_decided_shapes_cannot_be_fed(tmp_path: Path) -> None:
    proto = model(
        [helper.make_node("Reshape", ["x", "s"], ["y"])],
        [port("x", [6, 4]), port("s", [2], INT)],
        [port("y", ["a", "b"])],
        {"s": np.array([6, -1])},
    )
    agree(proto, tmp_path, {"x": X})
    with ThreadSession(tmp_path / "m.par") as session, pytest.raises(InputError, match="fixed"):
        session.run(None, {"x": X, "s": np.array([3, 8])})


def test_outputs_that_are_stored_or_fed(tmp_path: Path) -> None:
    proto = product()
    proto.graph.output.extend([port("w", [4, 6]), port("x", [6, 4]), port("k", [2], INT)])
    constant = numpy_helper.from_array(np.array([7, 8]), "k")
    proto.graph.node.append(helper.make_node("Constant", [], ["k"], value=constant))
    agree(proto, tmp_path, {"x": X}, strategy=TP)


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("where", ["initializer", "constant"])
def test_sparse(tmp_path: Path, linear: bool, where: str) -> None:
    at = np.array([1, 7, 20]) if linear else np.array([[0, 1], [1, 1], [3, 2]])
    sparse = onnx.SparseTensorProto(
        values=numpy_helper.from_array(np.array([5, -2, 3], np.float32), "w"),
        indices=numpy_helper.from_array(at, "at"),
        dims=[4, 6],
    )
    proto = product()
    del proto.graph.initializer[:]
    if where == "initializer":
        proto.graph.sparse_initializer.append(sparse)
    else:
        proto.graph.node.insert(0, helper.make_node("Constant", [], ["w"], sparse_value=sparse))
    agree(proto, tmp_path, {"x": X}, strategy=TP)


@pytest.mark.parametrize(
    "value",
    [
        {"value_strings": ["a", "b"]},
        {"value_string": "a"},
        {"value_ints": [1, 2]},
        {"value_float": 0.5},
        {"value": numpy_helper.from_array(np.array(["a"], object))},
    ],
)
def test_constants_of_every_kind(tmp_path: Path, value: dict[str, Any]) -> None:
    proto = product()
    proto.graph.node.append(helper.make_node("Constant", [], ["k"], "k", **value))
    kind = STRING if "a" in str(value) and "float" not in str(value) else FLOAT
    kind = INT if "value_ints" in value else kind
    proto.graph.output.append(helper.make_empty_tensor_value_info("k"))
    proto.graph.output[1].type.tensor_type.elem_type = kind
    agree(proto, tmp_path, {"x": X}, strategy=TP)


def test_a_constant_elsewhere_is_a_weight(tmp_path: Path) -> None:
    proto = product()
    node = helper.make_node("Constant", [], ["w"], value=external("stored", W, tmp_path))
    del proto.graph.initializer[:]
    proto.graph.node.insert(0, node)
    plan = agree(proto, tmp_path, {"x": X}, 3, strategy=TP)
    assert [w.layout_text for w in plan.weights] == ["[-, tp]"]


def test_an_input_that_nobody_reads_is_kept(tmp_path: Path) -> None:
    proto = product()
    proto.graph.input.append(port("idle", [3, 2]))
    proto.graph.initializer.append(numpy_helper.from_array(W, "idle too"))
    agree(proto, tmp_path, {"x": X, "idle": X[:3, :2]})
    with ThreadSession(tmp_path / "m.par") as session:
        assert [i.name for i in session.get_inputs()] == ["x", "idle"]


def external(name: str, array: np.ndarray, folder: Path) -> TensorProto:
    array.tofile(folder / f"{name}.bin")
    dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
    tensor = TensorProto(name=name, data_type=dtype, dims=array.shape, data_location=1)
    tensor.external_data.add(key="location", value=f"{name}.bin")
    return tensor


def test_indices_elsewhere_are_read_there(tmp_path: Path) -> None:
    """By rules that go by their values, wherever one works."""
    proto = product()
    proto.graph.node[-1].output[0] = "z"
    proto.graph.node.append(helper.make_node("GatherND", ["z", "k"], ["y"], "rows"))
    proto.graph.initializer.append(external("k", np.arange(6).reshape(6, 1), tmp_path))
    plan = agree(proto, tmp_path, {"x": X}, strategy=TP)
    assert not plan.whole


@pytest.mark.parametrize("inner", ["initializer", "constant", "captured", "shared"])
def test_data_elsewhere_in_subgraphs(tmp_path: Path, inner: str) -> None:
    stored = external("k", RANDOM.standard_normal((6, 300)).astype(np.float32), tmp_path)
    nodes = [helper.make_node("MatMul", ["h", "k"], ["z"])]
    if inner == "constant":
        nodes.insert(0, helper.make_node("Constant", [], ["k"], value=stored))
    weights = [stored] if inner == "initializer" else []
    then = helper.make_graph(nodes, "then", [], [port("z", [6, 300])], weights)
    proto = product()
    proto.graph.node[1].CopyFrom(
        helper.make_node("If", ["c"], ["y"], "if", then_branch=then, else_branch=then)
    )
    proto.graph.input.append(port("c", [], BOOL))
    proto.graph.output[0].CopyFrom(port("y", [6, 300]))
    if inner in ("captured", "shared"):
        proto.graph.initializer.append(stored)
    strategy = TP
    if inner == "shared":
        proto.graph.node.append(helper.make_node("MatMul", ["h", "k"], ["t"], "mm2"))
        proto.graph.output.append(port("t", [6, 300]))
        strategy = {"shard": {**TP["shard"], "mm2": [[None, None], [None, "tp"]]}}
    agree(proto, tmp_path, {"x": X, "c": np.array(True)}, strategy=strategy)
    for file in (tmp_path / "m.par").glob("*.onnx"):
        assert file.stat().st_size < 6 * 300 * 4
        branches = [a.g for n in onnx.load(file).graph.node for a in n.attribute if a.HasField("g")]
        assert len(branches) == 2
        inside = [len(b.initializer) for b in branches]
        assert inside == [0, 0] or (inner == "initializer" and inside == [1, 1])


def test_data_outside_the_folder_is_refused_in_subgraphs_too(tmp_path: Path) -> None:
    secret = TensorProto(name="k", data_type=FLOAT, dims=[6], data_location=1)
    secret.external_data.add(key="location", value="../secret")
    branch = helper.make_graph(
        [helper.make_node("Add", ["x", "k"], ["z"])], "b", [], [port("z", [6])], [secret]
    )
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    proto = model([node], [port("x", [6]), port("c", [], BOOL)], [port("y", [6])])
    with pytest.raises(ModelError, match="outside the model's folder"):
        onnxpar.plan(write(proto, tmp_path), devices=2)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("loop", "cannot be read: .*loop|too many"),
        ("data/", "not a valid file name"),
        ("data/.", "not a valid file name|cannot be read"),
        ("..", "not a valid file name"),
        ("", "not a valid file name"),
        ("x" * 999, "cannot be read: File name too long"),
    ],
)
def test_places_of_data_that_are_no_files(place: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "data").write_bytes(bytes(24))
    weight = TensorProto(name="k", data_type=FLOAT, dims=[6], data_location=1)
    weight.external_data.add(key="location", value=place)
    proto = model([helper.make_node("Add", ["x", "k"], ["y"])], [port("x", [6])], [port("y", [6])])
    proto.graph.initializer.append(weight)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match=message):
        onnxpar.plan(tmp_path / "m.onnx", devices=2)


def test_parts_of_an_input_in_another_order_are_no_state(tmp_path: Path) -> None:
    rolled = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        rolled (float[N, 4] x) => (float[N, 4] y) {
            zero = Constant <value_ints = [0]> () three = Constant <value_ints = [3]> ()
            big = Constant <value_ints = [1000000]> ()
            a = Slice (x, three, big) b = Slice (x, zero, three) y = Concat <axis = 0> (a, b)
        }""")
    assert onnxpar.plan(rolled, devices=2).states == []
