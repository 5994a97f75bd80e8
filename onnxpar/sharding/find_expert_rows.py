"""Finds mixtures of experts, alone or with their backward pass: all nodes that compute rows behind
one mask, which chooses some rows.

    x: [expert, row, column] = Where(chosen, tokens, 0)       a mask
    ...    row-wise nodes, of both passes
    g: [expert, column, column] = MatMul(Transpose(x), dz)    the gradient of experts' matrices
    y: [row, column] = ReduceSum(Where(chosen, z, 0), axis 0)

Behind a mask, rows that are not chosen are zeros, and so are values computed from zeros alone. Only
tensors with such zeros may be summed over rows or experts, or be read by nodes outside the mixture.
So ranks need not compute or exchange rows that are not chosen.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence

import onnx_graphsurgeon as gs

from onnxpar.graph.collectives import DOMAIN
from onnxpar.graph.lazy_values import peeked
from onnxpar.graph.tensors import constant, given, numel, tensor_shape
from onnxpar.sharding.expert_rows import (
    ELEMENTWISE,
    INSIDE,
    MEETINGS,
    RANK,
    ExpertRows,
    Role,
    Shapes,
    flips,
)

_ALONG_COLUMNS = frozenset(
    ["Concat", "ReduceMax", "ReduceMean", "ReduceSum", "Slice", "Softmax", "Split"]
)
_RESHAPES = frozenset(["Expand", "Reshape", "Squeeze", "Unsqueeze"])
"""Ops that may change the dimensions behind the dimensions of experts and rows."""
_ZERO_IF_FIRST = _RESHAPES | frozenset(
    [*MEETINGS, "Div", "MatMul", "Pad", "ReduceSum", "Slice", "Split"]
)
_ZERO_IF_FIRST |= frozenset(
    ["Abs", "Cast", "Elu", "Erf", "Gelu", "HardSwish", "Identity", "LeakyRelu", "Mish", "Neg"]
)
_ZERO_IF_FIRST |= frozenset(
    ["QuickGelu", "Relu", "Selu", "Sign", "Softsign", "Sqrt", "Swish", "Tanh"]
)
"""Ops whose results are zero where the first operand is zero."""
_ZERO_IF_ALL = frozenset(["Add", "Concat", "Max", "Min", "Sub", "Sum"])
"""Ops whose results are zero where all operands are zero."""


def find_expert_rows(graph: gs.Graph, shapes: Shapes) -> Iterator[ExpertRows]:
    """Yields the mixtures of experts of a graph whose nodes are in execution order. No node is in
    two mixtures.

    A mixture has a mask, a product with a matrix for each expert, and a sum over experts. Tensors
    that nodes outside the mixture read do not depend on rows that are not chosen.
    """
    masks: dict[int, list[gs.Node]] = {}
    for node in graph.nodes:
        if _is_mask(node, shapes):
            masks.setdefault(id(node.inputs[0]), []).append(node)
    order = {id(node): i for i, node in enumerate(graph.nodes)} if masks else {}
    taken: set[int] = set()
    for same in masks.values():
        apart = {*taken}
        while True:
            search = _Search(graph, shapes, ExpertRows(same[0].inputs[0]), order, apart)
            leaks = search.fill(same)
            if not leaks or not search.is_complete:
                break
            apart |= leaks
        if search.is_complete:
            taken |= search.region.roles.keys()
            yield search.region


def _is_mask(node: gs.Node, shapes: Shapes) -> bool:
    """True for Where(chosen, x, 0) with `chosen` [expert, row, 1]."""
    if node.op != "Where" or node.domain not in (None, "", "ai.onnx"):
        return False
    shape = shapes.get(node.inputs[0].name, ())
    if len(shape) != RANK or shape[2] != 1:
        return False
    return _is_single(node.inputs[2]) and not peeked(node.inputs[2]).any()


class _Search:
    """Follows the rows behind masks, and gives a role to each node of the mixture `region`.

    order  the index of each node in the graph, by id
    apart  ids of nodes that must stay outside the mixture
    """

    def __init__(
        self, graph: gs.Graph, shapes: Shapes, region: ExpertRows, order: Mapping[int, int],
        apart: Collection[int],
    ) -> None:  # fmt: skip
        self.graph, self.shapes, self.region = graph, shapes, region
        self.order, self.apart = order, apart
        self.experts, self.rows, _ = shapes[region.chosen.name]

    @property
    def is_complete(self) -> bool:
        """True if the nodes form a mixture: there is a mask, a product with experts' matrices, and
        a sum over experts."""
        return {Role.MASK, Role.PRODUCT, Role.TOTAL} <= set(self.region.roles.values())

    def fill(self, masks: Sequence[gs.Node]) -> set[int]:
        """Collects the nodes behind `masks`. Returns the ids of collected nodes that cannot belong
        to the mixture: a node outside needs rows of their results that are not chosen. The caller
        then searches again without these nodes."""
        region = self.region
        todo = [self.order[id(node)] for node in masks]  # a heap, as they are in order
        seen = set(todo)
        while todo:
            node = self.graph.nodes[heapq.heappop(todo)]
            role = None if id(node) in self.apart else self._role(node)
            if role is None:
                continue
            for reader in (r for t in node.outputs for r in t.outputs):
                place = self.order.get(id(reader))
                if place is not None and place not in seen:
                    seen.add(place)
                    heapq.heappush(todo, place)
            region.nodes.append(node)
            region.roles[id(node)] = role
            if role is Role.FLIP:
                region.flipped[id(node.outputs[0])] = node.inputs[0]
            elif role is Role.MASK or role in INSIDE:
                is_zero = role is Role.MASK or self._keeps_zero(node)
                region.zeros.update((id(t), is_zero) for t in node.outputs)
        return set(self._leaks())

    def _leaks(self) -> Iterator[int]:
        """Yields the ids of nodes that cannot belong to the mixture, as for `fill`. Adds the
        tensors that other nodes outside may read to the mixture's `leaving`."""
        region = self.region
        ports = {id(t) for t in self.graph.outputs}
        for node in region.nodes:
            for tensor in node.outputs:
                if id(tensor) not in ports and all(id(r) in region.roles for r in tensor.outputs):
                    continue
                is_zero = region.zeros.get(id(tensor))
                if is_zero and len(self.shapes[tensor.name]) == RANK:
                    region.leaving.append(tensor)
                elif is_zero is not None or id(tensor) in region.flipped:
                    yield id(node)

    def _role(self, node: gs.Node) -> Role | None:
        """Returns the role of a node; None if the node does not belong to the mixture."""
        zeros, flipped = self.region.zeros, self.region.flipped
        if _is_mask(node, self.shapes) and node.inputs[0] is self.region.chosen:
            return Role.MASK if self._enters(*node.inputs[1:2], *node.outputs) else None
        if not any(id(t) in zeros or id(t) in flipped for t in node.inputs):
            return None
        if node.domain == DOMAIN and len(self.shapes[node.inputs[0].name]) == RANK:
            return MEETINGS.get(node.op)
        if node.domain not in (None, "", "ai.onnx") and node.op != "QuickGelu":
            return None
        first = node.inputs[0]
        if any(id(t) in flipped for t in node.inputs):
            return self._matrices(node)
        if node.op == "MatMul":
            return self._product(node)
        if flips(node):
            return Role.FLIP if len(self.shapes[first.name]) == RANK else None
        if node.op == "ReduceSum" and zeros.get(id(first)):
            shape = self.shapes[first.name]
            axes = _axes_of(node, len(shape))
            if len(shape) == RANK and axes in ([0], [1]):
                return Role.TOTAL if axes == [0] else Role.VECTORS
        return Role.ROWS if self._is_row_wise(node) else None

    def _matrices(self, node: gs.Node) -> Role | None:
        """Returns MATRICES for a product of transposed rows and rows, if rows that are not chosen
        are zeros in one of both; else None."""
        if node.op != "MatMul" or id(node.inputs[0]) not in self.region.flipped:
            return None
        left, right = self.region.flipped[id(node.inputs[0])], node.inputs[1]
        is_zero = [self.region.zeros.get(id(t)) for t in (left, right)]
        return Role.MATRICES if None not in is_zero and any(is_zero) else None

    def _product(self, node: gs.Node) -> Role | None:
        """Returns PRODUCT for a product of rows and a matrix for each expert, ROWS for a product
        with one matrix for all experts, and None for any other product."""
        left, right = node.inputs
        shape = self.shapes.get(right.name, ())
        is_outer = id(left) in self.region.zeros and id(right) not in self.region.zeros
        if not is_outer or len(shape) < 2 or len(self.shapes[left.name]) > RANK:
            return None
        if len(shape) == RANK and shape[0] == self.experts > 1:
            return Role.PRODUCT
        return Role.ROWS if all(size == 1 for size in shape[:-2]) else None

    def _enters(self, x: gs.Tensor, masked: gs.Tensor) -> bool:
        """True if a mask's operand `x` has rows [expert, row, column] of the mixture, or rows from
        outside that the mask gives to every expert. `masked` is the mask's result."""
        shape = self.shapes.get(x.name, ())
        return id(x) in self.region.zeros or (
            len(shape) in (RANK - 1, RANK)
            and shape[-2:] == self.shapes[masked.name][1:]
            and shape[:-2] in ((), (1,), (self.experts,))
        )

    def _is_known(self, tensor: gs.Tensor) -> bool:
        """True for an operand from outside the mixture if it is clear which of its elements belong
        to which row: a single value, or at most three dimensions."""
        shape = self.shapes.get(tensor.name)
        return _is_single(tensor) or (shape is not None and len(shape) <= RANK)

    def _is_row_wise(self, node: gs.Node) -> bool:
        """True if each row of a node's results depends on the same row of its operands alone."""
        zeros = self.region.zeros
        rows = [self.shapes.get(t.name, ()) for t in (*node.outputs, *node.inputs[:1])]
        if node.op in ELEMENTWISE:
            is_deep = any(len(shape) > RANK for shape in rows)
            others = [t for t in node.inputs if id(t) not in zeros]
            others_known = all(_is_single(t) if is_deep else self._is_known(t) for t in others)
            return others_known and self._has_rows(rows[0])
        if id(node.inputs[0]) not in zeros or not all(map(self._has_rows, rows)):
            return False
        if node.op == "Concat" and not all(id(t) in zeros for t in node.inputs):
            return False
        if node.op in ("Squeeze", "Unsqueeze"):
            axes = constant(node.inputs[1]) if given(node, 1) else None
            deep = max(map(len, rows))
            return axes is not None and all(int(axis) % deep > 1 for axis in axes)
        if node.op in _RESHAPES:
            return node.op == "Reshape" or len(rows[1]) == len(rows[0])
        if node.op == "Pad":
            return _pads_columns(node)
        along = _axes_of(node, len(rows[-1]))
        return along is not None and bool(along) and min(along) > 1

    def _has_rows(self, shape: tuple[int, ...]) -> bool:
        """True if a shape is [expert, row, ...]."""
        return len(shape) >= RANK and shape[:2] == (self.experts, self.rows)

    def _keeps_zero(self, node: gs.Node) -> bool:
        """True if the rows of a node's results that are not chosen are zeros."""
        read = node.inputs[1:3] if node.op == "Where" else [t for t in node.inputs if t.name]
        if node.op in _ZERO_IF_FIRST:
            return self._is_zero(read[0])
        if node.op in _ZERO_IF_ALL or node.op == "Where":
            return all(map(self._is_zero, read))
        return node.op == "Mul" and any(map(self._is_zero, read))

    def _is_zero(self, tensor: gs.Tensor) -> bool:
        """True if the rows of a tensor that are not chosen are zeros, or a constant is 0."""
        if id(tensor) in self.region.zeros:
            return self.region.zeros[id(tensor)]
        return _is_single(tensor) and not peeked(tensor).any()


