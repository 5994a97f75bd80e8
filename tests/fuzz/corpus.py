"""Models to mutate: tiny ones built here, one for each part of the format, and a few of models/."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto, helper, numpy_helper

MODELS = Path(__file__).parents[2] / "models"
FOUND = Path(__file__).parent / "found"
"""Files that were kept, because each caused a message of its own: a folder for each kind."""
LARGE = (
    "dlrm.legacy.dynamic",
    "lstm.legacy.training",
    "moe.legacy.training",
    "gpt2_fp16.dynamo.static",
)
"""Committed models that take part; all others in the corpus are tiny."""
DATA = "weights.bin"
"""The file of external data beside every mutated model."""

_TEXTS = {
    "product": """<ir_version: 8, opset_import: ["" : 17]>
        product (float[8,16] x) => (float[8,4] y)
        { [mm] h = MatMul(x, w) b = Add(h, c) y = Relu(b) }""",
    "open": """<ir_version: 8, opset_import: ["" : 18]>
        open (float[n,16] x) => (float[n,4] y)
        { h = MatMul(x, w) s = Shape(h) r = Reshape(h, s) y = Softmax<axis = -1>(r) }""",
    "control": """<ir_version: 8, opset_import: ["" : 18]>
        control (float[8,16] x, bool c, int64 n) => (float[8,16] y, float[8,16] z)
        { t = Constant<value = bool {1}>()
          y = If(c)<then_branch = yes () => (float[8,16] p) { p = Relu(x) },
                    else_branch = no () => (float[8,16] q) { q = Neg(x) }>
          z = Loop(n, t, y)<body = turn (int64 i, bool go, float[8,16] h)
              => (bool on, float[8,16] k) { on = Identity(go) k = Sigmoid(h) }> }""",
    "scan": """<ir_version: 8, opset_import: ["" : 18]>
        scan (float[4] s, float[6,4] x) => (float[4] e, float[6,4] y)
        { e, y = Scan<num_scan_inputs = 1, body = step (float[4] a, float[4] b)
              => (float[4] o, float[4] r) { o = Add(a, b) r = Mul(a, b) }>(s, x) }""",
    "sequences": """<ir_version: 8, opset_import: ["" : 18]>
        sequences (float[8,16] x) => (float[8,16] y, float[8,4] z)
        { k = Constant<value = int64 {4}>() i = Constant<value = int64 {1}>()
          q = SplitToSequence<axis = 1>(x, k) z = SequenceAt(q, i)
          y = ConcatFromSequence<axis = 1>(q) }""",
    "functions": """<ir_version: 8, opset_import: ["" : 18, "own" : 1]>
        functions (float[8,16] x) => (float[8,16] y) { h = own.twice(x) y = own.once(h) }
        <domain: "own", opset_import: ["" : 18, "own" : 1]>
        twice (a) => (b) { h = own.once(a) b = own.once(h) }
        <domain: "own", opset_import: ["" : 18]>
        once (a) => (b) { b = Relu(a) }""",
    "quantized": """<ir_version: 8, opset_import: ["" : 18]>
        quantized (float[8,16] x) => (float[8,4] y)
        { q, s, z = DynamicQuantizeLinear(x) h = MatMulInteger(q, wq, z, wz)
          f = Cast<to = 1>(h) t = Mul(s, ws) y = Mul(f, t) }""",
    "convolution": """<ir_version: 8, opset_import: ["" : 18]>
        convolution (float[4,3,8,8] x) => (float[4,6] y)
        { h = Conv<pads = [1,1,1,1], strides = [2,2]>(x, k) r = Relu(h)
          m = MaxPool<kernel_shape = [2,2]>(r) p = GlobalAveragePool(m)
          y = Flatten<axis = 1>(p) }""",
    "table": """<ir_version: 8, opset_import: ["" : 18]>
        table (int64[6] i) => (float[6,8] y, float[3,8] z, int64[3,8] at)
        { e = Gather(v, i) a = Constant<value_ints = [0]>() b = Constant<value_ints = [3]>()
          g = Slice(e, a, b, a) k = Constant<value_ints = [3]>()
          z, at = TopK<axis = 0>(e, k) y = Concat<axis = 0>(g, z) }""",
    "attention": """<ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>
        attention (float[2,6,16] x) => (float[2,6,16] y)
        { n = com.microsoft.SkipLayerNormalization(x, x, gamma, beta)
          g = com.microsoft.Gelu(n) y = Einsum<equation = "bsh,ho->bso">(g, o) }""",
    "old": """<ir_version: 3, opset_import: ["" : 9]>
        old (float[8,16] x) => (float[4,16] y)
        { h = Slice<axes = [0], starts = [0], ends = [4]>(x) d, m = Dropout<ratio = 0.5>(h)
          y = Softmax<axis = 1>(d) }""",
}
_SHAPES = {
    "w": (16, 4), "c": (4,), "k": (6, 3, 3, 3), "v": (7, 8), "gamma": (16,), "beta": (16,),
    "o": (16, 16),
}  # fmt: skip


def weight(name: str) -> TensorProto:
    """A stored tensor that the texts read."""
    random = np.random.default_rng(3)
    if name == "wq":
        array = random.integers(-100, 100, (16, 4)).astype(np.int8)
    elif name == "wz":
        array = np.zeros((), np.int8)
    elif name == "ws":
        array = np.float32(0.1)
    else:
        array = random.standard_normal(_SHAPES[name]).astype(np.float32)
    return numpy_helper.from_array(np.asarray(array), name)


def tiny(name: str) -> ModelProto:
    """One of the models of text, with weights for what nothing makes."""
    model = onnx.parser.parse_model(_TEXTS[name])
    made = {o for n in model.graph.node for o in n.output} | {p.name for p in model.graph.input}
    read = dict.fromkeys(i for n in model.graph.node for i in n.input if i not in made)
    model.graph.initializer.extend(weight(i) for i in read)
    return model


def external() -> ModelProto:
    """A product whose weight and a constant are in DATA."""
    model = tiny("product")
    stored = model.graph.initializer[0]
    _externalize(stored, "0", "256")
    node = model.graph.node.add(op_type="Constant", output=["k"])
    node.attribute.append(helper.make_attribute("value", weight("c")))
    _externalize(node.attribute[0].t, "256", "16")
    model.graph.node.append(helper.make_node("Add", ["b", "k"], ["j"]))
    for node in model.graph.node:
        if node.op_type == "Relu":
            node.input[0] = "j"
    return model


def _externalize(tensor: TensorProto, offset: str, length: str) -> None:
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", DATA), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=value)


def sparse() -> ModelProto:
    """A product with a sparse weight and a sparse constant."""
    model = tiny("product")
    del model.graph.initializer[:]
    model.graph.initializer.append(weight("c"))
    values = numpy_helper.from_array(np.float32([1, 2, 3]), "w")
    at = numpy_helper.from_array(np.int64([0, 9, 40]), "at")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, at, [16, 4]))
    pairs = numpy_helper.from_array(np.int64([[0, 1], [2, 3], [7, 0]]), "pairs")
    values = numpy_helper.from_array(np.float32([1, 2, 3]), "")
    constant = model.graph.node.add(op_type="Constant", output=["d"])
    entry = helper.make_sparse_tensor(values, pairs, [8, 4])
    constant.attribute.append(helper.make_attribute("sparse_value", entry))
    model.graph.node.append(helper.make_node("Mul", ["h", "d"], ["e"]))
    model.graph.node[1].input[0] = "e"
    return model


CORPUS: dict[str, Callable[[], ModelProto]] = {
    **{name: lambda name=name: tiny(name) for name in _TEXTS},
    "external": external,
    "sparse": sparse,
    **{name: lambda name=name: onnx.load(MODELS / f"{name}.onnx") for name in LARGE},
}


@functools.cache
def found_models() -> list[ModelProto]:
    """The kept models that can be parsed, to be broken once more."""
    models = []
    for file in sorted((FOUND / "model").glob("*.onnx")):
        with contextlib.suppress(DecodeError):
            models.append(onnx.load(file, load_external_data=False))
    return models
