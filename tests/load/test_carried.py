"""What a model carries beside its numbers: functions, docs, metadata, odd attributes and types."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from tiny_models import BOOL, FLOAT, INT, TP, W, X, agree, model, port, product, write

import onnxpar
from onnxpar.base.errors import ModelError, PassError, StrategyError
from onnxpar.graph.interchange import export_graph, import_graph
from onnxpar.load.load import load
from onnxpar.report.compare import compare
from onnxpar.runtime.session.threads import ThreadSession


def described() -> onnx.ModelProto:
    """A model with docs and metadata wherever they may stand."""
    proto = product()
    proto.doc_string, proto.domain, proto.model_version = "what it is", "org.example", 7
    proto.producer_name, proto.producer_version = "exporter", "1.2"
    graph = proto.graph
    graph.name, graph.doc_string = "net", "the net"
    for i, holder in enumerate(
        [proto, graph, *graph.node, graph.input[0], graph.output[0], graph.initializer[0]]
    ):
        holder.metadata_props.add(key="key", value=f"value {i}")
    for holder in [*graph.node, graph.input[0], graph.output[0], graph.initializer[0]]:
        holder.doc_string = f"about {holder.name}"
    graph.input[0].type.denotation = "IMAGE"
    graph.input[0].type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
    graph.quantization_annotation.add(tensor_name="x").quant_parameter_tensor_names.add(
        key="SCALE_TENSOR", value="w"
    )
    return proto


@pytest.mark.parametrize("ranks", [2, 3])
def test_docs_and_metadata_survive(tmp_path: Path, ranks: int) -> None:
    proto = described()
    agree(proto, tmp_path, {"x": X}, ranks, strategy=TP)
    for rank in range(ranks):
        made = onnx.load(tmp_path / "m.par" / f"rank_{rank:04d}.onnx", load_external_data=False)
        fields = "doc_string domain model_version producer_name producer_version metadata_props"
        for field in fields.split():
            assert getattr(made, field) == getattr(proto, field), field
        a, b = proto.graph, made.graph
        assert (a.name, a.doc_string) == (b.name, b.doc_string)
        assert a.quantization_annotation == b.quantization_annotation
        nodes = {node.name: node for node in b.node}
        weights = {tensor.name: tensor for tensor in b.initializer}
        pairs = [(a, b), (a.input[0], b.input[0]), (a.output[0], b.output[0])]
        pairs += [(n, nodes[n.name]) for n in a.node]
        pairs += [(a.initializer[0], weights["w"])]
        for old, new in pairs:
            assert old.doc_string == new.doc_string
            kept = [entry for entry in new.metadata_props if entry.key != "onnxpar.layout"]
            assert list(old.metadata_props) == kept
        assert b.input[0].type.denotation == "IMAGE"
        assert b.input[0].type.tensor_type.shape.dim[0].denotation == "DATA_BATCH"


ODD = {
    "empty_ints": helper.make_attribute("empty_ints", [], attr_type=AttributeProto.INTS),
    "empty_floats": helper.make_attribute("empty_floats", [], attr_type=AttributeProto.FLOATS),
    "empty_strings": helper.make_attribute("empty_strings", [], attr_type=AttributeProto.STRINGS),
    "bytes": helper.make_attribute("bytes", b"\xff\xfe"),
    "many_bytes": helper.make_attribute("many_bytes", [b"ok", b"\xff"]),
    "tensors": helper.make_attribute(
        "tensors", [numpy_helper.from_array(np.arange(i), f"t{i}") for i in range(2)]
    ),
    "type": helper.make_attribute("type", helper.make_tensor_type_proto(FLOAT, [2])),
    "types": helper.make_attribute("types", [helper.make_tensor_type_proto(INT, None)]),
    "sparse": helper.make_attribute(
        "sparse",
        onnx.SparseTensorProto(
            values=numpy_helper.from_array(np.ones(1, np.float32), "v"),
            indices=numpy_helper.from_array(np.zeros(1, np.int64), "i"),
            dims=[3],
        ),
    ),
    "text": helper.make_attribute("text", "text"),
    "one": helper.make_attribute("one", 1.0),
    "floats": helper.make_attribute("floats", [1.0, 2.0]),
}


@pytest.mark.parametrize("nested", [False, True])
def test_attributes_survive(nested: bool) -> None:
    node = helper.make_node("Strange", ["x"], ["z"], "odd", domain="org.example")
    node.attribute.extend(ODD.values())
    inputs = [port("x", [2]), port("c", [], BOOL)]
    nodes = [node, helper.make_node("Relu", ["z"], ["y"], "relu")]
    if nested:
        branch = helper.make_graph([node], "branch", [], [port("z", [2])])
        nodes = [helper.make_node("If", ["c"], ["y"], "if", then_branch=branch, else_branch=branch)]
    proto = model(nodes, inputs, [port("y", [2])], domains=["org.example"])
    wanted = onnx.ModelProto()
    wanted.CopyFrom(proto)
    made = export_graph(import_graph(proto, {}, Path()), wanted)
    pairs = zip(_all_nodes(wanted.graph), _all_nodes(made.graph), strict=True)
    for old, new in pairs:
        a, b = ({x.name: x for x in n.attribute if x.name not in _GRAPHS} for n in (old, new))
        assert a == b, old.name
    assert [(o.domain, o.version) for o in made.opset_import] == [("", 18), ("org.example", 1)]


_GRAPHS = ("then_branch", "else_branch")


def _all_nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    inner = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    return [*graph.node, *(node for g in inner for node in _all_nodes(g))]


def test_a_list_of_graphs_is_refused(tmp_path: Path) -> None:
    proto = product(domains=["org.example"])
    graph = helper.make_graph([], "empty", [], [])
    node = helper.make_node("Strange", ["y"], ["z"], "odd", domain="org.example")
    node.attribute.append(helper.make_attribute("graphs", [graph, graph]))
    proto.graph.node.append(node)
    with pytest.raises(ModelError, match=r"Strange 'odd'.*list of graphs"):
        load(write(proto, tmp_path))


# functions


def function(name: str, body: str, opset: int = 18, overload: str = "") -> onnx.FunctionProto:
    made = onnx.parser.parse_function(
        f'<domain: "org.example", opset_import: ["" : {opset}, "org.example" : 1]> {name} {body}'
    )
    made.overload = overload
    return made


def test_functions_with_attributes_nested_and_overloaded(tmp_path: Path) -> None:
    proto = product(domains=["org.example"], ir=10)
    proto.functions.append(
        function("Leak", "<alpha> (a) => (b) { b = LeakyRelu<alpha: float = @alpha>(a) }")
    )
    twice = "<alpha> (a) => (b) { c = org.example.Leak<alpha: float = @alpha>(a) "
    twice += "b = org.example.Leak<alpha: float = @alpha>(c) }"
    proto.functions.append(function("Twice", twice))
    proto.functions.append(function("Pick", "(a) => (b) { b = Neg(a) }", overload="minus"))
    proto.functions.append(function("Pick", "(a) => (b) { b = Abs(a) }", overload="plain"))
    del proto.graph.node[1]
    leak = helper.make_node("Twice", ["h"], ["l"], domain="org.example", alpha=0.3)
    picks = [
        helper.make_node("Pick", ["l"], ["p"], domain="org.example", overload="minus"),
        helper.make_node("Pick", ["p"], ["y"], domain="org.example", overload="plain"),
    ]
    proto.graph.node.extend([leak, *picks])
    agree(proto, tmp_path, {"x": X}, strategy=TP)


def test_a_function_of_another_opset(tmp_path: Path) -> None:
    proto = product(domains=["org.example"], opset=18)
    proto.functions.append(function("Positive", "(a) => (b) { b = Relu(a) }", opset=11))
    proto.graph.node[1].CopyFrom(helper.make_node("Positive", ["h"], ["y"], domain="org.example"))
    agree(proto, tmp_path, {"x": X}, strategy=TP)


# versions, names, shapes


@pytest.mark.parametrize("ir", range(3, 14))
def test_ir_versions(tmp_path: Path, ir: int) -> None:
    proto = product(ir=ir, opset=9 if ir < 5 else 17)
    if ir == 3:
        proto.graph.input.append(port("w", [4, 6]))
    agree(proto, tmp_path, {"x": X}, strategy=TP)


def test_a_graph_without_name(tmp_path: Path) -> None:
    proto = product()
    proto.graph.name = ""
    agree(proto, tmp_path, {"x": X})


def test_a_model_without_input(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["w"], ["y"])]
    agree(model(nodes, [], [port("y", [4, 6])], {"w": W}), tmp_path, {}, preset="tensor-parallel")


@pytest.mark.parametrize("known", ["no rank", "another input"])
def test_inputs_without_shape(tmp_path: Path, known: str) -> None:
    nodes = [helper.make_node("Add", ["x", "z"], ["a"]), helper.make_node("Relu", ["a"], ["y"])]
    z = port("z", None if known == "no rank" else [6, 4])
    proto = model(nodes, [z, port("x", None)], [port("y", None)])
    agree(proto, tmp_path, {"x": X, "z": X}, preset="tensor-parallel")


def test_what_ranks_would_draw_differently_is_refused(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("RandomNormalLike", ["x"], ["r"], "draw"),
        helper.make_node("Reshape", ["r", "s"], ["h"]),
        helper.make_node("MatMul", ["h", "w"], ["y"], "mm"),
    ]
    weights = {"w": W, "s": np.array([6, 4])}
    proto = model(nodes, [port("x", None)], [port("y", [6, 6])], weights)
    with pytest.raises(StrategyError, match="RandomNormalLike 'draw' draws 'r'"):
        onnxpar.plan(write(proto, tmp_path), mesh="tp=2", strategy=TP)
    assert onnxpar.plan(tmp_path / "m.onnx", mesh="tp=1", strategy={}).inputs[0].shape is None


def test_no_elements(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Concat", ["x", "z"], ["a"], axis=0),
        helper.make_node("Relu", ["a"], ["y"]),
    ]
    proto = model(nodes, [port("x", [6, 4]), port("z", [0, 4])], [port("y", [6, 4])])
    agree(proto, tmp_path, {"x": X, "z": X[:0]}, 3)


# small elements


def dequantized(dtype: int, scale: np.ndarray, folder: Path, elsewhere: bool) -> onnx.ModelProto:
    """y = x @ dequantized w, of 7 columns, so that rows end inside of bytes."""
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    values = RANDOM.integers(0, 2 if "2" in kind.name else 7, (4, 7)).astype(np.float32)
    stored = numpy_helper.from_array(values.astype(kind), "q")
    if elsewhere:
        (folder / "q.bin").write_bytes(stored.raw_data)
        stored.ClearField("raw_data")
        stored.data_location = TensorProto.EXTERNAL
        stored.external_data.add(key="location", value="q.bin")
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s"], ["w"], "dq", axis=1),
        helper.make_node("MatMul", ["x", "w"], ["h"], "mm"),
        helper.make_node("Relu", ["h"], ["y"]),
    ]
    new = dtype > TensorProto.INT4
    proto = model(
        nodes,
        [port("x", [6, 4])],
        [port("y", [6, 7])],
        {"s": scale},
        25 if new else 21,
        13 if new else 10,
    )
    proto.graph.initializer.append(stored)
    return proto


RANDOM = np.random.default_rng(5)
SMALL = ["INT4", "UINT4", "INT2", "UINT2", "FLOAT8E4M3FN", "FLOAT8E5M2", "FLOAT8E4M3FNUZ"]


@pytest.mark.matrix
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("split", [0, 1])
@pytest.mark.parametrize("name", SMALL)
def test_small_weights_split(tmp_path: Path, name: str, split: int, elsewhere: bool) -> None:
    dtype = TensorProto.DataType.Value(name)
    proto = dequantized(dtype, np.array(0.5, np.float32), tmp_path, elsewhere)
    how = [[None, "tp"], ["tp", None]] if split == 0 else [[None, None], [None, "tp"]]
    path = write(proto, tmp_path)
    plain = ort.SessionOptions()  # onnxruntime's fusions round what is multiplied by such weights
    plain.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    (wanted,) = ort.InferenceSession(str(path), plain).run(None, {"x": X})
    for ranks in (2, 3):
        par = tmp_path / f"{ranks}.par"
        plan = onnxpar.shard(path, par, mesh=f"tp={ranks}", strategy={"shard": {"mm": how}})
        (layout,) = [w.layout_text for w in plan.weights if w.name == "q"]
        assert layout == ("[tp, -]" if split == 0 else "[-, tp]")
        with ThreadSession(par, plain) as session:
            (given,) = session.run(None, {"x": X})
        np.testing.assert_allclose(given, wanted, rtol=1e-5, atol=1e-6)


SPLITS: list[dict[str, list[str | None]]] = [
    {"q": [None, None, "tp"], "p": [None, "tp", None]},
    {"q": [None, "tp", None], "p": ["tp", None, None]},
    {"q": ["tp", None, None], "p": [None, None, None]},
    {"q": [None, None, None], "p": [None, None, "tp"]},
]


@pytest.mark.matrix(8)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("bound", ["Relu(h)", "Clip(h, low, high)"])
@pytest.mark.parametrize("name", SMALL)
def test_small_elements_are_resharded(
    tmp_path: Path, name: str, bound: str, split: dict[str, list[str | None]]
) -> None:
    """From any layout to any other, at sizes that ranks do not divide; and bounds stay, which
    onnxruntime drops before it rounds to such types."""
    random = np.random.default_rng(5)
    proto = onnx.parser.parse_model(f"""<ir_version: 13, opset_import: ["" : 25]>
        net (float[5,7,4] x) => (float[5,7,9] y) <float s = {{0.25}}> {{
            h = MatMul(x, w)  r = {bound}  q = QuantizeLinear(r, s, z)  p = Transpose(q)
            d = DequantizeLinear(p, s, z)  y = Transpose(d) }}""")
    proto.graph.initializer.extend(
        [
            numpy_helper.from_array(random.standard_normal((4, 9)).astype(np.float32), "w"),
            helper.make_tensor("z", TensorProto.DataType.Value(name), [], [0]),
            numpy_helper.from_array(np.float32(-0.3), "low"),
            numpy_helper.from_array(np.float32(0.6), "high"),
        ]
    )
    path, feeds = write(proto, tmp_path), {"x": random.standard_normal((5, 7, 4), np.float32)}
    plain = ort.SessionOptions()
    plain.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    (wanted,) = ort.InferenceSession(str(path), plain).run(None, feeds)
    for ranks in (2, 3):
        par = tmp_path / f"{ranks}.par"
        onnxpar.shard(path, par, mesh=f"tp={ranks}", strategy={"tensors": split})
        with ThreadSession(par) as session:
            np.testing.assert_array_equal(session.run(None, feeds)[0], wanted)
            assert compare(path, session, feeds).ok


def test_bounds_of_others_stay(tmp_path: Path) -> None:
    """An op that only has the name of a bound is not written as Max."""
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21, "own" : 1]>
        net (float[4] x) => (float[4] y) <float s = {0.25}> {
            r = own.Relu(x)  q = QuantizeLinear(r, s, z)  y = DequantizeLinear(q, s, z) }""")
    proto.graph.initializer.append(helper.make_tensor("z", TensorProto.INT4, [], [0]))
    graph = load(write(proto, tmp_path)).graph
    assert graph.nodes[0].op == "Relu"


