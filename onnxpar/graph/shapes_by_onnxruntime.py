"""Asks onnxruntime about one node at a time: types and shapes of ops that ONNX does not know, and
results for known operands.

onnxruntime has schemas of its own (com.microsoft, SimplifiedLayerNormalization ...) and infers with
them when it creates a session. If a size stays open though all shapes of operands are known, one
run on zeros finds it, unless values of an operand could be sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import AttributeProto, NodeProto, OperatorSetIdProto, TensorProto, TypeProto

from onnxpar.base.arrays import Array
from onnxpar.base.custom_ops import quiet_options
from onnxpar.graph.attribute_weights import ML

RUN_LIMIT = 1 << 22
"""A node is run to find its shapes only if its operands have at most this many elements in all."""

_STATE = ort.capi.onnxruntime_pybind11_state
REFUSED = (
    _STATE.Fail,
    _STATE.InvalidArgument,
    _STATE.InvalidGraph,
    _STATE.NotImplemented,
    _STATE.RuntimeException,
)
"""Exceptions of onnxruntime for a model that it cannot load or run."""
_GROWN = {"GroupQueryAttention": (1, 2), "SparseAttention": (1, 2)}
"""Results that are caches, by op: an operand gives their length, but onnxruntime infers that of the
input cache."""
_NO_SIZES = frozenset(("DecoderMaskedMultiHeadAttention",))
"""Ops whose integer operands do not determine sizes of their results."""
_OF_VALUES = frozenset(("DynamicTimeWarping", "Tokenizer", "Unique"))
"""Ops whose result sizes depend on operands' values of any type."""
_SMALL = 4096
"""Results of a one-node model are cached if the model has at most this many bytes."""
_SIZES = (TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL)
_Shape = list[int | str | None]


class RuntimeShapes:
    """Answers of onnxruntime about single nodes, cached by node, operand types and values."""

    def __init__(self, opsets: Iterable[OperatorSetIdProto], ir_version: int) -> None:
        self._opsets = list(opsets)
        self._ir_version = ir_version
        self._known: dict[bytes, list[TypeProto | None]] = {}
        self._computed: dict[bytes, list[Any] | None] = {}

    def refusal(
        self,
        node: NodeProto,
        types: Mapping[str, TypeProto],
        values: Mapping[str, TensorProto],
    ) -> str | None:
        """Returns why onnxruntime does not load a node with operands of these types (and `values`,
        where known); None if it does, or if a type is unknown."""
        if any(n and (n not in types or not types[n].HasField("tensor_type")) for n in node.input):
            return None
        try:
            _session(self._one_node(node, types, values))
        except REFUSED as error:
            return str(error).splitlines()[0]
        return None

    def infer(
        self,
        node: NodeProto,
        types: Mapping[str, TypeProto],
        values: Mapping[str, TensorProto],
    ) -> dict[str, TypeProto]:
        """Returns the types of the results that onnxruntime can infer, by name."""
        if any(a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for a in node.attribute):
            return {}
        if any(n and (n not in types or not types[n].HasField("tensor_type")) for n in node.input):
            return {}
        model = self._one_node(node, types, values)
        key = model.SerializeToString(deterministic=True)
        if key not in self._known:
            self._known[key] = _result_types(model)
        pairs = zip(node.output, self._known[key], strict=True)
        return {name: type_ for name, type_ in pairs if name and type_ is not None}

    def evaluate(
        self,
        node: NodeProto,
        types: Mapping[str, TypeProto],
        values: Mapping[str, TensorProto],
    ) -> list[Any] | None:
        """Returns the results of a node whose operands are all known. An empty list: onnxruntime
        refuses these operands, or NumPy lacks the type of a result. None: onnxruntime has no kernel
        for the node. Results for small operands are cached, because layers repeat nodes."""
        model = self._one_node(node, types, values)
        if model.ByteSize() > _SMALL:
            return results_of(model)
        key = model.SerializeToString(deterministic=True)
        if key not in self._computed:
            self._computed[key] = results_of(model)
        return self._computed[key]

    def _one_node(
        self,
        node: NodeProto,
        types: Mapping[str, TypeProto],
        values: Mapping[str, TensorProto],
    ) -> onnx.ModelProto:
        """Returns a model of this node alone. Its tensors are named by position, so that equal
        nodes give equal models and share one cached answer."""
        names = {n: f"i{i}" for i, n in enumerate(dict.fromkeys(n for n in node.input if n))}
        alone = NodeProto()
        alone.CopyFrom(node)
        alone.name = alone.doc_string = ""
        del alone.input[:], alone.output[:], alone.metadata_props[:]
        alone.input.extend(names.get(n, "") for n in node.input)
        alone.output.extend(f"o{i}" if n else "" for i, n in enumerate(node.output))
        inputs, stored = [], []
        for name, own in names.items():
            if name in values:
                stored.append(TensorProto())
                stored[-1].CopyFrom(values[name])
                stored[-1].name = own
            else:
                inputs.append(onnx.helper.make_value_info(own, types[name]))
        outputs = [onnx.helper.make_empty_tensor_value_info(o) for o in alone.output if o]
        graph = onnx.helper.make_graph([alone], "shapes", inputs, outputs, stored)
        return onnx.helper.make_model(
            graph, opset_imports=self._opsets, ir_version=self._ir_version
        )


@cache
def is_known(op: str, domain: str) -> bool:
    """True if onnxruntime has a schema for the op."""
    return any(s.name == op and s.domain == domain for s in _STATE.get_all_operator_schema())


@cache
def is_own_domain(domain: str) -> bool:
    """True if onnxruntime knows this domain, such as com.microsoft."""
    return domain == "ai.onnx" or any(s.domain == domain for s in _STATE.get_all_operator_schema())


