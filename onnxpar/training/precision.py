"""Mixed precision: activations of a model get 16 bits; weights keep their types.

A node is either `plain`: it computes in 16 bits, or `widened`: it computes in 32 bits and rounds
its results to 16. Sums, exponentials and normalizations are widened, as in PyTorch's autocast. With
bfloat16, all nodes except those that only move or create elements are widened, because onnxruntime
has no bfloat16 kernels for the CPU. Gradients need no further rules, because a Cast is
differentiated like any other op.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto

from onnxpar.errors import StrategyError
from onnxpar.ir.stored import FOLD_LIMIT
from onnxpar.ir.subgraphs import all_nodes, bodies, scopes
from onnxpar.ir.tensors import dtype_of

PRECISIONS = ("float16", "bfloat16")
_NORMALIZATIONS = """
    LayerNormalization RMSNormalization BatchNormalization InstanceNormalization GroupNormalization
    LpNormalization MeanVarianceNormalization LRN Softmax LogSoftmax"""
_SUMS = """
    ReduceSum ReduceMean ReduceProd ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSum ReduceLogSumExp
    CumSum AveragePool GlobalAveragePool LpPool GlobalLpPool Resize LSTM GRU RNN"""
_CURVES = """
    Exp Log Pow Sqrt Reciprocal Div Erf Softplus SoftmaxCrossEntropyLoss
    NegativeLogLikelihoodLoss"""
_SENSITIVE = frozenset(f"{_NORMALIZATIONS} {_SUMS} {_CURVES}".split())
"""Ops that lose too much precision in 16 bits."""
_CONTRACTIONS = ("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum")
"""Ops whose weights are rounded to 16 bits, too."""
_MOVES = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Concat")
_CREATES = ("ConstantOfShape", "EyeLike", "RandomNormal", "RandomUniform")


def check_precision(precision: str | None) -> None:
    """Errors: StrategyError for an unknown precision."""
    if precision is not None and precision not in PRECISIONS:
        raise StrategyError(f"precision {precision!r}: give one of {', '.join(PRECISIONS)}")


def lower_precision(graph: gs.Graph, precision: str, weights: Collection[str]) -> None:
    """Makes a graph compute in 16 bits, in place; graph inputs and outputs, and the constants named
    in `weights`, keep their types. `check_precision` has accepted the precision."""
    half = np.dtype(ml_dtypes.bfloat16 if precision == "bfloat16" else np.float16)
    _Lowering(graph, half, weights).run()


def _is_single(tensor: gs.Tensor) -> bool:
    return bool(tensor.name) and tensor.dtype is not None and dtype_of(tensor) == np.float32


Pair = tuple[list[gs.Node], gs.Tensor]
Convert = Callable[[gs.Node, gs.Tensor, bool], Pair | None]


class _Lowering:
    def __init__(self, graph: gs.Graph, half: np.dtype[Any], weights: Collection[str]) -> None:
        self.graph = graph
        self.half = half
        self.code = onnx.helper.np_dtype_to_tensor_dtype(half)
        self.weights = weights
        self.lowered: set[int] = set()
        self.largest = float(ml_dtypes.finfo(half).max)  # type: ignore[no-untyped-call]
        self.names = 0

    def run(self) -> None:
        """Rewrites the graph and all bodies, outer graphs first."""
        made = [t for node in all_nodes(self.graph) for t in node.outputs]
        given = [t for s in scopes(self.graph) if s is not self.graph for t in s.inputs]
        found = [t for t in (*made, *given) if _is_single(t)]
        for tensor in found:
            self.lowered.add(id(tensor))
        outputs = [(i, t) for i, t in enumerate(self.graph.outputs) if id(t) in self.lowered]
        for i, tensor in outputs:
            self._keep_output(i, tensor)
        inputs = [t for t in self.graph.inputs if _is_single(t)]
        for scope in list(scopes(self.graph)):
            self._scope(scope, {id(t) for t in inputs})
        for tensor in found:
            tensor.dtype = self.half

    def _keep_output(self, index: int, tensor: gs.Variable) -> None:
        """Keeps the type of a graph output, by a Cast from the 16-bit tensor."""
        output = gs.Variable(tensor.name, tensor.dtype, tensor.shape)
        tensor.name = f"{tensor.name}/half"
        self.graph.nodes.append(self._cast(tensor, output, TensorProto.FLOAT))
        self.graph.outputs[index] = output

    def _cast(self, source: gs.Tensor, result: gs.Tensor, to: int) -> gs.Node:
        self.names += 1
        return gs.Node("Cast", f"precision/{self.names}", {"to": to}, [source], [result])

    def _scope(self, scope: gs.Graph, inputs: set[int]) -> None:
        nodes: list[gs.Node] = []
        wide: dict[int, gs.Tensor] = {}
        narrow: dict[int, gs.Tensor] = {}
        for node in scope.nodes:
            if node.name.startswith("precision/"):
                nodes.append(node)
            elif bodies(node) or self._is_plain(node):
                self._retype(node)
                self._read(node, nodes, narrow, inputs, self._narrowed)
                nodes.append(node)
            else:
                self._read(node, nodes, wide, inputs, self._widened)
                nodes.append(node)
                nodes += self._rounded(node)
        scope.nodes = nodes

    def _is_plain(self, node: gs.Node) -> bool:
        """True if a node computes in 16 bits."""
        if node.op == "Gather" and isinstance(node.inputs[0], gs.Constant):
            return False  # rounds the rows, not the whole table
        if self.half != np.float16:
            return node.op in (*_MOVES, *_CREATES, "Cast")
        if node.op in _SENSITIVE:
            return False
        try:
            schema = onnx.defs.get_schema(node.op, self.graph.opset, node.domain or "")
        except onnx.defs.SchemaError:
            return False
        allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
        for tensors, formals in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
            for i, tensor in enumerate(tensors):
                types = allowed.get(formals[min(i, len(formals) - 1)].type_str, ())
                if _is_single(tensor) and "tensor(float16)" not in types:
                    return False
        return True

    def _retype(self, node: gs.Node) -> None:
        """Changes the type attributes of a node to 16 bits, if it creates or casts numbers."""
        for key in ("to", "dtype"):
            if node.attrs.get(key) == TensorProto.FLOAT:
                node.attrs[key] = self.code
        value = node.attrs.get("value")
        if node.op == "ConstantOfShape":
            number = np.zeros(1, np.float32) if value is None else value.values
            if number.dtype == np.float32:
                node.attrs["value"] = gs.Constant("", self._bounded(number).astype(self.half))

    def _read(
        self,
        node: gs.Node,
        nodes: list[gs.Node],
        known: dict[int, gs.Tensor],
        inputs: set[int],
        convert: Convert,
    ) -> None:
        for i, tensor in enumerate(node.inputs):
            if not _is_single(tensor):
                continue
            if id(tensor) not in known:
                found = convert(node, tensor, id(tensor) in inputs)
                if found is None:
                    continue
                casts, known[id(tensor)] = found
                nodes += casts
            node.inputs[i] = known[id(tensor)]

    def _narrowed(self, node: gs.Node, tensor: gs.Tensor, is_input: bool) -> Pair | None:
        """Returns the 16-bit replacement of an operand of a plain node, with the nodes that compute
        it; None if no replacement is needed."""
        if isinstance(tensor, gs.Constant) and not self._is_weight(tensor):
            self.names += 1
            name = f"{tensor.name}/half.{self.names}"
            return [], gs.Constant(name, self._bounded(np.asarray(tensor.values)).astype(self.half))
        if not isinstance(tensor, gs.Constant) and not is_input:
            return None  # already has 16 bits
        return self._converted(tensor, self.half, self.code)

    def _is_weight(self, constant: gs.Constant) -> bool:
        """True if a constant is a weight or too large to convert now; it keeps its type."""
        return constant.name in self.weights or np.prod(constant.shape) > FOLD_LIMIT

    def _widened(self, node: gs.Node, tensor: gs.Tensor, is_input: bool) -> Pair | None:
        """Returns the 32-bit replacement of an operand of a widened node, with the nodes that
        compute it; None if no replacement is needed."""
        is_weight = isinstance(tensor, gs.Constant)
        if is_weight and not self._is_weight(tensor):
            values = np.asarray(tensor.values)
            bounded = self._bounded(values)
            if np.array_equal(bounded, values, equal_nan=True):
                return None
            self.names += 1
            return [], gs.Constant(f"{tensor.name}/bounded.{self.names}", bounded)
        if is_input or (is_weight and node.op not in _CONTRACTIONS):
            return None
        if is_weight:
            first, rounded = self._converted(tensor, self.half, self.code)
            second, wide = self._converted(rounded, np.dtype(np.float32), TensorProto.FLOAT)
            return [*first, *second], wide
        return self._converted(tensor, np.dtype(np.float32), TensorProto.FLOAT)

    def _converted(self, tensor: gs.Tensor, dtype: np.dtype[Any], code: int) -> Pair:
        self.names += 1
        result = gs.Variable(f"{tensor.name}/cast.{self.names}", dtype, tensor.shape)
        return [self._cast(tensor, result, code)], result

    def _rounded(self, node: gs.Node) -> list[gs.Node]:
        """Returns casts that round the results of a widened node to 16 bits."""
        casts = []
        for i, tensor in enumerate(node.outputs):
            if id(tensor) in self.lowered:
                self.names += 1
                wide = gs.Variable(f"{tensor.name}/wide.{self.names}", np.float32, tensor.shape)
                node.outputs[i] = wide
                casts.append(self._cast(wide, tensor, self.code))
        return casts

    def _bounded(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns the values, clipped so that finite numbers, such as the large ones in masks, stay
        finite in 16 bits."""
        bounded = np.clip(values, -self.largest, self.largest)
        return np.where(np.isinf(values), values, bounded).astype(np.float32)
