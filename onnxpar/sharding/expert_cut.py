"""Decides which nodes of a mixture of experts run at the ranks of experts, if ranks exchange rows.
A row has the values of one token.

x = Where(chosen, tokens, 0)                  at the rank of the tokens
...    nodes with weights of experts          at the rank of the expert
ReduceSum(Where(chosen, z * weight, 0))       at the rank of the tokens

A training step has several such parts: its backward pass takes gradients of z to the experts, and
gradients of x back. The nodes at the experts are one side of a minimum cut: the rows that cross
between ranks have the fewest bytes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import onnx_graphsurgeon as gs
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from onnxpar.graph.interchange import is_weight
from onnxpar.graph.tensors import element_bytes
from onnxpar.sharding.expert_rows import ELEMENTWISE, RANK, ExpertRows, Role, Shapes

_PREPARES = frozenset(
    [
        "Cast",
        "DequantizeLinear",
        "Identity",
        "Range",
        "Reshape",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    ]
)
"""Ops that prepare stored values for the nodes that read them."""
_OF_EXPERTS = (Role.PRODUCT, Role.MATRICES, Role.VECTORS)
_TOKENS, _EXPERTS = 0, 1
_MOST_FLOW = 2**29
"""The most flow of a cut that may be: scipy counts in 32 bits."""


def nodes_at_experts(rows: ExpertRows, shapes: Shapes) -> tuple[gs.Node, ...]:
    """Returns the nodes of a mixture that run at the ranks of experts if ranks exchange rows, in
    graph order. Empty if ranks cannot exchange rows: some node needs both a weight of its expert
    and a value of its row from outside the mixture.

    Nodes with weights of experts, and sums of gradients for these weights, run at the experts;
    nodes that read values of rows from outside the mixture, at the tokens. The bytes of crossing
    rows decide about all other nodes. Of two sides with equal bytes, a node runs at the experts if
    a node with weights depends on it, else at the tokens.
    """
    stored: dict[int, bool] = {}
    owners = [n for n in rows.nodes if _is_owner(n, rows, shapes, stored)]
    needed = _upstream(owners, rows.nodes)
    cut = _Cut(rows.nodes)
    for node in rows.nodes:
        if reads_rows(node, rows, shapes):
            cut.fix(node, _TOKENS)
        elif not needed[id(node)]:
            cut.prefer_tokens(node)
        for tensor in node.outputs:
            if id(tensor) in rows.zeros or id(tensor) in rows.flipped:
                cut.add(tensor, node, _bytes_per_row(tensor, rows, shapes))
    for node in owners:
        cut.fix(node, _EXPERTS)
    return cut.nodes_at_experts()


def reads_rows(node: gs.Node, rows: ExpertRows, shapes: Shapes) -> bool:
    """True if a node reads or writes rows outside the mixture, so it must run at the ranks of
    tokens: a mask, a sum over experts, or an elementwise node with an operand of rows from
    outside."""
    if rows.roles[id(node)] in (Role.MASK, Role.TOTAL):
        return True
    count = shapes[rows.chosen.name][1]
    others = [t for t in node.inputs if id(t) not in rows.zeros]
    return node.op in ELEMENTWISE and any(shapes.get(t.name, ())[-2:-1] == (count,) for t in others)


def moved_tensors(rows: ExpertRows, at_experts: Collection[gs.Node]) -> list[gs.Tensor]:
    """Returns the tensors of rows that cross between the ranks of tokens and the ranks of experts,
    if the nodes `at_experts` run at the ranks of experts."""
    inside = {id(node) for node in at_experts}
    leaving = {id(tensor) for tensor in rows.leaving}
    return [
        t for node in rows.nodes for t in node.outputs if id(t) in rows.zeros and (
            any((id(reader) in inside) != (id(node) in inside) for reader in t.outputs)
            or (id(t) in leaving and id(node) in inside)
        )
    ]  # fmt: skip


def crosses_to_experts(node: gs.Node) -> bool:
    """True if an all-to-all takes rows to the ranks of their experts: it splits the dimension of
    experts and joins the dimension of rows. False if it takes rows back."""
    return (node.attrs.get("split_axis"), node.attrs.get("concat_axis")) == (0, 1)


def between_exchanges(rows: ExpertRows, shapes: Shapes) -> frozenset[int] | None:
    """Returns the ids of the nodes of a rank's graph that run at the ranks of experts: the nodes
    between an all-to-all to the experts and the next all-to-all back.

    None if ranks cannot exchange the chosen rows alone: a node reads rows from both sides, or is on
    a side where it cannot run (`nodes_at_experts` says which nodes run where).
    """
    inside: set[int] = set()
    for node in rows.nodes:
        role = rows.roles[id(node)]
        makers = [m for t in node.inputs if id(t) in rows.zeros or id(t) in rows.flipped
                  for m in t.inputs]  # fmt: skip
        sides = {id(maker) in inside for maker in makers} or {False}
        is_inside = True in sides
        if len(sides) > 1:
            return None
        if role is Role.CROSSING:
            if crosses_to_experts(node) is is_inside:
                return None
            is_inside = not is_inside
        elif reads_rows(node, rows, shapes) if is_inside else role in _OF_EXPERTS:
            return None
        if is_inside:
            inside.add(id(node))
    is_read = any(id(maker) in inside for tensor in rows.leaving for maker in tensor.inputs)
    return None if is_read else frozenset(inside)


def is_stored(tensor: gs.Tensor, known: dict[int, bool]) -> bool:
    """True if a tensor is stored with the model, or is computed from stored tensors by ops such as
    Cast or Transpose alone. `known` keeps results by the tensor's id."""
    if id(tensor) not in known:
        known[id(tensor)] = False
        maker = tensor.inputs[0] if tensor.inputs else None
        known[id(tensor)] = is_weight(tensor) or (
            maker is not None
            and maker.op in _PREPARES
            and all(is_stored(t, known) for t in maker.inputs if t.name)
        )
    return known[id(tensor)]