@cache
def _schemas() -> Mapping[tuple[str, str], Any]:
    """The newest schema of every op that onnxruntime knows, by (domain, name)."""
    schemas = sorted(_STATE.get_all_operator_schema(), key=lambda s: int(s.since_version))
    return {(s.domain, s.name): s for s in schemas}


def operator_ports(domain: str, op: str) -> tuple[list[str], list[str]]:
    """Returns onnxruntime's names for the operands and for the results of an op; empty lists for an
    unknown op."""
    schema = _schemas().get((domain, op))
    if schema is None:
        return [], []
    return [port.name for port in schema.inputs], [port.name for port in schema.outputs]


def _session(model: onnx.ModelProto) -> Any:
    """Returns an onnxruntime session of a one-node model. Errors: those in REFUSED."""
    options = quiet_options(1, optimized=False)
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def results_of(
    model: onnx.ModelProto, feeds: Mapping[str, Array] | None = None
) -> list[Any] | None:
    """Runs a model of one node; returns its results. An empty list: onnxruntime refuses its
    operands, or NumPy lacks the type of a result. None: onnxruntime has no kernel for the node."""
    try:
        session = _session(model)
    except REFUSED:
        return None
    try:
        results = session.run(None, dict(feeds or {}))
    except (*REFUSED, RuntimeError):
        return []
    pairs = zip(results, session.get_outputs(), strict=True)
    return [_typed(result, output.type) for result, output in pairs]


def _typed(result: Any, text: str) -> Any:
    """Returns a result with the dtype that `text` (`tensor(float8e4m3fn)`) says: onnxruntime
    returns float8e4m3fn as uint8."""
    type_ = _of_text(text)
    if not isinstance(result, np.ndarray) or type_ is None or not type_.HasField("tensor_type"):
        return result
    dtype = onnx.helper.tensor_dtype_to_np_dtype(type_.tensor_type.elem_type)
    return result.view(dtype) if result.dtype.itemsize == dtype.itemsize else result


def _result_types(model: onnx.ModelProto) -> list[TypeProto | None]:
    """Returns the types of the results of a one-node model; None for each type that is unknown, and
    for all if onnxruntime has no kernel."""
    outputs = model.graph.node[0].output
    try:
        session = _session(model)
    except REFUSED:
        return [None] * len(outputs)
    shapes: list[_Shape | None] = [list(o.shape) for o in session.get_outputs()]
    if any(not isinstance(s, int) for shape in shapes for s in shape or ()) or not all(shapes):
        # onnxruntime reports an unknown rank as it reports a scalar. The sizes of results of a
        # custom op may depend on any value.
        node = model.graph.node[0]
        tried = _run(session, model.graph) if is_known(node.op_type, node.domain) else None
        shapes = tried or [shape or None for shape in shapes]
    left = iter(zip(session.get_outputs(), shapes, strict=True))
    types = [_type(*next(left)) if name else None for name in outputs]
    for i in _GROWN.get(model.graph.node[0].op_type, ()):
        cache_type = types[i] if i < len(types) else None
        if cache_type is not None:
            cache_type.tensor_type.shape.dim[2].Clear()
    return types


def _type(output: Any, shape: _Shape | None) -> TypeProto | None:
    """Returns the ONNX type of an output of a session, with this shape if it is a tensor; None for
    an unknown kind of type."""
    kind, _, inner = output.type.removesuffix(")").partition("(")
    return _of_text(output.type) if kind != "tensor" else _tensor_type(inner, shape)


def _of_text(text: str) -> TypeProto | None:
    """Returns the ONNX type of a text such as `seq(map(int64,tensor(float)))`; None for an unknown
    kind of type."""
    kind, _, inner = text.removesuffix(")").partition("(")
    if kind == "tensor":
        return _tensor_type(inner, None)
    if kind == "map":
        key, _, value_text = inner.partition(",")
        value = _of_text(value_text)
        return value and onnx.helper.make_map_type_proto(_element(key), value)
    makers = {
        "seq": onnx.helper.make_sequence_type_proto,
        "optional": onnx.helper.make_optional_type_proto,
    }
    element = _of_text(inner) if kind in makers else None
    return element and makers[kind](element)


def _tensor_type(element: str, shape: _Shape | None) -> TypeProto:
    return onnx.helper.make_tensor_type_proto(_element(element), shape)


def _element(text: str) -> int:
    return int(TensorProto.DataType.Value(text.upper()))


def _may_be_sizes(node: NodeProto, element: int) -> bool:
    """True if the values of an operand with this element type may determine sizes of the node's
    results."""
    if node.op_type in _NO_SIZES or node.domain == ML:
        return False
    return element in _SIZES or node.op_type in _OF_VALUES


def _zeros(dims: list[int], dtype: np.dtype[Any]) -> Any:
    return np.full(dims, "", object) if dtype.hasobject else np.zeros(dims, dtype)


def _run(session: Any, graph: onnx.GraphProto) -> list[_Shape | None] | None:
    """Returns the shapes of the results of a run on zeros; None if they could depend on values, if
    the operands are too large, or if the run fails."""
    feeds = {}
    for port in graph.input:
        tensor = port.type.tensor_type
        dims = [d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim]
        may_be_sizes = _may_be_sizes(graph.node[0], tensor.elem_type)
        if not tensor.HasField("shape") or -1 in dims or may_be_sizes:
            return None
        feeds[port.name] = (dims, onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    if sum(int(np.prod(dims)) for dims, _ in feeds.values()) > RUN_LIMIT:
        return None
    try:
        results = session.run(None, {n: _zeros(dims, t) for n, (dims, t) in feeds.items()})
    except REFUSED:
        return None
    return [list(np.shape(r)) for r in results]
