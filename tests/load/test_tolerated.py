"""What breaks the ONNX standard, or says less than it, and runs in onnxruntime all the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import AttributeProto, TensorProto, ValueInfoProto, helper, numpy_helper
from small_models import write_text
from tiny_models import BOOL, INT, RANDOM, TP, W, X, agree, model, port, product, write

import onnxpar
from onnxpar.base.arrays import Array
from onnxpar.base.errors import ModelError, StrategyError
from onnxpar.runtime.session.threads import ThreadSession

Build = Callable[[Path], onnx.ModelProto]
CASES: dict[str, Build] = {}


def case(build: Build) -> Build:
    CASES[build.__name__] = build
    return build


def check(proto: onnx.ModelProto, folder: Path) -> None:
    """On 2 ranks, with the batch split, and with the product's columns where there is one."""
    feeds = {"x": X}
    options = ort.SessionOptions()
    options.log_severity_level = 4
    ort.InferenceSession(str(write(proto, folder)), options).run(None, feeds)
    agree(proto, folder, feeds, preset="data-parallel")
    if proto.graph.initializer:
        agree(proto, folder, feeds, strategy=TP)


# types and sizes


@case
def no_type(_: Path) -> onnx.ModelProto:
    proto = product()
    proto.graph.output[0].ClearField("type")
    return proto


@case
def untyped_value_info(_: Path) -> onnx.ModelProto:
    proto = product()
    proto.graph.value_info.extend([ValueInfoProto(name="h"), ValueInfoProto()])
    return proto


@case
def sizes_of_minus_one(_: Path) -> onnx.ModelProto:
    proto = product()
    proto.graph.input[0].CopyFrom(port("x", [-1, 4]))
    proto.graph.output[0].CopyFrom(port("y", [-1, 6]))
    proto.graph.value_info.append(port("h", [-1, -1]))
    return proto


@case
def sizes_of_zero(_: Path) -> onnx.ModelProto:
    proto = product()
    proto.graph.output[0].CopyFrom(port("y", [0, 0]))
    proto.graph.value_info.append(port("h", [0, 6]))
    return proto


@case
def wrong_sizes(_: Path) -> onnx.ModelProto:
    proto = product()
    proto.graph.output[0].CopyFrom(port("y", [6, 7, 8]))
    proto.graph.value_info.append(port("h", [5, 5]))
    return proto


# entries of the file


@case
def unnamed_weight(_: Path) -> onnx.ModelProto:
    proto = product()
    proto.graph.initializer.append(numpy_helper.from_array(W, ""))
    return proto


@case
def weight_given_twice(_: Path) -> onnx.ModelProto:
    proto = product()
    proto.graph.initializer.append(numpy_helper.from_array(W * 2, "w"))
    return proto


@case
def output_listed_twice(_: Path) -> onnx.ModelProto:
    proto = product()
    proto.graph.output.append(port("y", [6, 6]))
    return proto


@case
def weight_with_raw_and_typed_data(_: Path) -> onnx.ModelProto:
    proto = product()
    proto.graph.initializer[0].float_data.extend(W.reshape(-1) * 2)
    return proto


@case
def empty_location(_: Path) -> onnx.ModelProto:
    """Of data that stands in the model itself."""
    proto = product()
    proto.graph.initializer[0].external_data.add(key="location", value="")
    return proto


@case
def length_of_zero(folder: Path) -> onnx.ModelProto:
    proto = product()
    (folder / "w.bin").write_bytes(W.tobytes())
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w.bin")
    tensor.external_data.add(key="length", value="0")
    return proto


