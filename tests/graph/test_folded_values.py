"""Constants that the loader computes have the values that onnxruntime computes, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import onnxpar
from onnxpar.runtime.session.threads import ThreadSession

FLOATS = np.array([-300.0, -12.3, -3.5, -1.5, -0.5, 0.01, 0.5, 2.5, 3.5, 44.0, 447.0, 900.0], "f4")
LARGE = np.array([2**31 - 1, 2**31 - 1, 5], np.int64)


def agree(
    text: str,
    constants: dict[str, Any],
    feeds: list[dict[str, Any]],
    folder: Path,
    strategy: dict[str, Any] | None = None,
    opset: int = 23,
) -> None:
    """Compares every output over 2 ranks with that of the unsplit model, also its dtype."""
    head = f'<ir_version: 10, opset_import: ["" : {opset}]>\n'
    model = onnx.parser.parse_model(head + text)
    values = [numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items()]
    model.graph.initializer.extend(values)
    onnx.save(model, folder / "m.onnx")
    how: dict[str, Any] = {"devices": 2} if strategy is None else {"strategy": strategy}
    onnxpar.shard(folder / "m.onnx", folder / "m.par", **how)
    unsplit = ort.InferenceSession(folder / "m.onnx", providers=["CPUExecutionProvider"])
    with ThreadSession(folder / "m.par") as session:
        for feed in feeds:
            pairs = zip(session.run(None, feed), unsplit.run(None, feed), strict=True)
            for own, wanted in pairs:
                assert own.dtype == wanted.dtype
                np.testing.assert_array_equal(own, wanted)


X = [{"x": np.arange(24, dtype=np.float32).reshape(2, 12) - 7}]


@pytest.mark.parametrize("to", [17, 18, 19, 20, 16, 10, 3, 2, 5, 4, 12, 13, 9])
@pytest.mark.parametrize("op", ["Cast", "CastLike"])
def test_casts_of_floats(op: str, to: int, tmp_path: Path) -> None:
    kind = onnx.TensorProto.DataType.Name(to)
    like = onnx.helper.make_tensor("like", to, [1], [0])
    cast = f"q = Cast <to = {to}> (c)" if op == "Cast" else "q = CastLike (c, like)"
    text = f"m (float[2,12] x) => (float[2,12] y) {{ {cast} f = Cast <to = 1> (q) y = Add (x, f) }}"
    values = FLOATS if kind not in ("UINT8", "UINT16", "UINT32", "UINT64") else np.abs(FLOATS) % 200
    constants: dict[str, Any] = {"c": values}
    if op == "CastLike":
        constants["like"] = numpy_helper.to_array(like)
    agree(text, constants, X, tmp_path)


@pytest.mark.parametrize("to", [21, 22])
def test_casts_to_four_bits_round(to: int, tmp_path: Path) -> None:
    text = f"""m (float[2,12] x) => (float[2,12] y)
    {{ q = Cast <to = {to}> (c) f = Cast <to = 1> (q) y = Add (x, f) }}"""
    agree(text, {"c": np.linspace(0, 7.6, 12, dtype=np.float32)}, X, tmp_path)


def test_a_zero_point_of_eight_bit_floats(tmp_path: Path) -> None:
    text = """m (float[2,12] x) => (float[2,12] y) {
      p = Cast <to = 17> (z)  q = QuantizeLinear (x, s, p)  y = DequantizeLinear (q, s, p) }"""
    agree(text, {"z": np.float32(0), "s": np.float32(0.1)}, X, tmp_path)


@pytest.mark.parametrize("value", [np.int64(3), np.bool_(True), np.int64(0)])
def test_nonzero_of_a_scalar(value: Any, tmp_path: Path) -> None:
    text = "m (float[2,12] x) => (float[2,12] z, int64[a,b] y) { y = NonZero (c) z = Neg (x) }"
    agree(text, {"c": value}, X, tmp_path)


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_nonzero_of_a_computed_scalar(value: float, tmp_path: Path) -> None:
    text = """m (float[2,12] x) => (int64[a,b] y)
    { s = ReduceMax <keepdims = 0> (x)  y = NonZero (s) }"""
    agree(text, {}, [{"x": np.full((2, 12), value, np.float32)}], tmp_path, opset=17)


@pytest.mark.parametrize("kind", ["Sum", "Mean", "Prod", "SumSquare", "L1", "Max"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_sums_of_integers_that_overflow(kind: str, dtype: type, tmp_path: Path) -> None:
    values = LARGE.astype(dtype) if dtype is np.int32 else LARGE * 2**31
    element = "int32" if dtype is np.int32 else "int64"
    text = f"""m (float[2,12] x) => (float[2,12] z, {element}[] y)
    {{ y = Reduce{kind} <keepdims = 0> (c) z = Neg (x) }}"""
    agree(text, {"c": values}, X, tmp_path)


@pytest.mark.parametrize(
    "body, output, constants",
    [
        ("y = Cast <to = 8> (c)", "string[2]", {"c": np.array([True, False])}),
        ("y = Cast <to = 9> (c)", "bool[3]", {"c": np.array(["0", "1", "7"], object)}),
        ("y = ReduceMean (c, a)", "int64[1,2]", {"c": np.zeros((0, 2), "i8"), "a": [0]}),
        ("y = Pow (c, d)", "int64[1]", {"c": np.array([3]), "d": np.array([39])}),
        ("y = Pow (c, d)", "int32[1]", {"c": np.array([9], "i4"), "d": np.array([15], "i4")}),
        ("y = Div (c, d)", "int64[4]", {"c": [7, -7, 7, -7], "d": [2, 2, -2, -2]}),
        ("y = Mod (c, d)", "int64[4]", {"c": [7, -7, 7, -7], "d": [3, 3, -3, -3]}),
        (
            "y = BitShift <direction = 'LEFT'> (c, d)",
            "uint8[1]",
            {"c": np.uint8([3]), "d": np.uint8([9])},
        ),
    ],
)
def test_ops_that_onnx_computes_otherwise(
    body: str, output: str, constants: dict[str, Any], tmp_path: Path
) -> None:
    body = body.replace("'", '"')
    text = f"m (float[2,12] x) => (float[2,12] z, {output} y) {{ {body} z = Neg (x) }}"
    agree(text, constants, X, tmp_path)


BOUNDS = [(-100, -1000, -1), (-100, -7, -1), (-100, -100, -2), (-3, -100, -1), (9, -100, -1)]


@pytest.mark.parametrize("start, end, step", BOUNDS)
def test_slices_from_before_the_first_element(
    start: int, end: int, step: int, tmp_path: Path
) -> None:
    text = (
        "m (float[2,12] x) => (float[2,12] z, int64[n] y) { y = Slice (c, s, e, a, t) z = Neg (x) }"
    )
    bounds = {"s": [start], "e": [end], "a": [0], "t": [step]}
    agree(text, {"c": np.arange(10, 16), **bounds}, X, tmp_path)


@pytest.mark.parametrize("start, end, step", BOUNDS)
def test_slices_of_open_sizes(start: int, end: int, step: int, tmp_path: Path) -> None:
    """The shape of `y` is a slice of the shape of `x`; and `x` is cut after so many rows."""
    text = """m (float[N,3] x) => (y, float[K,3] z) {
      shape = Shape (x)  sizes = Slice (shape, s, e, zero, t)  y = Expand (one, sizes)
      first = Slice (sizes, zero, unit, zero, unit)  z = Slice (x, zero, first, zero, unit) }"""
    bounds = {
        "s": [start],
        "e": [end],
        "t": [step],
        "zero": [0],
        "unit": [1],
        "one": np.float32([1]),
    }
    feeds = [{"x": np.ones((n, 3), np.float32)} for n in (1, 2, 3, 8, 31)]
    agree(text, bounds, feeds, tmp_path, {"mesh": {"x": 2}, "tensors": {"x": ["x", None]}}, 18)


@pytest.mark.parametrize("opset", [10, 11, 12, 13])
def test_the_mask_of_a_dropout(opset: int, tmp_path: Path) -> None:
    """Until opset 11, onnxruntime gives false for all elements, though it drops none."""
    ratio = " <ratio = 0.3>" if opset < 12 else ""
    text = f"m (float[2,12] x) => (float[2,12] y, bool[2,12] k) {{ y, k = Dropout{ratio} (x) }}"
    agree(text, {}, X, tmp_path, opset=opset)


def test_a_loop_without_trips(tmp_path: Path) -> None:
    """onnxruntime gives its scan output no columns, as it does not infer how many there are."""
    text = """m (float[N,M] x, int64 k) => (float[N,M] y, float[T,M] z) { y, z = Loop (k, go, x)
      <body = b (int64 i, bool c, float[N,M] s) => (bool d, float[N,M] t, float[M] r)
      { d = Identity (c)  t = Tanh (s)  r = ReduceSum <keepdims = 0> (t, axes) }> }"""
    x = np.ones((4, 5), np.float32)
    feeds = [{"x": x, "k": np.array(0)}, {"x": x[:1], "k": np.array(0)}]
    agree(text, {"go": np.array(True), "axes": [0]}, feeds, tmp_path)


def test_integer_products_of_one_row(tmp_path: Path) -> None:
    text = "m (uint8[N,4] a, uint8[N] p) => (int32[N,6] y) { y = MatMulInteger (a, b, p) }"
    feeds = [{"a": np.full((1, 4), 9, np.uint8), "p": np.array([3], np.uint8)}]
    strategy = {"mesh": {"x": 2}, "tensors": {"a": ["x", None]}}
    agree(text, {"b": np.arange(24, dtype=np.int8).reshape(4, 6)}, feeds, tmp_path, strategy)


@pytest.mark.parametrize("size", [1, 3])
def test_scales_whose_number_is_open(size: int, tmp_path: Path) -> None:
    """onnxruntime takes one, or one for each column, and no other number."""
    text = """m (uint8[2,4] a, float[S] s) => (uint8[2,3] y)
    { y = QLinearMatMul (a, c, p, b, s, p, d, p) }"""
    constants = {"b": np.arange(12, dtype=np.uint8).reshape(4, 3), "p": np.array(3, np.uint8)}
    constants |= {"c": np.float32(0.1), "d": np.float32(0.2)}
    feed = {
        "a": np.arange(8, dtype=np.uint8).reshape(2, 4) * 20,
        "s": np.full(size, 0.3, np.float32),
    }
    for axis in (0, 1):
        split = {"mesh": {"x": 2}, "tensors": {"a": ["x" if i == axis else None for i in range(2)]}}
        agree(text, constants, [feed], tmp_path, split)


@pytest.mark.parametrize("opset", [11, 17, 18, 22])
def test_softplus_of_large_values_in_sixteen_bits(opset: int, tmp_path: Path) -> None:
    text = "m (float16[2,4] x) => (float16[2,4] y) { y = Softplus (x) }"
    x = np.array([[-9, 0, 20, 60], [80, 1000, 60000, 65504]], np.float16)
    strategy = {"mesh": {"x": 2}, "tensors": {"x": [None, "x"]}}
    agree(text, {}, [{"x": x}], tmp_path, strategy, opset)


@pytest.mark.parametrize("equation", ["bij,bjk->bik", "bij,bjk", "...ij,...jk->...ik"])
@pytest.mark.parametrize("split", ["a.1", "c.0", "c.2"])
def test_letters_that_broadcast(equation: str, split: str, tmp_path: Path) -> None:
    """onnx takes the size of the first operand; the mean divides by the number of elements."""
    text = f"""m (float[1,3,4] a, float[5,4,2] c) => (float[] z) {{
      y = Einsum <equation = "{equation}"> (a, c)  n = Size (y)  f = Cast <to = 1> (n)
      s = ReduceSum <keepdims = 0> (y)  z = Div (s, f) }}"""
    feed = {n: np.ones(s, np.float32) for n, s in (("a", (1, 3, 4)), ("c", (5, 4, 2)))}
    name, axis = split.split(".")
    layout = ["x" if i == int(axis) else None for i in range(3)]
    agree(text, {}, [feed], tmp_path, {"mesh": {"x": 2}, "tensors": {name: layout}})


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("pads", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_transposed_windows_that_pad_themselves(
    kernel: int, pads: str, axis: int, tmp_path: Path
) -> None:
    """onnxruntime does not add `output_padding` to these sizes, as onnx does, and gives fewer than
    a stride for each element if the kernel does not reach that far."""
    text = f"""m (float[2,3,5] x) => (float[] z) {{
      y = ConvTranspose <output_padding = [1], strides = [3], auto_pad = "{pads}"> (x, w)
      n = Size (y)  f = Cast <to = 1> (n)  s = ReduceSum <keepdims = 0> (y)  z = Div (s, f) }}"""
    x = np.arange(30, dtype=np.float32).reshape(2, 3, 5)
    layout = ["x" if i == axis else None for i in range(3)]
    strategy = {"mesh": {"x": 2}, "tensors": {"x": layout}}
    agree(text, {"w": np.ones((3, 2, kernel), np.float32)}, [{"x": x}], tmp_path, strategy)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_outputs_for_which_onnx_infers_other_sizes(axis: int, tmp_path: Path) -> None:
    """onnxruntime does not write them to memory of the sizes that its kernels compute."""
    text = """m (float[2,3,5] x) => (float[] z) { y = ConvTranspose
      <output_padding = [1], strides = [3], auto_pad = "SAME_UPPER"> (x, w)  z = Identity (y) }"""
    x = np.arange(30, dtype=np.float32).reshape(2, 3, 5)
    layout = ["x" if i == axis else None for i in range(3)]
    strategy = {"mesh": {"x": 2}, "tensors": {"x": layout}}
    agree(text, {"w": np.ones((3, 2, 3), np.float32)}, [{"x": x}], tmp_path, strategy)


@pytest.mark.parametrize("axes", ["[-2, -1]", "[2, 3]"])
@pytest.mark.parametrize("axis", [0, 2, 3])
def test_resizing_that_keeps_the_aspect_ratio(axes: str, axis: int, tmp_path: Path) -> None:
    """With axes from the last one, onnxruntime keeps the size."""
    text = f"""m (float[2,2,5,7] x) => (float[a,b,c,d] y) {{ y = Resize
      <keep_aspect_ratio_policy = "not_larger", axes = {axes}> (x, , , s) }}"""
    x = np.random.default_rng(3).standard_normal((2, 2, 5, 7), np.float32)
    layout = ["x" if i == axis else None for i in range(4)]
    agree(text, {"s": [3, 11]}, [{"x": x}], tmp_path, {"mesh": {"x": 2}, "tensors": {"x": layout}})


@pytest.mark.parametrize(("x", "slope"), [("1,6", "4,1"), ("6", "4,6"), ("n,1", "n,6"), ("1", "4")])
@pytest.mark.parametrize("split", ["x", "slope"])
def test_slopes_of_more_elements(x: str, slope: str, split: str, tmp_path: Path) -> None:
    """onnxruntime broadcasts x, too."""
    text = f"""m (float[{x}] x, float[{slope}] slope) => (float[] z, float[] total) {{
      y = PRelu (x, slope)  z = Abs (y)  total = ReduceSum <keepdims = 0> (y) }}"""
    shapes = [[int(d) for d in dims.replace("n", "4").split(",")] for dims in (x, slope)]
    values = [np.arange(np.prod(s), dtype=np.float32).reshape(s) - 2 for s in shapes]
    name, shape = (("x", shapes[0]), ("slope", shapes[1]))[split == "slope"]
    layout = [None] * (len(shape) - 1) + ["x"] if shape[-1] > 1 else ["x"] + [None] * len(shape[1:])
    strategy = {"mesh": {"x": 2}, "tensors": {name: layout}}
    agree(text, {}, [dict(zip(("x", "slope"), values, strict=True))], tmp_path, strategy)
