"""Leaves out the rows of activations that a loss does not read.

A classifier reads one position of each sequence: Gather(x [batch, position, channel], 0, axis 1).
So most nodes of the last layer have to compute only this position, forwards and backwards. Nodes
whose results other positions read, such as keys and values, still compute all positions.

Sharding rules say which nodes compute some rows of their result from the same rows of operands: the
dimensions of these operands and of the result share a factor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from onnxpar.graph.collectives import DOMAIN
from onnxpar.graph.subgraphs import bodies, read_by
from onnxpar.graph.tensors import constant
from onnxpar.rules.notation import Spec, Var, expr_vars
from onnxpar.rules.rule import Rule, rule_of
from onnxpar.rules.segments import slice_bounds

_MOST = 0.5
"""The largest share of the rows that is worth a Gather; saving only a few rows would just make
sizes that do not divide."""
_SHAPED = ("Reshape", "Expand")
"""Ops whose operand 1 is the shape of the result."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a tensor: positions along a dimension (`axis`), in ascending order."""

    axis: int
    at: tuple[int, ...]

    def shape_of(self, shape: Sequence[int]) -> list[int]:
        """Returns the shape that a tensor of this shape has if only these rows are left."""
        return [len(self.at) if a == self.axis else int(s) for a, s in enumerate(shape)]


Positions = npt.NDArray[np.int64]
"""Indices of rows, as an array."""
Wants = Sequence[Rows | None]
"""The rows that a node reads of each operand; None: all of them."""


def drop_unread_rows(
    graph: gs.Graph, results: Iterable[gs.Tensor], weights: Collection[str]
) -> None:
    """Makes nodes compute only those rows of their results that other nodes read, in place. All
    shapes must be known, and random numbers must be hashes of their positions.

    results  tensors that are read whole
    weights  names of tensors that are read whole, too
    """
    kept = {id(t) for t in (*results, *graph.outputs)}
    readings: dict[int, list[Rows | None]] = defaultdict(list)
    wants: dict[int, Wants] = {}
    rows: dict[int, Rows] = {}
    for node in reversed(graph.nodes):
        if not any(id(t) in kept or readings[id(t)] for t in node.outputs):
            continue  # no node needs it
        asked = None if id(node.outputs[0]) in kept else _common(readings[id(node.outputs[0])])
        passed = _passed(node, asked, weights) if asked is not None else None
        if passed is not None and asked is not None:
            rows[id(node.outputs[0])] = asked
        wants[id(node)] = passed or _selected(node)
        for i, tensor in enumerate(read_by(node)):
            if tensor.name:
                wanted = wants[id(node)]
                readings[id(tensor)].append(wanted[i] if i < len(wanted) else None)
    _Change(graph, wants, rows).run()


def _common(readings: Sequence[Rows | None]) -> Rows | None:
    """Returns the rows that all readers of a tensor read; None if they differ."""
    return readings[0] if len(set(readings)) == 1 else None


def _selected(node: gs.Node) -> Wants:
    """Returns the rows that a node reads of each operand: some rows of the first operand, if a
    Gather or Slice picks few of them; else (), which stands for all rows."""
    axis, positions = _picked(node)
    unique = tuple(sorted({*positions.reshape(-1).tolist()}))
    is_few = unique and len(unique) <= _MOST * node.inputs[0].shape[axis]
    return [Rows(axis, unique)] if is_few else ()


def _picked(node: gs.Node) -> tuple[int, Positions]:
    """Returns (dimension, positions) that a Gather with constant indices, or a Slice along one
    dimension, picks of its first operand. For any other node, there are no positions."""
    if node.op == "Gather" and not node.domain:
        shape, indices = node.inputs[0].shape, constant(node.inputs[1])
        axis = node.attrs.get("axis", 0) % len(shape)
        if indices is not None:
            return axis, indices % shape[axis]
    elif node.op == "Slice":
        bounds = slice_bounds(node) or {}
        if len(bounds) == 1:
            ((axis, bound),) = bounds.items()
            return axis, np.array(range(*bound), np.int64)
    return 0, np.zeros(0, np.int64)


