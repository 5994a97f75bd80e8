"""Finds rows that are sorted by expert before a mixture, and brought back to their places after it.

    _, order = TopK(ids)                            # all of them: a sort
    x = tokens[order // k]; w = weights[order]
    y = mixture(x) * w
    inverse = scatter(order, 0 .. n - 1); z = y[inverse]

The mixture computes each row by itself, so the sort can be removed: then the rows can be split.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.graph.tensors import constant, tensor_shape
from onnxpar.load.dense_experts import DenseExperts

_NUMBERS: dict[str, Callable[..., Array]] = {
    "Add": operator.add,
    "And": np.logical_and,
    "Cast": lambda x: x * 1,
    "Div": operator.floordiv,
    "Equal": operator.eq,
    "Identity": lambda x: x,
    "Less": operator.lt,
    "Mod": operator.mod,
    "Mul": operator.mul,
    "Sub": operator.sub,
}
"""Ops on numbers of rows, which are not negative."""
_MOVES = frozenset(["Reshape", "Squeeze", "Unsqueeze"])
_ROW_WISE = frozenset(["Add", "Cast", "Div", "Identity", "Mul", "Sub", "Unsqueeze"])


@dataclass
class SortedRows:
    """A sort of rows, and the nodes that undo it.

    order   the number of the row at each place, [row]
    tokens  the rows of tokens, [token, column]; rows i * count to i * count + count - 1 are copies
            of token i
    count   the number of copies of each token
    sides   nodes that sort other tensors with one row for each, such as weights
    backs   nodes that bring rows back to their places
    """

    order: gs.Tensor
    tokens: gs.Tensor
    count: int
    sides: list[gs.Node]
    backs: list[gs.Node]


def find_sorted_rows(
    graph: gs.Graph, entry: gs.Tensor, result: gs.Tensor, readers: Collection[int]
) -> SortedRows | None:
    """Returns the sort (by expert) of the rows that enter a mixture of experts as `entry` and leave
    it as `result`. None
    if they are not sorted, or if sorted rows are read by a node that does not compute each row by
    itself. `readers` are the ids of the mixture's nodes, which may read the entry."""
    gather = entry.inputs[0] if entry.inputs else None
    order = _sort(gather.inputs[1]) if gather is not None and _gathers(gather) else None
    if gather is None or order is None or any(id(r) not in readers for r in entry.outputs):
        return None
    size, tokens = (tensor_shape(order) or (None,))[0], gather.inputs[0]
    count = (tensor_shape(tokens) or (None,))[0]
    if size is None or not count or size % count or len(tensor_shape(tokens) or ()) != 2:
        return None
    ends = _ends(graph, order, size)
    if ends is None:
        return None
    rows = SortedRows(order, tokens, size // count, [], [])
    for node, values in ends:
        if node.op == "ScatterND":
            backs = _backs(graph, node, size)
            if backs is None:
                return None
            rows.backs += backs
        elif node is gather:
            if not np.array_equal(values.reshape(-1), np.arange(size) // rows.count):
                return None
        elif np.array_equal(values.reshape(-1), np.arange(size)):
            rows.sides.append(node)
        else:
            return None
    return rows if _come_back(graph, rows, result, size) else None


def _gathers(node: gs.Node) -> bool:
    """True for a node that gathers along the first dimension."""
    return node.op in ("Gather", "GatherND") and not (
        node.attrs.get("axis", 0) or node.attrs.get("batch_dims", 0)
    )


def _sort(index: gs.Tensor) -> gs.Tensor | None:
    """Returns the order of the sort from which row numbers are computed: the indices of a TopK of
    all elements of a vector. None if they come from anything else."""
    while index.inputs:
        node = index.inputs[0]
        if node.op == "TopK" and index is node.outputs[1]:
            shape = tensor_shape(index)
            whole = shape == tensor_shape(node.inputs[0]) and shape is not None and len(shape) == 1
            return index if whole else None
        if node.op not in _NUMBERS and node.op not in _MOVES:
            return None
        computed = [t for t in node.inputs if t.inputs]
        if not computed:
            return None
        index = computed[0]
    return None


def _ends(graph: gs.Graph, order: gs.Tensor, size: int) -> list[tuple[gs.Node, Array]] | None:
    """Returns the Gathers and ScatterNDs that use row numbers computed from `order`, each with the
    numbers that it would use if the order were 0, 1, 2 ... `size` - 1. None if another node reads
    such numbers."""
    known: dict[int, Array] = {id(order): np.arange(size)}
    ends = []
    for node in graph.nodes:
        if not any(id(t) in known for t in node.inputs):
            continue
        if node.op in _MOVES:
            known[id(node.outputs[0])] = known[id(node.inputs[0])]
        elif node.op in _NUMBERS:
            read = [known.get(id(t), constant(t)) for t in node.inputs]
            if any(x is None for x in read):
                return None
            known[id(node.outputs[0])] = np.asarray(_NUMBERS[node.op](*read))
        elif (_gathers(node) or node.op == "ScatterND") and id(node.inputs[0]) not in known:
            ends.append((node, known[id(node.inputs[1])]))
        else:
            return None
    return ends if _all_read(graph, known, ends) else None


def _all_read(graph: gs.Graph, known: Collection[int], ends: list[tuple[gs.Node, Array]]) -> bool:
    """True if only nodes of the graph itself, no outputs and no bodies, read the tensors in `known`
    (by id) and the results of the nodes in `ends`."""
    members = {id(node) for node in graph.nodes}
    ports = {id(t) for t in graph.outputs}
    tensors = [t for node in graph.nodes for t in node.outputs if id(t) in known]
    tensors += [node.outputs[0] for node, _ in ends]
    return all(
        id(t) not in ports and all(id(reader) in members for reader in t.outputs) for t in tensors
    )


def _backs(graph: gs.Graph, scatter: gs.Node, size: int) -> list[gs.Node] | None:
    """Returns the nodes that bring sorted rows back: Gathers by the inverse of the sort's order of
    `size` rows, which the ScatterND `scatter` computes. None if it computes something else, or if
    the inverse is read in another way."""
    values = constant(scatter.inputs[2])
    is_inverse = values is not None and np.array_equal(values.reshape(-1), np.arange(size))
    if not is_inverse or scatter.attrs.get("reduction", "none") not in ("none", b"none"):
        return None
    inverse, backs = {id(scatter.outputs[0])}, []
    for node in graph.nodes:
        if not any(id(t) in inverse for t in node.inputs):
            continue
        if node.op in (*_MOVES, "Cast", "Identity"):
            inverse.add(id(node.outputs[0]))
        elif _gathers(node) and id(node.inputs[0]) not in inverse:
            backs.append(node)
        else:
            return None
    return backs


def _come_back(graph: gs.Graph, rows: SortedRows, result: gs.Tensor, size: int) -> bool:
    """True if each node between the sort and the nodes that bring rows back computes each row by
    itself. `size` is the number of rows."""
    backs = {id(node) for node in rows.backs}
    moved = {id(result), *(id(node.outputs[0]) for node in rows.sides)}
    ports = {id(t) for t in graph.outputs}
    for node in graph.nodes:
        read = [t for t in node.inputs if id(t) in moved]
        if not read or (id(node) in backs and id(node.inputs[1]) not in moved):
            continue
        others = [t for t in node.inputs if id(t) not in moved]
        (out,) = node.outputs if len(node.outputs) == 1 else (None,)
        if out is None or node.op not in _ROW_WISE or (tensor_shape(out) or (0,))[0] != size:
            return False
        if not all(isinstance(t, gs.Constant) and t.values.size == 1 for t in others):
            return False
        moved.add(id(out))
    return not ports & moved and all(id(node.inputs[0]) in moved for node in rows.backs)


def numbers(write: DenseExperts, rows: gs.Tensor) -> gs.Tensor:
    """Returns a new tensor 0, 1, 2 ..., with an element for each row of `rows`."""
    kind, zero, one = np.dtype(np.int64), np.array(0, np.int64), np.array(1, np.int64)
    sizes = write.add("Shape", [rows], kind, [len(rows.shape)])
    count = write.add("Gather", [sizes, zero], kind, [], axis=0)
    return write.add("Range", [zero, count, one], kind, [write.tokens])


def places(write: DenseExperts, order: gs.Tensor) -> gs.Tensor:
    """Returns a new tensor with the place of each row in an order: the inverse of `order`."""
    kind = np.dtype(np.int64)
    at = write.add("Unsqueeze", [order, np.array([1], np.int64)], kind, [write.tokens, 1])
    return write.add("ScatterND", [order, at, numbers(write, order)], kind, [write.tokens])


def copies(write: DenseExperts, sort: SortedRows) -> gs.Tensor:
    """Returns a new tensor of the rows before the sort: `count` copies of each token in turn."""
    tokens = sort.tokens
    count, width = tensor_shape(tokens) or ()
    each = write.add(
        "Unsqueeze", [tokens, np.array([1], np.int64)], tokens.dtype, [count, 1, width]
    )
    times, size = np.array([1, sort.count, 1], np.int64), [count, sort.count, width]
    repeated = write.add("Tile", [each, times], tokens.dtype, size)
    to = np.array([-1, width], np.int64)
    return write.add("Reshape", [repeated, to], tokens.dtype, [write.tokens, width])


def skip(node: gs.Node) -> None:
    """Lets all readers of a Gather read its operand instead."""
    old, new = node.outputs[0], node.inputs[0]
    for reader in list(old.outputs):
        for i, tensor in enumerate(reader.inputs):
            if tensor is old:
                reader.inputs[i] = new