PASSED = ["BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E5M2", "FLOAT8E4M3FNUZ", "FLOAT8E5M2FNUZ"]


@pytest.mark.parametrize("name", PASSED)
def test_small_elements_are_fed_and_returned(tmp_path: Path, name: str) -> None:
    dtype = TensorProto.DataType.Value(name)
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], to=FLOAT),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Cast", ["r"], ["y"], to=dtype),
    ]
    proto = model(nodes, [port("x", [6, 4], dtype)], [port("y", [6, 4], dtype)], opset=19, ir=9)
    feeds = {"x": X.astype(helper.tensor_dtype_to_np_dtype(dtype))}
    plan = agree(proto, tmp_path, feeds)
    assert plan.outputs[0].layout is not None and not plan.outputs[0].layout.is_whole
    if name == "FLOAT8E5M2":
        _runs_on_processes(tmp_path, feeds)


@pytest.mark.parametrize("name", ["int4", "uint4"])
def test_packed_elements_are_fed_and_returned(tmp_path: Path, name: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, name))
    dtype = helper.np_dtype_to_tensor_dtype(kind)
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], to=FLOAT),
        helper.make_node("Cast", ["h"], ["y"], to=dtype),
    ]
    proto = model(nodes, [port("x", [5, 3], dtype)], [port("y", [5, 3], dtype)], opset=21, ir=10)
    feeds = {"x": RANDOM.integers(0, 8, (5, 3)).astype(kind)}
    agree(proto, tmp_path, feeds)
    if name == "int4":
        _runs_on_processes(tmp_path, feeds)


def _runs_on_processes(folder: Path, feeds: dict[str, np.ndarray]) -> None:
    with onnxpar.InferenceSession(folder / "m.par") as session:
        report = compare(folder / "m.onnx", session, feeds)
    assert report.ok, report.text()


def test_a_rewrite_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: onnx.GraphProto, folder: Path) -> None:
        raise TypeError("no such thing")

    monkeypatch.setattr("onnxpar.load.load.densify", broken)
    ports = [port("x", [2])], [port("y", [2])]
    path = write(model([helper.make_node("Relu", ["x"], ["y"])], *ports), tmp_path)
    with pytest.raises(PassError, match=r"the rewrite densify of the loader failed: TypeError: no"):
        load(path)