@case
def external_constant_without_length(folder: Path) -> onnx.ModelProto:
    """The file has more than it needs."""
    (folder / "w.bin").write_bytes(np.arange(7, dtype=np.float32).tobytes())
    value = TensorProto(data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    value.external_data.add(key="location", value="w.bin")
    value.external_data.add(key="offset", value="8")
    nodes = [
        helper.make_node("Constant", [], ["two"], value=value),
        helper.make_node("Add", ["x", "two"], ["y"]),
    ]
    return model(nodes, [port("x", [6, 4])], [port("y", [6, 4])])


@case
def metadata_given_twice(_: Path) -> onnx.ModelProto:
    proto = product()
    for value in "ab":
        proto.metadata_props.add(key="k", value=value)
    return proto


@case
def domain_spelled_out(_: Path) -> onnx.ModelProto:
    proto = product()
    proto.graph.node[0].domain = "ai.onnx"
    return proto


@case
def unsorted_nodes(_: Path) -> onnx.ModelProto:
    proto = product()
    nodes = [*proto.graph.node, helper.make_node("Neg", ["h"], ["n"], "neg")]
    branch = helper.make_graph(
        [helper.make_node("Abs", ["n"], ["t"])], "b", [], [port("t", [6, 6])]
    )
    nodes += [
        helper.make_node("If", ["c"], ["z"], "if", then_branch=branch, else_branch=branch),
        helper.make_node("Greater", ["one", "zero"], ["c"], "greater"),
        helper.make_node("Identity", ["one"], ["unused"], "last"),
    ]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes[::-1])
    proto.graph.output.append(port("z", [6, 6]))
    for name, value in (("one", 1), ("zero", 0)):
        proto.graph.initializer.append(numpy_helper.from_array(np.array(value, np.float32), name))
    return proto


@case
def empty_weight(_: Path) -> onnx.ModelProto:
    """Concatenated to others: the result is what it was before."""
    proto = product()
    proto.graph.node[1].output[0] = "r"
    proto.graph.node.append(helper.make_node("Concat", ["r", "e"], ["y"], "cat", axis=0))
    proto.graph.initializer.append(numpy_helper.from_array(np.zeros((0, 6), np.float32), "e"))
    return proto


@case
def function_of_an_ops_name(_: Path) -> onnx.ModelProto:
    """The op counts."""
    proto = product()
    body = [helper.make_node("Neg", ["a"], ["b"])]
    opset = [helper.make_opsetid("", 18)]
    proto.functions.append(helper.make_function("", "Relu", ["a"], ["b"], body, opset))
    return proto


@case
def keepdims_of_two(_: Path) -> onnx.ModelProto:
    """Onnxruntime keeps the dimension only where it is 1."""
    proto = product()
    proto.graph.node[1].CopyFrom(
        helper.make_node("ReduceSum", ["h", "axes"], ["y"], "sum", keepdims=2)
    )
    proto.graph.initializer.append(numpy_helper.from_array(np.array([1]), "axes"))
    proto.graph.output[0].CopyFrom(port("y", [6]))
    return proto


@case
def noop_of_two(_: Path) -> onnx.ModelProto:
    """It sums all: only 1 leaves the operand as it is."""
    proto = product()
    sum_ = helper.make_node("ReduceSum", ["h"], ["y"], "sum", noop_with_empty_axes=2, keepdims=0)
    proto.graph.node[1].CopyFrom(sum_)
    proto.graph.output[0].CopyFrom(port("y", []))
    return proto


@case
def ceil_mode_of_two(_: Path) -> onnx.ModelProto:
    """It rounds down: only 1 rounds up."""
    pool = {"kernel_shape": [3, 1], "strides": [2, 1], "ceil_mode": 2}
    nodes = [
        helper.make_node("Constant", [], ["axes"], value_ints=[0, 1]),
        helper.make_node("Unsqueeze", ["x", "axes"], ["h"]),
        helper.make_node("MaxPool", ["h"], ["y"], **pool),
    ]
    return model(nodes, [port("x", [6, 4])], [port("y", [1, 1, 2, 4])], opset=22, ir=10)


@case
def dropout_that_is_told_not_to_train(_: Path) -> onnx.ModelProto:
    proto = product()
    proto.graph.node[1].CopyFrom(helper.make_node("Dropout", ["h", "", "no"], ["y"], "drop"))
    proto.graph.initializer.append(numpy_helper.from_array(np.array(False), "no"))
    return proto


# labels of dimensions


def labelled(*labels: str) -> Build:
    """y = relu(x), of sizes with these labels."""

    def build(_: Path) -> onnx.ModelProto:
        node = helper.make_node("Relu", ["x"], ["y"])
        return model([node], [port("x", labels)], [port("y", labels)])

    return build