def _passed(node: gs.Node, asked: Rows, weights: Collection[str]) -> Wants | None:
    """Returns the rows of each operand from which a node computes the rows `asked` of its result.
    None if it needs other rows, too, or would read only some rows of one of the `weights`."""
    results = [t for t in node.outputs if t.name]
    if len(results) > 1 or node.domain == DOMAIN or bodies(node):
        return None
    rule = rule_of(node)
    spec = rule.outputs[0]
    factor = spec[asked.axis] if spec else None
    if spec is None or not isinstance(factor, Var) or not _is_free(rule, factor.name):
        return None
    if set(rule.ranks.local) - ({1} if node.op in _SHAPED else set()):
        return None
    wanted: list[Rows | None] = []
    for i, operand in enumerate(rule.inputs):
        axes = _axes(operand, factor.name)
        if axes is None or (axes and (node.inputs[i].name in weights or i in rule.ranks.constants)):
            return None
        wanted.append(Rows(axes[0], asked.at) if axes else None)
    return wanted if len(_axes(spec, factor.name) or ()) == 1 else None


def _is_free(rule: Rule, factor: str) -> bool:
    """True if a node computes each element along a factor from the same element alone, and all in
    the same way."""
    tied = {f for group in (*rule.co_sharded, *rule.rings) for f in group}
    bound = {
        *rule.whole,
        *rule.reduce,
        *rule.ranks.lowered,
        *rule.communicating,
        *rule.contiguous,
    }
    return factor not in tied | bound


def _axes(spec: Spec | None, factor: str) -> list[int] | None:
    """Returns [dimension] if one dimension of an operand is the factor; [] if the operand does not
    have the factor; None if the factor is only a part of a dimension, or in several."""
    having = [a for a, e in enumerate(spec or ()) if factor in expr_vars(e)]
    if len(having) > 1 or any((spec or ())[a] != Var(factor) for a in having):
        return None
    return having


class _Change:
    """Changes nodes so that tensors have only the rows that are read.

    wants  the rows that each node reads of its operands, by the id of the node
    rows   the rows that are left of results, by the id of the tensor
    """

    def __init__(
        self, graph: gs.Graph, wants: Mapping[int, Wants], rows: Mapping[int, Rows]
    ) -> None:
        self.graph = graph
        self.wants = wants
        self.rows = rows
        self.nodes: list[gs.Node] = []
        self.gathered: dict[tuple[int, Rows], gs.Variable] = {}

    def run(self) -> None:
        """Changes all nodes of the graph."""
        picks = {id(n): _picked(n) for n in self.graph.nodes if self._reads_rows(n)}
        for node in self.graph.nodes:
            if id(node) in picks:
                self._pick(node, *picks[id(node)])
            elif node.outputs and id(node.outputs[0]) in self.rows:
                self._narrow(node)
            self.nodes.append(node)
        self.graph.nodes = self.nodes

    def _reads_rows(self, node: gs.Node) -> bool:
        """True if a node picks rows from an operand of which only some rows are left, so that its
        indices must change."""
        is_left = bool(node.inputs) and id(node.inputs[0]) in self.rows
        return is_left and id(node.outputs[0]) not in self.rows

    def _narrow(self, node: gs.Node) -> None:
        """Makes a node compute only the rows that are left of its result."""
        for i, want in enumerate(self.wants[id(node)]):
            if want is not None and self.rows.get(id(node.inputs[i])) != want:
                node.inputs[i] = self._rows_of(node.inputs[i], want)
        y = node.outputs[0]
        y.shape = self.rows[id(y)].shape_of(y.shape)
        if node.op in _SHAPED:
            name = f"{node.name}/shape"
            node.inputs[1] = gs.Constant(name, np.array(y.shape, np.int64))

    def _rows_of(self, tensor: gs.Tensor, want: Rows) -> gs.Variable:
        """Returns some rows of a tensor that still has all of them, by a Gather."""
        key = id(tensor), want
        if key not in self.gathered:
            name = f"{tensor.name}/rows.{len(self.gathered)}"
            picked = gs.Variable(name, tensor.dtype, want.shape_of(tensor.shape))
            at = gs.Constant(f"{name}.at", np.array(want.at, np.int64))
            self.nodes.append(gs.Node("Gather", name, {"axis": want.axis}, [tensor, at], [picked]))
            self.gathered[key] = picked
        return self.gathered[key]

    def _pick(self, node: gs.Node, axis: int, positions: Positions) -> None:
        """Makes a Gather or Slice that picked `positions` pick them among the rows that are left of
        its operand."""
        at = np.asarray(np.searchsorted(self.rows[id(node.inputs[0])].at, positions), np.int64)
        node.op, node.attrs = "Gather", {"axis": axis}
        node.inputs = [node.inputs[0], gs.Constant(f"{node.name}/at", at)]
