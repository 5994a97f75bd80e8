"""Finds attention that is written in basic ops: a matrix product, scales and masks, a Softmax, and
another matrix product.

The ops between the product and the Softmax are kept, as text: paged attention computes them for
each score.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import Size, constant, dtype_of, tensor_shape

SCORE = "."
"""The score so far, among the operands of a step."""
_FOR_EACH_SCORE = ("Add", "Sub", "Mul", "Div", "Max", "Min", "Tanh", "Neg", "Where")
_DTYPES = ("float32", "float64")
"""In 16 bits, sums of scores and masks are rounded, and hidden keys may not stay hidden."""


@dataclass
class ExportedAttention:
    """Attention that is written in basic ops.

    operands    queries (batch, heads, queries, width), keys (batch, heads, width, keys) and values
                (batch, heads, keys, width), without heads if there are three dimensions; then the
                operands of the steps
    steps       the ops between product and Softmax, as texts: "Mul . 3" multiplies the score so far
                (the dot) by operand 3
    is_guarded  True if a query that sees no key gets zeros, not NaN
    result      the weighted means of values
    nodes       the nodes that compute the result, the last one last
    """

    operands: list[gs.Tensor]
    steps: list[str]
    is_guarded: bool
    result: gs.Tensor
    nodes: list[gs.Node]


def find_attention(softmax: gs.Node, graph: gs.Graph) -> ExportedAttention | None:
    """Returns the attention around a Softmax; None if there is none, or if anything else reads its
    scores or weights."""
    shape = tensor_shape(softmax.outputs[0])
    if shape is None or len(shape) not in (3, 4):
        return None
    axis = softmax.attrs.get("axis", -1)
    if axis not in (-1, len(shape) - 1):
        return None
    search = _Search(shape, {id(t) for t in graph.outputs})
    scored, weighted = search.steps(softmax.inputs[0]), search.weighted(softmax.outputs[0])
    if scored is None or weighted is None:
        return None
    operands = [*scored[0].inputs, weighted[-1].inputs[1]]
    if not _fit(operands, shape):
        return None
    steps, score = list[str](), scored[0].outputs[0]
    for node in scored[1:]:
        steps.append(" ".join([node.op, *(_index(t, score, operands) for t in node.inputs)]))
        score = node.outputs[0]
    if not all(_spreads(tensor_shape(t), shape) for t in operands[3:]):
        return None
    is_guarded, nodes = len(weighted) > 1, [*scored, softmax, *weighted]
    return ExportedAttention(operands, steps, is_guarded, weighted[-1].outputs[0], nodes)


def _index(tensor: gs.Tensor, score: gs.Tensor, operands: list[gs.Tensor]) -> str:
    """Returns an operand of a step as text: a dot for `score`, else its index in `operands`, to
    which a new one is appended."""
    if tensor is score:
        return SCORE
    at = next((i for i, t in enumerate(operands) if t is tensor and i > 2), len(operands))
    if at == len(operands):
        operands.append(tensor)
    return str(at)


def _fit(operands: list[gs.Tensor], shape: tuple[Size, ...]) -> bool:
    """True if `operands` (queries, keys and values) fit each other: the same batch, and for keys
    and values one head, or as many heads as queries. `shape` is that of the scores."""
    query, key, value = (tensor_shape(t) or () for t in operands)
    if not len(query) == len(key) == len(value) == len(shape) or None in (*query, *key, *value):
        return False
    heads = [query[1], key[1], value[1]] if len(shape) == 4 else []
    is_shared = not heads or (heads[1] == heads[2] and heads[1] in (1, heads[0]))
    return query[0] == key[0] == value[0] and is_shared


def _spreads(own: tuple[Size, ...] | None, shape: tuple[Size, ...]) -> bool:
    """True if a tensor of the shape `own` can be broadcast to `shape`, that of the scores."""
    if own is None or len(own) > len(shape):
        return False
    return all(a in (1, b) for a, b in zip(own[::-1], shape[::-1], strict=False))


class _Search:
    """Follows scores and weights of attention, all of one `shape`, from node to node. Only the next
    node may read them; `kept` has the ids of the graph's outputs."""

    def __init__(self, shape: tuple[Size, ...], kept: Collection[int]) -> None:
        self.shape = shape
        self.kept = kept

    def steps(self, tensor: gs.Tensor) -> list[gs.Node] | None:
        """Returns the nodes that compute the scores `tensor`: a MatMul, then elementwise ops. None
        if other nodes compute it."""
        node = tensor.inputs[0] if tensor.inputs else None
        is_score = tensor_shape(tensor) == self.shape and str(dtype_of(tensor)) in _DTYPES
        if node is None or node.domain or self.reader(tensor) is None or not is_score:
            return None
        if node.op == "MatMul":
            return [node]
        if node.op not in _FOR_EACH_SCORE:
            return None
        for operand in node.inputs[node.op == "Where" :]:
            before = self.steps(operand)
            if before is not None:
                return [*before, node]
        return None

    def weighted(self, weights: gs.Tensor) -> list[gs.Node] | None:
        """Returns the MatMul of weights and values; before it, the IsNaN and the Where that replace
        NaN among the weights by zero, if there are any. None if there is no such MatMul."""
        guards = list[gs.Node]()
        if {node.op for node in weights.outputs} == {"IsNaN", "Where"}:
            guards = sorted(weights.outputs, key=lambda node: str(node.op))
            if not self._is_guard(weights, *guards[:2]):
                return None
            weights = guards[1].outputs[0]
        product = self.reader(weights)
        if product is None or product.op != "MatMul" or product.inputs[0] is not weights:
            return None
        return [*guards, product]

    def _is_guard(self, weights: gs.Tensor, is_nan: gs.Node, where: gs.Node) -> bool:
        """True if `is_nan` and `where` replace NaN among the weights by zero, and no other node
        reads the weights."""
        condition, zero, other = where.inputs
        value = constant(zero)
        is_read = self.reader(condition) is where and condition is is_nan.outputs[0]
        is_all = len(weights.outputs) == 2 and id(weights) not in self.kept and other is weights
        return is_read and is_all and value is not None and not np.any(value)

    def reader(self, tensor: gs.Tensor) -> gs.Node | None:
        """Returns the only node that reads a tensor, once; None if more or other nodes do, or it is
        an output."""
        is_inner = len(tensor.outputs) == 1 and id(tensor) not in self.kept
        return tensor.outputs[0] if is_inner else None