LABELS = (
    ("None", "None"),  # what nobody knows, twice
    ("?", "?"),
    ("-1", "-1"),
    ("6", "6"),
    ("batch size", "a-b"),
    ("dim-1", "dim-2"),
    ("lambda", "1n"),
    ("n//2", "True"),
    ("größe", "é"),
    ("a b", "a.b"),
    ("a*b", "c+d"),
    ("n+1", "k"),
)


@pytest.mark.parametrize("labels", LABELS, ids=str)
def test_labels(labels: tuple[str, str], tmp_path: Path) -> None:
    check(labelled(*labels)(tmp_path), tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("name", CASES)
def test_runs(name: str, tmp_path: Path) -> None:
    check(CASES[name](tmp_path), tmp_path)


def test_a_sum_of_symbols_is_one(tmp_path: Path) -> None:
    proto = model(
        [
            helper.make_node("Concat", ["a", "b"], ["ab"], axis=0),
            helper.make_node("Add", ["ab", "c"], ["y"]),
        ],
        [port("a", ["past", 4]), port("b", ["new", 4]), port("c", ["past + new", 1])],
        [port("y", None)],
    )
    feeds = {"a": X[:3], "b": X[:2], "c": X[:5, :1]}
    plan = agree(proto, tmp_path, feeds, preset="tensor-parallel")
    assert set(plan.example or ()) == {"past", "new"}


def test_labels_bind_by_either_name(tmp_path: Path) -> None:
    proto = labelled("batch size", "a-b")(tmp_path)
    for dims in ({"batch size": 6, "a-b": 4}, {"batch_size": 6, "a_b": 4}):
        agree(proto, tmp_path, {"x": X}, dims=dims)


def test_untyped_results_of_other_domains(tmp_path: Path) -> None:
    """A classifier of scikit-learn: its second output is a sequence of maps."""
    nodes = [
        helper.make_node(
            "LinearClassifier",
            ["x"],
            ["label", "scores"],
            domain="ai.onnx.ml",
            coefficients=RANDOM.standard_normal(12).tolist(),
            intercepts=[0.1, 0.2, 0.3],
            classlabels_ints=[0, 1, 2],
            post_transform="SOFTMAX",
        ),
        helper.make_node(
            "ZipMap", ["scores"], ["maps"], domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2]
        ),
    ]
    outputs = [ValueInfoProto(name=name) for name in ("label", "maps")]
    proto = model(nodes, [port("x", ["None", 4])], outputs, domains=["ai.onnx.ml"])
    agree(proto, tmp_path, {"x": X})


def test_results_of_a_rank_that_the_runtime_cannot_tell(tmp_path: Path) -> None:
    """It says of them what it says of scalars."""
    nodes = [
        helper.make_node("Compress", ["x", "c"], ["some"], axis=0),
        helper.make_node("Normalizer", ["some"], ["y"], domain="ai.onnx.ml", norm="L2"),
    ]
    ports = [port("x", [6, 4]), port("c", [6], BOOL)]
    proto = model(nodes, ports, [port("y", None)], domains=["ai.onnx.ml"])
    agree(proto, tmp_path, {"x": X, "c": np.array([1, 0, 1, 1, 0, 1], bool)})