def _is_single(tensor: gs.Tensor) -> bool:
    """True for a constant of one element, and for an omitted operand."""
    is_constant = isinstance(tensor, gs.Constant)
    return not tensor.name or (is_constant and numel(tensor_shape(tensor) or ()) == 1)


def _pads_columns(node: gs.Node) -> bool:
    """True if a node adds zeros behind the dimensions of experts and rows."""
    pads, mode = constant(node.inputs[1]), node.attrs.get("mode", "constant")
    value = given(node, 2)
    is_zero = value is None or (_is_single(value) and not peeked(value).any())
    if pads is None or given(node, 3) is not None or mode != "constant" or not is_zero:
        return False
    half = len(pads) // 2
    return not pads[[0, 1, half, half + 1]].any()


def _axes_of(node: gs.Node, rank: int) -> list[int]:
    """Returns the dimensions along which a node sums, concatenates or cuts its operand of `rank`
    dimensions; empty if they are unknown."""
    if node.op not in _ALONG_COLUMNS:
        return []
    if node.op in ("Concat", "Split", "Softmax"):
        return [int(node.attrs.get("axis", -1 if node.op == "Softmax" else 0)) % rank]
    axes = given(node, 3 if node.op == "Slice" else 1)
    if not isinstance(axes, gs.Constant):
        return []
    return [int(axis) % rank for axis in axes.values.reshape(-1)]
