"""Models of old opsets give the same results in the opset that they are converted to."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.defs
import onnx.parser
import onnxruntime as ort
import pytest
from tiny_models import agree

from onnxpar.base.errors import ModelError
from onnxpar.load.changed_ops import CHANGES
from onnxpar.load.upgrade import NEWEST, OLDEST, upgrade

RANDOM = np.random.default_rng(11)
X, IMAGE = "float[3,4,5] x", "float[1,2,6,7] x"


def parsed(opset: int, given: str, body: str, results: str = "y") -> onnx.ModelProto:
    ports = ", ".join(f"{given.split('[')[0]} {name}" for name in results.split())
    head = f'<ir_version: 3, opset_import: ["" : {opset}]> m ({given}) => ({ports})'
    return onnx.parser.parse_model(f"{head} {{ {body} }}")


def fed(proto: onnx.ModelProto) -> dict[str, Any]:
    feeds = {}
    for port in proto.graph.input:
        kind = onnx.helper.tensor_dtype_to_np_dtype(port.type.tensor_type.elem_type)
        shape = [d.dim_value for d in port.type.tensor_type.shape.dim]
        values = RANDOM.standard_normal(shape) * 3
        feeds[port.name] = np.array([1, 1, 1.4, 0.6] if port.name == "scales" else values, kind)
    return feeds


def ran(proto: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return list(ort.InferenceSession(proto.SerializeToString(), options).run(None, feeds))


def reductions() -> list[tuple[int, str, str]]:
    kinds = ["L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare"]
    ways = ["<axes = [1]>", "<axes = [0, 2], keepdims = 0>", ""]
    return [(7, X, f"p = Abs (x) y = Reduce{kind} {way} (p)") for kind in kinds for way in ways]


def flattened() -> list[tuple[int, str, str]]:
    kinds, ways = ("Softmax", "LogSoftmax", "Hardmax"), ["", *(f"<axis = {i}>" for i in range(3))]
    old = [(7, X, f"y = {kind} {way} (x)") for kind in kinds for way in ways]
    rows = [(12, X, f"y = {kind} <axis = {i}> (x)") for kind in kinds for i in (-1, -2, -3)]
    unknown = "n = Shape (x) h = Reshape (x, n) "
    return [*old, *rows, *((12, X, f"{unknown} y = {kind} (h)") for kind in kinds)]


def resized() -> list[tuple[int, str, str]]:
    scales = ["1, 1, 2, 3", "1, 1, 1.5, 0.7", "1, 1, 0.5, 0.4", "1, 1, 1.3, 1.7", "1, 1, 0.9, 1"]
    ways = [f"s = Constant <value = float[4] {{{s}}}> ()" for s in scales]
    modes = ['<mode = "linear">', '<mode = "nearest">', ""]
    of = [(10, IMAGE, f"{way} y = Resize {mode} (x, s)") for way in ways for mode in modes]
    up = [
        (9, IMAGE, f"{way} y = Upsample {mode} (x, s)")
        for way in (ways[0], ways[3])
        for mode in modes
    ]
    up += [
        (7, IMAGE, f'y = Upsample <scales = [1.0, 1.0, 1.3, 2.0], mode = "{m}"> (x)')
        for m in ("nearest", "linear")
    ]
    run = [(10, f"{IMAGE}, float[4] scales", f"y = Resize {mode} (x, scales)") for mode in modes]
    return [*of, *up, *run]


CASES = [
    *reductions(),
    *flattened(),
    *resized(),
    *((7, X, f"y = Clip {way} (x)") for way in ("", "<min = -1.0>", "<max = 0.5>")),
    (7, X, "y = Clip <min = -1.0, max = 0.5> (x)"),
    (7, X, "a = ReduceMax (x) b = Exp (a) y = Clip <max = 0.5> (b)"),
    (7, X, "y = Pad <pads = [0, 1, 0, 2, 0, 1]> (x)"),
    (7, X, "y = Pad <pads = [0, 1, 0, 2, 0, 1], value = 1.5> (x)"),
    (7, X, 'y = Pad <mode = "reflect", pads = [0, 1, 0, 0, 0, 2]> (x)'),
    (7, "double[3,4] x", 'y = Pad <mode = "edge", pads = [0, 1, 1, 2]> (x)'),
    (7, X, "y = Dropout (x)"),
    (7, X, "y = Dropout <ratio = 0.3> (x)"),
    (10, X, "y, m = Dropout <ratio = 0.3> (x)"),
    (7, X, "y = Slice <starts = [1, -3], ends = [3, 10]> (x)"),
    (7, X, "y = Slice <axes = [2], starts = [1], ends = [-1]> (x)"),
    (7, X, "y, i = TopK <axis = 1, k = 2> (x)"),
    (10, X, "k = Constant <value = int64[1] {2}> () y, i = TopK <axis = 1> (x, k)"),
    (7, X, "y, z = Split <axis = 1, split = [3, 1]> (x)"),
    (7, X, "a, b = Split <axis = 1> (x) y = Sub (a, b)"),
    (7, X, "a, b = Split <axis = 1, split = [1, 3]> (x) y = Add (a, b)"),
    (7, "float[3,1,5] x", "y = Squeeze (x)"),
    (7, "float[3,1,1] x", "y = Squeeze <axes = [1]> (x)"),
    (7, X, "y = Unsqueeze <axes = [0, 2]> (x)"),
    (
        9,
        X,
        "i = Constant <value = int64[1,1,1] {2}> () u = Constant <value = float[1,1,1] {7}> () "
        "y = Scatter <axis = 1> (x, i, u)",
    ),
    (7, "float[2,3,4] x, float[3] s", "v = Abs (s) y = BatchNormalization (x, s, s, s, v)"),
    (7, IMAGE, "y = AveragePool <kernel_shape = [2, 3], pads = [0, 1, 0, 1]> (x)"),
    (7, IMAGE, "y = MaxPool <kernel_shape = [2, 3], strides = [2, 2]> (x)"),
    (8, IMAGE, "y, i = MaxPool <kernel_shape = [2, 2]> (x)"),
    (7, IMAGE, "y = LpPool <kernel_shape = [2, 3]> (x)"),
    (7, "float[1,8,2,3] x", "y = DepthToSpace <blocksize = 2> (x)"),
    (7, IMAGE, "y = LRN <size = 3> (x)"),
    (9, IMAGE, "y = MeanVarianceNormalization (x)"),
    (7, "float[3,4] x, float[4,5] b, float[5] c", "y = Gemm (x, b, c)"),
    (7, X, "c = ArgMax <axis = 1> (x) y = Cast <to = 1> (c)"),
    (7, "float[3,4] x, float[4] s", "y = PRelu (x, s)"),
    (7, "float[3,4] x, float[3,4] s", "a = Abs (x) y = Pow (a, s)"),
    (7, "float[3,4] x, float[3,4] s", "y = Max (x, s)"),
    (8, "float[3,4] x", "s = Constant <value = int64[3] {2, 3, 4}> () y = Expand (x, s)"),
    (7, X, "y = Flatten <axis = 2> (x)"),
    (7, "float[2,3,4] x, float[1,20,4] w, float[1,20,5] r", "y = LSTM <hidden_size = 5> (x, w, r)"),
    (7, "float[2,3,4] x, float[1,15,4] w, float[1,15,5] r", "y = GRU <hidden_size = 5> (x, w, r)"),
    (7, "float[2,3,4] x, float[1,5,4] w, float[1,5,5] r", "y = RNN <hidden_size = 5> (x, w, r)"),
    (
        10,
        "float[1,2,6,7] x",
        "r = Constant <value = float[2,4] {0, 0, 4, 4, 1, 1, 6, 5}> () "
        "b = Constant <value = int64[2] {0, 0}> () "
        "y = RoiAlign <output_height = 2, output_width = 3> (x, r, b)",
    ),
    (
        10,
        X,
        "s = Constant <value = float {0.1}> () q = QuantizeLinear (x, s) "
        "y = DequantizeLinear (q, s)",
    ),
    (
        11,
        IMAGE,
        "r = Constant <value = float[0] {}> () "
        "s = Constant <value = float[4] {1, 1, 1.5, 0.7}> () y = Resize (x, r, s)",
    ),
    (
        11,
        IMAGE,
        "r = Constant <value = float[0] {}> () z = Constant <value = int64[4] {1, 2, 9, 4}> "
        '() y = Resize <mode = "linear"> (x, r, r, z)',
    ),
    (13, X, "a, b = Split <axis = 1> (x) y = Sub (a, b)"),
    (13, X, "y = Softmax (x)"),
    (17, X, "y = ReduceMax <axes = [1]> (x)"),
    (13, IMAGE, "z = Constant <value = int64[4] {1, 2, 9, 4}> () y = Resize (x, , , z)"),
    (11, X, "p = Constant <value = int64[6] {0, 1, 0, 2, 0, 1}> () y = Pad (x, p)"),
    (
        9,
        "float[3,4] x",
        "y = Scan <num_scan_inputs = 1, body = b (float[4] e) => (float[4] o) "
        "{ c = Clip <max = 0.5> (e) o = Softmax <axis = 0> (c) }> (x)",
    ),
    *(
        (
            8,
            "float[2,3,4] x, float[2,4] s, float[2,3] z",
            f"t, y, u = Scan <num_scan_inputs = 2, directions = {directions}, body = b "
            "(float[4] a, float[4] e, float f) => (float[4] c, float[4] d, float[4] g) "
            "{ c = Add (a, e) h = Mul (c, f) d = Clip <max = 0.5> (h) g = Sub (d, e) }> "
            "(, s, x, z)",
        )
        for directions in ([0, 0], [1, 0], [1, 1])
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[2][-70:]}")
def test_converted_models_compute_the_same(case: tuple[int, str, str]) -> None:
    old = parsed(*case, results="t y u" if "t, y, u" in case[2] else "y")
    old.ir_version = 8
    feeds = fed(old)
    wanted = ran(old, feeds)
    new = upgrade(onnx.ModelProto.FromString(old.SerializeToString()), "m")
    assert new.opset_import[0].version == max(NEWEST, case[0])
    for a, b in zip(ran(new, feeds), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ['<mode = "nearest">', ""])
def test_known_scales_that_only_grow_need_one_resize(mode: str) -> None:
    way = f"s = Constant <value = float[4] {{1, 1, 2, 3}}> () y = Resize {mode} (x, s)"
    proto = parsed(10, IMAGE, way)
    feeds = fed(proto)
    (wanted,) = ran(proto, feeds)
    new = upgrade(proto, "m")
    assert [n.op_type for n in new.graph.node].count("Resize") == 1
    np.testing.assert_array_equal(ran(new, feeds)[0], wanted)


def defaults(schema: onnx.defs.OpSchema) -> dict[str, Any]:
    found = {name: attribute.default_value for name, attribute in schema.attributes.items()}
    return {n: onnx.helper.get_attribute_value(v) if v.name else None for n, v in found.items()}


def test_all_ops_that_lost_an_attribute_or_a_default_are_converted() -> None:
    of: dict[str, dict[int, onnx.defs.OpSchema]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.since_version <= NEWEST:
            of.setdefault(schema.name, {})[schema.since_version] = schema
    lost = set()
    for op, versions in of.items():
        order = sorted(versions)
        for before, after in pairwise(order):
            old, new = defaults(versions[before]), defaults(versions[after])
            is_less = versions[after].deprecated or not old.items() <= new.items()
            lost |= {(op, after)} if is_less and after > OLDEST else set()
    assert lost <= CHANGES.keys()


@pytest.mark.parametrize(
    ("opset", "given", "body", "reason"),
    [
        (
            7,
            "float[2,3,4] x, float[3,4] s",
            "y = BatchNormalization <spatial = 0> (x, s, s, s, s)",
            "spatial=0",
        ),
        (9, X, "y, m = Dropout (x)", "mask"),
        (9, X, "a = own.Unknown (x) y = Clip <max = 1.0> (a)", "dtype of 'a'"),
    ],
)
def test_nodes_without_an_equivalent_are_refused(
    opset: int, given: str, body: str, reason: str
) -> None:
    results = "y m" if "m = " in body else "y"
    with pytest.raises(ModelError, match=f"has no equivalent in opset 18.*{reason}"):
        upgrade(parsed(opset, given, body, results), "m")


SPLIT = [
    (7, "y = ArgMax <axis = 1> (x)"),
    (9, "y, z = TopK <axis = 1, k = 3> (x)"),
    (10, "k = Constant <value = int64[1] {3}> () y, z = TopK <axis = 1> (x, k)"),
    (7, "y = LpNormalization <axis = 1> (x)"),
    (9, "y = MeanVarianceNormalization <axes = [1]> (x)"),
    (7, "y = Hardmax <axis = 1> (x)"),
    (9, "y = Softmax <axis = 1> (x)"),
    (7, "a = ReduceMax <axes = [1]> (x) y = Clip <min = 0.0> (a)"),
    (10, "y = com.microsoft.Gelu (x)"),
    (
        8,
        "a = Unsqueeze <axes = [0]> (x) s = ReduceMax <axes = [1], keepdims = 0> (a) t, b = Scan "
        "<num_scan_inputs = 1, body = b (float[4] p, float[4] e) => (float[4] q, float[4] r) "
        "{ q = Add (p, e) r = Tanh (q) }> (, s, a) y = Squeeze <axes = [0]> (b)",
    ),
    (9, 'y = ai.onnx.ml.Normalizer <norm = "L2"> (x)'),
    (
        9,
        "y, z = ai.onnx.ml.LinearClassifier <coefficients = [0.5, 0.1, -0.3, 1.0, 0.2, -1.0, 0.7, "
        '0.4], intercepts = [0.1, 0.2], classlabels_ints = [3, 5], post_transform = "SOFTMAX"> (x)',
    ),
]


@pytest.mark.parametrize("case", SPLIT, ids=lambda case: f"{case[0]} {case[1][:50]}")
def test_models_of_old_opsets_are_split(case: tuple[int, str], tmp_path: Path) -> None:
    opset, body = case
    ports = "float y, int64 z" if "y, z" in body else "float y"
    if "ArgMax" in body or "Linear" in body:
        ports = ports.replace("float y", "int64 y").replace("int64 z", "float z")
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1, "ai.onnx.ml" : 1]> '
        f"m (float[6,4] x) => ({ports}) {{ {body} }}"
    )
    strategy = {"mesh": {"tp": 2}, "tensors": {"x": [None, "tp"]}}
    agree(proto, tmp_path, {"x": RANDOM.standard_normal((6, 4)).astype("f")}, strategy=strategy)