def test_numbers_of_maps_are_as_exact_as_their_type(tmp_path: Path) -> None:
    """Python has them as float64; split sums of float32 differ by more than that allows."""
    weight = RANDOM.standard_normal((64, 3)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "mm"),
        helper.make_node("ZipMap", ["h"], ["y"], domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2]),
    ]
    element = helper.make_map_type_proto(INT, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    output = helper.make_value_info("y", helper.make_sequence_type_proto(element))
    proto = model(nodes, [port("x", [6, 64])], [output], {"w": weight}, domains=["ai.onnx.ml"])
    x = RANDOM.standard_normal((6, 64)).astype(np.float32)
    agree(proto, tmp_path, {"x": x}, strategy={"shard": {"mm": [[None, "tp"], ["tp", None]]}})


def test_strings_of_open_sizes(tmp_path: Path) -> None:
    """They alone tell the size."""
    node = helper.make_node(
        "LabelEncoder",
        ["s"],
        ["y"],
        domain="ai.onnx.ml",
        keys_strings=["a", "b"],
        values_floats=[1.0, 2.0],
        default_float=0.0,
    )
    nodes = [node, helper.make_node("Identity", ["s"], ["t"])]
    ports = [port("s", ["n", 2], TensorProto.STRING)]
    outputs = [port("y", ["n", 2]), port("t", ["n", 2], TensorProto.STRING)]
    proto = model(nodes, ports, outputs, domains=["ai.onnx.ml"])
    proto.opset_import[1].version = 2
    words = np.array([["a", "b"], ["b", "c"], ["c", "a"]], object)
    more = {"s": np.concatenate([words, words])}
    agree(proto, tmp_path, {"s": words}, 2, more, preset="tensor-parallel")
    with ThreadSession(tmp_path / "m.par") as session:
        assert session.get_inputs()[0].shape == ["n", 2]


def test_untyped_results_of_branches(tmp_path: Path) -> None:
    def branch(op: str) -> onnx.GraphProto:
        node = helper.make_node(op, ["x"], ["t"])
        return helper.make_graph([node], op, [], [ValueInfoProto(name="t")])

    node = helper.make_node(
        "If", ["c"], ["y"], then_branch=branch("Relu"), else_branch=branch("Neg")
    )
    ports = [port("x", [6, 4]), port("c", [], BOOL)]
    proto = model([node], ports, [ValueInfoProto(name="y")])
    for choice in (True, False):
        agree(proto, tmp_path, {"x": X, "c": np.array(choice)})


@pytest.mark.parametrize("op", ["If", "Loop"])
def test_large_weights_in_bodies_at_open_sizes(op: str, tmp_path: Path) -> None:
    """At all but the first of the sizes that are tried, nobody may read them."""
    weight = RANDOM.standard_normal((260, 260)).astype(np.float32) / 16
    product_ = helper.make_node("MatMul", ["a" if op == "Loop" else "x", "w"], ["o"])
    result = port("o", ["n", 260])
    if op == "If":
        bodies = dict.fromkeys(
            ("then_branch", "else_branch"), helper.make_graph([product_], "b", [], [result])
        )
    else:
        ports = [port("i", [], INT), port("c", [], BOOL), port("a", ["n", 260])]
        on = helper.make_node("Identity", ["c"], ["on"])
        results = [port("on", [], BOOL), result]
        bodies = {"body": helper.make_graph([product_, on], "b", ports, results)}
    given = ["c"] if op == "If" else ["turns", "c", "x"]
    node = helper.make_node(op, given, ["y"], **bodies)
    inputs = [port("x", ["n", 260]), port("c", [], BOOL)]
    stored = {"w": weight, "turns": np.array(3)}
    proto = model([node], inputs, [port("y", ["n", 260])], stored)
    x = RANDOM.standard_normal((6, 260)).astype(np.float32)
    agree(proto, tmp_path, {"x": x, "c": np.array(True)})


def test_a_table_of_positions_shorter_than_any_guess_leaves_the_size_open(tmp_path: Path) -> None:
    """A slice of the table has its length at all larger sizes, which pins nothing."""
    table = RANDOM.standard_normal((16, 4)).astype(np.float32)
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], start=0, end=1),
        helper.make_node("Slice", ["table", "zero", "s"], ["p"]),
        helper.make_node("Add", ["x", "p"], ["y"]),
    ]
    stored = {"table": table, "zero": np.array([0])}
    proto = model(nodes, [port("x", ["n", 4])], [port("y", ["n", 4])], stored)
    agree(proto, tmp_path, {"x": X}, 2, {"x": X[:5]}, preset="tensor-parallel")


def test_sizes_that_a_weight_pins(tmp_path: Path) -> None:
    proto = product()
    proto.graph.input[0].CopyFrom(port("x", [-1, -1]))
    warnings.simplefilter("error")  # nothing to say: no other size would run
    plan = agree(proto, tmp_path, {"x": X}, strategy=TP)
    assert plan.inputs[0].shape is not None and plan.inputs[0].shape[1] == 4


