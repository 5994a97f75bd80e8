"""Finds mixtures of experts: nodes that compute rows between masks; a mask chooses some rows.

    x: [expert, row, column] = Where(chosen, tokens, 0)
    ...    row-wise nodes
    y: [row, column] = ReduceSum(Where(chosen, z, 0), axis 0)

Rows that are not chosen add zeros to y, so ranks need not compute or send them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import onnx_graphsurgeon as gs

from onnxpar.graph.lazy_values import peeked
from onnxpar.graph.subgraphs import all_nodes
from onnxpar.graph.tensors import constant, given, numel, tensor_shape
from onnxpar.load.row_program import BINARY, UNARY

Shapes = Mapping[str, tuple[int, ...]]
"""The global shapes of tensors, by name."""
RANK = 3
"""The number of dimensions: expert, row, column."""
EXCHANGE = "AllToAll"
"""The collective that takes rows to the ranks of their experts, and back."""
_ELEMENTWISE = UNARY | BINARY
_ALONG_COLUMNS = frozenset(["Slice", "Split", "Softmax", "ReduceMean", "ReduceSum", "ReduceMax"])


@dataclass
class ChosenRows:
    """A mixture in a rank's graph.

    chosen  [expert, row, 1]: true if the expert computes the row
    enter   the Where nodes that give experts their rows
    inside  the row-wise nodes, in graph order
    leave   the Where after the row-wise nodes
    total   the ReduceSum that reads `leave`
    """

    chosen: gs.Tensor
    leave: gs.Node
    total: gs.Node
    enter: list[gs.Node] = field(default_factory=list)
    inside: list[gs.Node] = field(default_factory=list)

    @property
    def nodes(self) -> list[gs.Node]:
        """All nodes of the mixture."""
        return [*self.enter, *self.inside, self.leave, self.total]


def known_shapes(graph: gs.Graph) -> Shapes:
    """The shapes of all tensors of a graph that have no open sizes."""
    shapes = {}
    for node in all_nodes(graph):
        for tensor in (*node.inputs, *node.outputs):
            shape = tensor_shape(tensor) if tensor.name else None
            sizes = tuple(size for size in shape or () if isinstance(size, int))
            if shape is not None and len(sizes) == len(shape):
                shapes[tensor.name] = sizes
    return shapes


def find_chosen_rows(graph: gs.Graph, shapes: Shapes) -> Iterator[ChosenRows]:
    """Yields the mixtures of a graph: all nodes between the masks are row-wise, or exchange rows
    between ranks."""
    outputs = {id(t) for t in graph.outputs}
    order = {id(node): i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if not is_mask(node, shapes) or len(node.outputs[0].outputs) != 1:
            continue
        (total,) = node.outputs[0].outputs
        if not _sums_experts(total) or id(node.outputs[0]) in outputs or id(total) not in order:
            continue
        mixture = ChosenRows(node.inputs[0], node, total)
        if _fill(mixture, shapes, outputs, order):
            yield mixture


def is_mask(node: gs.Node, shapes: Shapes) -> bool:
    """True for Where(chosen, x, 0) on [expert, row, column]."""
    if node.op != "Where" or node.domain not in (None, "", "ai.onnx"):
        return False
    shape = shapes.get(node.inputs[0].name, ())
    if len(shape) != RANK or shape[2] != 1 or not isinstance(node.inputs[2], gs.Constant):
        return False
    is_one = numel(tensor_shape(node.inputs[2]) or ()) == 1
    return is_one and not peeked(node.inputs[2]).any()


def _sums_experts(node: gs.Node) -> bool:
    if node.op != "ReduceSum" or node.attrs.get("keepdims", 1):
        return False
    axes = given(node, 1)
    value = None if axes is None else constant(axes)
    return value is not None and bool(value.tolist() == [0])


def _fill(
    mixture: ChosenRows, shapes: Shapes, outputs: Collection[int],
    order: Mapping[int, int],
) -> bool:  # fmt: skip
    """Collects the nodes between the masks; False if a node is not row-wise, or if a node outside
    the mixture reads its results."""
    inside: dict[int, gs.Node] = {}
    enter: dict[int, gs.Node] = {}
    todo = [mixture.leave.inputs[1]]
    while todo:
        tensor = todo.pop()
        node = tensor.inputs[0] if tensor.inputs else None
        if node is None or id(node) in inside or id(node) in enter:
            continue
        if is_mask(node, shapes) and node.inputs[0] is mixture.chosen:
            enter[id(node)] = node
        elif id(node) in order and _computes_rows(node, mixture.chosen, shapes):
            inside[id(node)] = node
            todo += [t for t in node.inputs if t.name and not isinstance(t, gs.Constant)]
    _shrink(inside, enter)
    members = {*inside, *enter, id(mixture.leave)}
    for node in (*inside.values(), *enter.values()):
        for tensor in node.outputs:
            if id(tensor) in outputs or any(id(r) not in members for r in tensor.outputs):
                return False
    mixture.inside = sorted(inside.values(), key=lambda n: order[id(n)])
    mixture.enter = sorted(enter.values(), key=lambda n: order[id(n)])
    start = mixture.leave.inputs[1]
    if not enter or not start.inputs or id(start.inputs[0]) not in inside:
        return False
    return all(_is_row_wise(n, members, shapes) for n in mixture.inside) and all(
        n.inputs[1].name in shapes for n in mixture.enter
    )


def _computes_rows(node: gs.Node, chosen: gs.Tensor, shapes: Shapes) -> bool:
    """True if all results are [expert, row, column] with the mask's experts and rows, or if the
    node transposes the experts' matrices."""
    experts, rows, _ = shapes[chosen.name]
    for tensor in node.outputs:
        shape = shapes.get(tensor.name, ())
        if len(shape) != RANK or shape[0] != experts:
            return False
        if shape[1] != rows and not flips(node):
            return False
    return True