def _is_owner(node: gs.Node, rows: ExpertRows, shapes: Shapes, stored: dict[int, bool]) -> bool:
    """True if a node must run at the ranks of experts: it multiplies by a matrix of each expert,
    sums gradients for each expert, or reads a stored operand [expert, ..., ...]. `stored` is the
    `known` of `is_stored`."""
    experts = shapes[rows.chosen.name][0]
    return rows.roles[id(node)] in _OF_EXPERTS or any(
        t.name in shapes
        and len(shapes[t.name]) == RANK
        and shapes[t.name][0] == experts > 1
        and is_stored(t, stored)
        for t in node.inputs
    )


def _upstream(owners: Iterable[gs.Node], nodes: Collection[gs.Node]) -> Mapping[int, bool]:
    """For each of the `nodes`, by id: True if it is one of the owners, or an owner depends on
    it."""
    needed = {id(node): False for node in nodes}
    todo = list(owners)
    while todo:
        node = todo.pop()
        if needed.get(id(node)) is False:
            needed[id(node)] = True
            todo += [maker for t in node.inputs for maker in t.inputs]
    return needed


def _bytes_per_row(tensor: gs.Tensor, rows: ExpertRows, shapes: Shapes) -> int | None:
    """Returns the bytes of one row of a tensor [expert, row, column]; None if ranks cannot exchange
    its rows."""
    shape = shapes[tensor.name]
    is_rows = len(shape) == RANK and id(tensor) in rows.zeros
    return math.ceil(math.prod(shape[2:]) * element_bytes(tensor)) if is_rows else None


class _Cut:
    """A minimum cut between nodes at the ranks of tokens and nodes at the ranks of experts. The
    capacity of an edge is the number of bytes per row that cross if the cut separates its ends."""

    def __init__(self, nodes: Collection[gs.Node]) -> None:
        self.nodes = nodes
        self.number = {id(node): i for i, node in enumerate(nodes, 2)}
        self.count = len(nodes) + 2
        self.weight = len(nodes) + 1
        """The capacity of a byte: more than that of all preferences together."""
        self.edges: dict[tuple[int, int], int | None] = {}
        """Capacities by start and end; None for an edge that the cut must not cross."""

    def fix(self, node: gs.Node, side: int) -> None:
        """Puts a node on a side, `_TOKENS` or `_EXPERTS`, for good."""
        at = self.number[id(node)]
        self.edges[(at, _EXPERTS) if side == _EXPERTS else (_TOKENS, at)] = None

    def prefer_tokens(self, node: gs.Node) -> None:
        """Puts a node at the tokens if the cut has as many bytes with the node on either side."""
        self.edges[_TOKENS, self.number[id(node)]] = 1

    def add(self, tensor: gs.Tensor, producer: gs.Node, size: int | None) -> None:
        """Adds a tensor of `size` bytes per row. Its rows cross once if its producer and its
        readers are not all on one side; with `size` None, they must be on one side. Readers outside
        the mixture are at the tokens."""
        first, last = self.count, self.count + 1
        self.count += 2
        self.edges[first, last] = None if size is None else size * self.weight
        for node in (producer, *tensor.outputs):
            at = self.number.get(id(node), _TOKENS)
            self.edges[at, first] = self.edges[last, at] = None

    def nodes_at_experts(self) -> tuple[gs.Node, ...]:
        """Returns the nodes on the experts' side of the minimum cut, in graph order; empty if every
        cut separates nodes that must be on one side."""
        unit = sum(size or 0 for size in self.edges.values()) // _MOST_FLOW + 1
        sizes = [size and -(-size // unit) for size in self.edges.values()]
        total = sum(size or 0 for size in sizes)
        capacities = np.array([total + 1 if size is None else size for size in sizes], np.int32)
        starts, ends = np.array([*self.edges]).T
        graph = csr_array((capacities, (starts, ends)), (self.count, self.count))
        result = maximum_flow(graph, _TOKENS, _EXPERTS)
        if result.flow_value > total:
            return ()
        free = csr_array(graph - result.flow > 0)
        reached = {*breadth_first_order(free, _TOKENS, return_predecessors=False).tolist()}
        return tuple(node for node in self.nodes if self.number[id(node)] not in reached)