def test_older_paddle(tmp_path: Path) -> None:
    """Sizes of -1 at the input, a Reshape by them, and an output of which they are unknown."""
    image, kernel = (
        RANDOM.standard_normal(s).astype(np.float32) for s in ((2, 3, 8, 8), (4, 3, 3, 3))
    )
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4),
        helper.make_node("Shape", ["c"], ["s"]),
        helper.make_node("Slice", ["s", "zero", "one"], ["n"]),
        helper.make_node("Concat", ["n", "rest"], ["to"], axis=0),
        helper.make_node("Reshape", ["c", "to"], ["y"]),
    ]
    stored = {"w": kernel, "zero": np.array([0]), "one": np.array([1]), "rest": np.array([4, -1])}
    outputs = [port("y", [-1, 4, 0])]
    proto = model(nodes, [port("x", [-1, 3, -1, -1])], outputs, stored, opset=11, ir=7)
    other = {"x": np.concatenate([image] * 3)[:5, :, :6]}
    agree(proto, tmp_path, {"x": image}, 2, other)
    agree(proto, tmp_path, {"x": image}, 2, other, preset="tensor-parallel")


# what stays refused, by name


def broken(change: Callable[[TensorProto], None]) -> onnx.ModelProto:
    proto = product()
    change(proto.graph.initializer[0])
    return proto


def elsewhere(**entries: str) -> onnx.ModelProto:
    def change(tensor: TensorProto) -> None:
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=value)

    return broken(change)


def longer(tensor: TensorProto) -> None:
    tensor.raw_data += bytes(4)


def longer_list(tensor: TensorProto) -> None:
    tensor.ClearField("raw_data")
    tensor.float_data.extend([0.0] * 25)


def of_no_type(tensor: TensorProto) -> None:
    tensor.data_type = 0


def of_no_type_and_name(tensor: TensorProto) -> None:
    tensor.CopyFrom(TensorProto())


def untyped_input() -> onnx.ModelProto:
    proto = product()
    proto.graph.input[0].type.tensor_type.elem_type = 0
    return proto


def single(op: str, weight: Array, **attributes: int) -> onnx.ModelProto:
    """y = op(x, w), for x of 6 by 4."""
    node = helper.make_node(op, ["x", "w"], ["y"], "odd", **attributes)
    kind = TensorProto.UINT8 if op == "QuantizeLinear" else TensorProto.FLOAT
    result = helper.make_tensor_value_info("y", kind, None)
    return model([node], [port("x", [6, 4])], [result], {"w": weight}, opset=21)


def at(*shape: int) -> Array:
    return np.ones(shape, np.int64)


SCALE = np.ones(4, np.float32)


def stated_to_be_a_float() -> onnx.ModelProto:
    """The value of a constant, of which onnxruntime makes 0."""
    proto = model(
        [
            helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(W[0])),
            helper.make_node("Add", ["x", "k"], ["y"]),
        ],
        [port("x", [4, 6])],
        [port("y", [4, 6])],
    )
    proto.graph.node[0].attribute[0].type = AttributeProto.FLOAT
    return proto


@pytest.mark.parametrize(
    ("proto", "reason"),
    [
        (single("GatherND", at(2, 1), batch_dims=-1), "GatherND 'odd' has batch_dims=-1 and"),
        (single("ReverseSequence", at(4), time_axis=-1), "time_axis=-1 and batch_axis=1, not"),
        (single("ReverseSequence", at(4), batch_axis=2), "time_axis=0 and batch_axis=2, not"),
        (single("QuantizeLinear", SCALE, block_size=-1), "block_size=-1 and a scale of 1 dim"),
        (single("QuantizeLinear", SCALE, block_size=2), "block_size=2 and a scale of 1 dim"),
        (broken(longer), "'w' has 100 bytes, but its shape and type need 96"),
        (broken(longer_list), "'w' has 25 elements, but its shape and type need 24"),
        (broken(of_no_type), "'w' has data type 0"),
        (broken(of_no_type_and_name), "'' has data type 0"),
        (stated_to_be_a_float(), "'value' of Constant 'k' is stated to be FLOAT, but holds t;"),
        (elsewhere(location="w.bin", length="97"), "has 97 bytes, but its shape and type need 96"),
        (elsewhere(location=""), "has the location '', which is not a valid file name"),
        (elsewhere(location="w.bin", offset=""), "weight 'w' is not a number"),
        (elsewhere(location="w.bin", offset="-4"), "too short for 'w'"),
        (elsewhere(location="/etc/hostname"), "outside the model's folder"),
        (untyped_input(), "input 'x' has no type"),
    ],
)
def test_what_onnxruntime_refuses_is_refused_by_name(
    proto: onnx.ModelProto, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "w.bin").write_bytes(W.tobytes())
    with pytest.raises(ModelError, match=reason):
        onnxpar.plan(write(proto, tmp_path), devices=2)