def flips(node: gs.Node) -> bool:
    """True if a node transposes the experts' matrices."""
    return node.op == "Transpose" and list(node.attrs.get("perm") or ()) == [0, 2, 1]


def _shrink(inside: dict[int, gs.Node], enter: Mapping[int, gs.Node]) -> None:
    """Removes from `inside` the nodes that do not depend on the entering rows, except
    transpositions of matrices."""
    depends: dict[int, bool] = {}

    def reads_rows(node: gs.Node) -> bool:
        if id(node) not in depends:
            depends[id(node)] = False
            makers = [maker for t in node.inputs for maker in t.inputs]
            depends[id(node)] = any(
                id(m) in enter or (id(m) in inside and reads_rows(m)) for m in makers
            )
        return depends[id(node)]

    def is_matrix(node: gs.Node) -> bool:
        readers = node.outputs[0].outputs
        return flips(node) and all(r.op == "MatMul" and id(r) in inside for r in readers)

    for i in [i for i, n in inside.items() if not reads_rows(n) and not is_matrix(n)]:
        del inside[i]


def _is_row_wise(node: gs.Node, members: Collection[int], shapes: Shapes) -> bool:
    """True if each row of the results depends on the same row of the operands alone."""
    if node.op == EXCHANGE:
        return len(node.inputs) == 1
    if node.domain not in (None, "", "ai.onnx") and node.op != "QuickGelu":
        return False
    if flips(node):
        return node.inputs[0].name in shapes
    if node.op == "MatMul":
        weight = node.inputs[1]
        maker = weight.inputs[0] if weight.inputs else None
        is_matrix = maker is None or id(maker) not in members or flips(maker)
        return is_matrix and weight.name in shapes
    if node.op in _ELEMENTWISE:
        others = [
            t for t in node.inputs if t.name and not (t.inputs and id(t.inputs[0]) in members)
        ]
        return all(
            (isinstance(t, gs.Constant) and set(tensor_shape(t) or ()) <= {1})
            or (t.name in shapes and len(shapes[t.name]) <= RANK)
            for t in others
        )
    return axes_of(node) == [2]


def axes_of(node: gs.Node, keeps: bool = True) -> list[int] | None:
    """The dimensions along which a node works; None if they are unknown, or, with `keeps`, if the
    node removes them."""
    if node.op not in _ALONG_COLUMNS:
        return None
    if node.op in ("Split", "Softmax"):
        return [int(node.attrs.get("axis", 0 if node.op == "Split" else -1)) % RANK]
    axes = given(node, 3 if node.op == "Slice" else 1)
    removes = node.op.startswith("Reduce") and not node.attrs.get("keepdims", 1)
    if not isinstance(axes, gs.Constant) or (keeps and removes):
        return None
    return [int(a) % RANK for a in axes.values.reshape(-1)]


@dataclass(frozen=True)
class Crossing:
    """The nodes of a mixture whose rows cross between ranks.

    there   the exchanges that take rows to the ranks of experts
    inside  the nodes between the exchanges, which run at the ranks of experts
    back    the exchange that takes results to the ranks of the rows
    after   the nodes after `back`, before the sum over experts
    """

    there: tuple[gs.Node, ...]
    inside: tuple[gs.Node, ...]
    back: gs.Node
    after: tuple[gs.Node, ...]


def crossing(mixture: ChosenRows) -> Crossing | None:
    """The exchanges of a mixture's rows between ranks; None if ranks exchange other tensors."""
    entered = {id(node) for node in mixture.enter}
    exchanges = [node for node in mixture.inside if node.op == EXCHANGE]
    there = [n for n in exchanges if n.inputs[0].inputs and id(n.inputs[0].inputs[0]) in entered]
    backs = [node for node in exchanges if not any(node is n for n in there)]
    if len(backs) != 1 or len(there) != len(entered) or not all(map(_goes, there)):
        return None
    (back,) = backs
    late: set[int] = {id(back)}
    for node in mixture.inside:
        if any(id(maker) in late for t in node.inputs for maker in t.inputs):
            late.add(id(node))
    moved = {id(node) for node in exchanges}
    after = tuple(n for n in mixture.inside if id(n) in late and id(n) not in moved)
    inside = tuple(n for n in mixture.inside if id(n) not in late and id(n) not in moved)
    apart = {id(node) for node in inside}
    readers = [*after, mixture.leave]
    leaks = any(id(m) in apart | entered for n in readers for t in n.inputs for m in t.inputs)
    turns = (back.attrs.get("split_axis"), back.attrs.get("concat_axis")) == (1, 0)
    reads = [m for n in inside for t in n.inputs for m in t.inputs]
    if leaks or not turns or any(id(maker) in entered for maker in reads):
        return None
    return Crossing(tuple(there), inside, back, after)


def _goes(node: gs.Node) -> bool:
    return (node.attrs.get("split_axis"), node.attrs.get("concat_axis")) == (0, 1)
