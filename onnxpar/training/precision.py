"""Mixed precision: most activations of a model get 16 bits; weights keep their types.

As in PyTorch's autocast, matrix products, convolutions, attention and recurrent layers read and
return 16 bits; exponentials, softmaxes, norms, sums and losses read and return 32 bits. Any other
node returns 16 bits if all floats that it reads from other nodes have 16 bits, else 32 bits. So
values computed from inputs alone stay as they are until a product reads them. A product of integers
and small constants alone stays in 32 bits, too: it computes positions, which would be rounded.

Weights and single numbers take the type of the other operands, unless 16 bits cannot hold the
number. Bodies of control flow receive and return 32 bits. Gradients need no further rules, because
a Cast is differentiated like any other op.

A node that returns 16 bits is `plain` if it also computes in 16 bits. Any other such node computes
in 32 bits, and its results are rounded: 16 bits would lose too much, or onnxruntime has no kernel
for the CPU. For bfloat16, onnxruntime has kernels only for ops that move elements.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto

from onnxpar.base.errors import StrategyError
from onnxpar.graph.stored import FOLD_LIMIT
from onnxpar.graph.subgraphs import bodies
from onnxpar.graph.tensors import dtype_of, tensor_shape

PRECISIONS = ("float16", "bfloat16")
_PRODUCTS = ("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Attention", "LSTM", "GRU", "RNN")
"""Ops that read and return 16 bits; their weights are rounded, too."""
_NORMS = """
    Softmax LogSoftmax LayerNormalization RMSNormalization GroupNormalization LpNormalization
    MeanVarianceNormalization SoftmaxCrossEntropyLoss NegativeLogLikelihoodLoss"""
_SUMS = """
    ReduceSum ReduceProd ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSum ReduceLogSumExp CumSum
    CumProd"""
_CURVES = "Exp Log Pow Reciprocal Softplus Sin Cos Tan Asin Acos Sinh Cosh"
_OTHERS = "Cast SequenceConstruct SequenceInsert SplitToSequence"
_SINGLE = frozenset(f"{_NORMS} {_SUMS} {_CURVES} {_OTHERS}".split())
"""Ops that return 32 bits."""
_MEANS = """
    BatchNormalization InstanceNormalization LRN ReduceMean AveragePool GlobalAveragePool LpPool
    GlobalLpPool Resize"""
_SENSITIVE = frozenset(f"{_MEANS} Sqrt Div Erf LSTM GRU RNN".split())
"""Ops that compute in 32 bits also where they return 16."""
_MASK = 3
"""The operand of Attention that is added to the scores, or hides them."""
_MOVES = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Concat")


def check_precision(precision: str | None) -> None:
    """Checks the value of `--precision`. Errors: StrategyError if it is unknown."""
    if precision is not None and precision not in PRECISIONS:
        raise StrategyError(f"precision {precision!r}: give one of {', '.join(PRECISIONS)}")


def lower_precision(graph: gs.Graph, precision: str, weights: Collection[str]) -> None:
    """Makes a graph compute in 16 bits, in place. Graph inputs and outputs, and the constants named
    in `weights`, keep their types. `precision` is "float16" or "bfloat16"."""
    half = np.dtype(ml_dtypes.bfloat16 if precision == "bfloat16" else np.float16)
    _Lowering(graph, half, weights).scope(graph)


class _Lowering:
    """Makes a graph compute in 16 bits.

    half     the dtype of 16 bits
    weights  names of constants that keep their types
    narrow   ids of tensors that got 16 bits
    learned  ids of floats that depend on weights, or on inputs that are floats
    """

    def __init__(self, graph: gs.Graph, half: np.dtype[Any], weights: Collection[str]) -> None:
        self.opset = graph.opset
        self.half = half
        self.code = onnx.helper.np_dtype_to_tensor_dtype(half)
        self.weights = weights
        self.narrow: set[int] = set()
        self.learned: set[int] = set()
        self.largest = float(ml_dtypes.finfo(half).max)  # type: ignore[no-untyped-call]
        self.names = 0

    def scope(self, scope: gs.Graph) -> None:
        """Rewrites a graph or body, and all bodies in it."""
        self.learned.update(id(t) for t in scope.inputs if self._is_float(t))
        converted: dict[tuple[str, str], gs.Tensor] = {}
        nodes: list[gs.Node] = []
        for node in scope.nodes:
            for body in bodies(node):
                self.scope(body)
            if any(self._is_learned(t) for t in node.inputs) or bodies(node):
                self.learned.update(id(t) for t in node.outputs)
            rounds = self._rounds(node)
            is_plain = rounds and self._is_plain(node)
            if is_plain:
                self._retype(node)
            form = "half" if is_plain else "rounded" if rounds and _is_product(node) else "single"
            if node.op != "Cast":
                nodes += self._converted(node, form, converted)
            nodes.append(node)
            if rounds:
                nodes += self._narrowed(node, is_plain)
        scope.nodes = nodes
        for index, tensor in enumerate(scope.outputs):
            if id(tensor) in self.narrow:
                self._keep_output(scope, index, tensor)

    def _rounds(self, node: gs.Node) -> bool:
        """True if a node returns 16 bits."""
        if bodies(node) or node.op in _SINGLE:
            return False
        if _is_product(node):
            return any(self._is_learned(t) for t in node.inputs)
        floats = [t for t in node.inputs if self._is_float(t)]
        if node.op in ("BatchNormalization", "InstanceNormalization"):
            floats = floats[:1]  # the others are by channel
        constants = [t for t in floats if isinstance(t, gs.Constant)]
        others = [t for t in floats if not isinstance(t, gs.Constant) and tensor_shape(t) != ()]
        is_narrow = bool(others) and all(id(t) in self.narrow for t in others)
        return is_narrow and all(map(self._is_bendable, constants))

    def _is_float(self, tensor: gs.Tensor) -> bool:
        """True for a tensor that had 32 bits in the model, whether or not it has 16 now."""
        is_single = tensor.dtype is not None and dtype_of(tensor) == np.float32
        return bool(tensor.name) and (is_single or id(tensor) in self.narrow)

    def _is_learned(self, tensor: gs.Tensor) -> bool:
        """True if a tensor is a weight, or depends on weights or on inputs that are floats."""
        if isinstance(tensor, gs.Constant):
            return self._is_float(tensor) and self._is_weight(tensor)
        return id(tensor) in self.learned

    def _is_weight(self, constant: gs.Constant) -> bool:
        """True if a constant keeps its type: it is a weight, or too large to convert now."""
        return constant.name in self.weights or np.prod(constant.shape) > FOLD_LIMIT

    def _is_bendable(self, constant: gs.Constant) -> bool:
        """True for a constant that takes the type of the other operands: a weight, or a single
        number that 16 bits can hold."""
        if self._is_weight(constant):
            return True
        values = np.asarray(constant.values)
        within = np.abs(values) <= self.largest
        return values.size == 1 and bool((within | ~np.isfinite(values)).all())

    def _is_plain(self, node: gs.Node) -> bool:
        """True if a node that returns 16 bits also computes in 16 bits."""
        if self.half != np.float16:
            return node.op in _MOVES
        operands = [t for t in node.inputs if self._is_float(t) and not isinstance(t, gs.Constant)]
        if node.op in _SENSITIVE or not (
            _is_product(node) or all(id(t) in self.narrow for t in operands)
        ):
            return False
        try:
            schema = onnx.defs.get_schema(node.op, self.opset, node.domain or "")
        except onnx.defs.SchemaError:
            return False
        allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
        for tensors, formals in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
            for i, tensor in enumerate(tensors):
                types = allowed.get(formals[min(i, len(formals) - 1)].type_str, ())
                if self._is_float(tensor) and "tensor(float16)" not in types:
                    return False
        return True

    def _retype(self, node: gs.Node) -> None:
        """If a node creates numbers of 32 bits (its attribute `dtype`), makes it create 16 bits."""
        if node.attrs.get("dtype") == TensorProto.FLOAT:
            node.attrs["dtype"] = self.code

    def _converted(
        self, node: gs.Node, form: str, known: dict[tuple[str, str], gs.Tensor]
    ) -> list[gs.Node]:
        """Makes a node read its operands in a form: in 16 bits (`half`), in 32 bits (`single`), or
        rounded to 16 bits but stored in 32 (`rounded`). Returns the new casts. `known` has the
        tensors that are already converted in this scope, by name and form."""
        casts: list[gs.Node] = []
        for i, tensor in enumerate(node.inputs):
            if not self._is_float(tensor):
                continue
            is_rounded = form == "rounded" and id(tensor) in self.narrow
            is_mask = node.op == "Attention" and i == _MASK and id(tensor) not in self.narrow
            key = str(tensor.name), f"mask {form}" if is_mask else "single" if is_rounded else form
            if key not in known:
                read = self._bounded(tensor, casts) if is_mask else tensor
                known[key] = self._in_form(read, form, casts)
            node.inputs[i] = known[key]
        return casts

    def _bounded(self, mask: gs.Tensor, nodes: list[gs.Node]) -> gs.Tensor:
        """Returns a mask of numbers that 16 bits can hold, except infinities. The least number of
        32 bits hides a key only relative to the other keys of its row, minus infinity always: both
        stay different. `nodes` gets the new nodes."""
        least = np.array(-self.largest, np.float32)
        if isinstance(mask, gs.Constant) and not self._is_weight(mask):
            values = np.asarray(mask.values)
            bounded = np.where(np.isinf(values), values, np.maximum(values, least))
            return gs.Constant(self._name(mask, "bounded"), bounded)
        names = [self._name(mask, what) for what in ("infinite", "largest", "bounded")]
        types = (np.bool_, np.float32, np.float32)
        results = [gs.Variable(n, t, mask.shape) for n, t in zip(names, types, strict=True)]
        limit = gs.Constant(self._name(mask, "least"), least)
        operands = [[mask], [mask, limit], [results[0], mask, results[1]]]
        for op, inputs, result in zip(("IsInf", "Max", "Where"), operands, results, strict=True):
            nodes.append(gs.Node(op, f"precision/{result.name}", {}, inputs, [result]))
        return results[-1]

    def _in_form(self, tensor: gs.Tensor, form: str, casts: list[gs.Node]) -> gs.Tensor:
        """Returns a tensor in a form of `_converted`; `casts` gets the new casts."""
        is_narrow = id(tensor) in self.narrow
        if isinstance(tensor, gs.Constant) and not self._is_weight(tensor) and form != "single":
            values = np.asarray(tensor.values).astype(self.half)
            values = values if form == "half" else values.astype(np.float32)
            return gs.Constant(self._name(tensor, form), values)
        if form != "single" and not is_narrow:
            tensor, is_narrow = self._cast(tensor, self.half, casts), True
        return (
            self._cast(tensor, np.dtype(np.float32), casts)
            if is_narrow and form != "half"
            else tensor
        )

    def _cast(self, tensor: gs.Tensor, dtype: np.dtype[Any], casts: list[gs.Node]) -> gs.Tensor:
        """Returns a tensor in another dtype; `casts` gets the new Cast."""
        name = self._name(tensor, "cast")
        result = gs.Variable(name, dtype, tensor.shape)
        casts.append(_cast_node(name, tensor, result))
        return result

    def _name(self, tensor: gs.Tensor, what: str) -> str:
        """Returns a new name for a tensor that is made from `tensor`."""
        self.names += 1
        return f"{tensor.name}/{what}.{self.names}"

    def _narrowed(self, node: gs.Node, is_plain: bool) -> list[gs.Node]:
        """Gives the results of a node 16 bits. If the node computes in 32 bits (not `is_plain`),
        returns the casts that round its results."""
        casts = []
        for i, tensor in enumerate(node.outputs):
            if not self._is_float(tensor):
                continue
            tensor.dtype = self.half
            self.narrow.add(id(tensor))
            if not is_plain:
                wide = gs.Variable(self._name(tensor, "wide"), np.float32, tensor.shape)
                node.outputs[i] = wide
                casts.append(_cast_node(wide.name, wide, tensor))
        return casts

    def _keep_output(self, scope: gs.Graph, index: int, tensor: gs.Variable) -> None:
        """Keeps the type of a graph's output, by a Cast from the tensor of 16 bits."""
        output = gs.Variable(tensor.name, np.float32, tensor.shape)
        tensor.name = f"{tensor.name}/half"
        scope.nodes.append(_cast_node(tensor.name, tensor, output))
        scope.outputs[index] = output


def _is_product(node: gs.Node) -> bool:
    """True for an op of `_PRODUCTS`, such as MatMul, Conv or LSTM."""
    return node.op in _PRODUCTS and node.domain in (None, "", "ai.onnx")


def _cast_node(name: str, source: gs.Tensor, result: gs.Tensor) -> gs.Node:
    """Returns a Cast from `source` to the dtype of `result`."""
    to = onnx.helper.np_dtype_to_tensor_dtype(dtype_of(result))
    return gs.Node("Cast", f"precision/{name}", {"to": to}, [source], [result])