def test_an_equal_symbol_of_unequal_sizes_is_named(tmp_path: Path) -> None:
    proto = labelled("n", "n")(tmp_path)
    onnxpar.shard(write(proto, tmp_path), tmp_path / "m.par", devices=2, preset="data-parallel")
    with (
        ThreadSession(tmp_path / "m.par") as session,
        pytest.raises(onnxpar.base.errors.InputError, match="equal if they have one name"),
    ):
        session.run(None, {"x": X})


def test_a_recurrence_over_sequences_of_unknown_rank(tmp_path: Path) -> None:
    ones = ",".join(["0.1"] * 64)
    path = write_text(
        f"""<ir_version: 8, opset_import: ["" : 18]>
        g (float[s,b,4] x, int64[n] k) => (float[t,d,e,4] y)
        <int64[1] z = {{0}}, float[16,4] u = {{{ones}}}, float[16,4] v = {{{ones}}}> {{
          q = Reshape(x, k)  w = Unsqueeze(u, z)  r = Unsqueeze(v, z)
          y = LSTM<hidden_size = 4>(q, w, r) }}""",
        tmp_path / "m.onnx",
    )
    feeds = {"x": RANDOM.standard_normal((5, 2, 4)).astype("f4"), "k": np.array([5, 2, 4])}
    assert onnxpar.check(path, feeds, devices=2, preset="tensor-parallel").ok


def test_sizes_that_a_branch_for_others_does_not_fit(tmp_path: Path) -> None:
    """onnxruntime infers the shapes of both branches, as soon as sizes are fixed."""
    path = write_text(
        """<ir_version: 8, opset_import: ["" : 18]>
        g (float[n,4] x, bool one) => (float[m,4] y)
        <int64[1] z = {0}> {
          y = If(one) <then_branch = a () => (float[p,4] ya) {
                         row = Squeeze(x, z)  ya = Unsqueeze(row, z) },
                       else_branch = e () => (float[q,4] ye) { ye = Relu(x) }> }""",
        tmp_path / "m.onnx",
    )
    feeds = {"x": np.ones((3, 4), "f4"), "one": np.array(False)}
    assert onnxpar.check(path, feeds, devices=2).ok
    assert onnxpar.check(path, devices=2, dims={"n": 1}).ok
    with pytest.raises(
        StrategyError, match=r"cannot load this model with --dim n=3: .*Squeeze.*--typ"
    ):
        onnxpar.plan(path, devices=2, dims={"n": 3})


@pytest.mark.parametrize("split", [{"x": ["tp", None]}, {"y": ["tp", None]}])
def test_bounds_of_a_range_that_are_vectors(split: dict[str, list[str]], tmp_path: Path) -> None:
    """A branch hides their shape in the model; once it is resolved, onnxruntime would refuse the
    node. The grids of the definition of AffineGrid have such bounds."""
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        m (float[n, 4] x) => (float[n, 4] y) {
            zero = Constant <value_int = 0> () one = Constant <value_int = 1> ()
            w = Shape <start = 1> (x) four = Constant <value_ints = [4]> ()
            same = Equal (w, four) is_four = Squeeze (same)
            d = If (is_four) <
                then_branch = a () => (int64[1] e) { e = Constant <value_ints = [4]> () },
                else_branch = b () => (int64[k] f) { f = Constant <value_ints = [4, 4]> () }>
            r = Range (zero, d, one) c = CastLike (r, x) y = Mul (x, c) }""")
    onnx.save(proto, tmp_path / "m.onnx")
    strategy = {"mesh": {"tp": 2}, "tensors": split}
    onnxpar.shard(tmp_path / "m.onnx", tmp_path / "m.par", strategy=strategy)
    x = np.random.default_rng(0).standard_normal((3, 4), np.float32)
    with ThreadSession(tmp_path / "m.par") as session:
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], x * np.arange(4, dtype="f"))
