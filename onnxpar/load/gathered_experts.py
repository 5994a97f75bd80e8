"""Finds mixtures of experts in which each row is multiplied by the matrix of its expert. The
matrices are gathered by the numbers of the rows' experts, or the rows are sorted by expert, and
each expert's range is multiplied by its matrix.

These are the forms in which Hugging Face's models are exported since experts are one parameter:

    y = torch.bmm(w1[ids], x.unsqueeze(-1)) ...                     # batched_mm
    y = torch.cat([x[a:b] @ w1[e] for e, (a, b) in enumerate(...)]) # grouped_mm
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.interchange import is_weight
from onnxpar.graph.subgraphs import drop_unread
from onnxpar.graph.tensors import dtype_of, tensor_shape
from onnxpar.load.dense_experts import DenseExperts, merged, put
from onnxpar.load.row_program import Beside, Own, RowProgram, Rows, Shared, Stacked
from onnxpar.load.shape_values import given_integers, integers
from onnxpar.load.sorted_rows import copies, find_sorted_rows, numbers, places, skip

_SAME_ORDER = frozenset(["Unsqueeze", "Squeeze", "Reshape", "Flatten", "Cast", "Identity"])


@dataclass(frozen=True, eq=False)
class _Group:
    """A product of rows that are sorted by expert: Concat of rows[start:end] @ weight[expert].

    rows     the tensor whose rows are read
    weight   the matrices of all experts, [expert, row, column]
    ends     the end of each expert's range of rows
    joined   the Concat of the products
    readers  the ids of the nodes that take ranges of `rows`
    """

    rows: gs.Tensor
    weight: gs.Tensor
    ends: gs.Tensor
    joined: gs.Node
    readers: frozenset[int]


@dataclass(eq=False)
class _Rows(RowProgram):
    """The steps of a mixture of experts that compute each row by itself, as one program for all
    rows.

    picked  the tensors with a matrix or a vector for each row, by id: slices of the stack from
            which they are gathered
    size    the number of rows
    """

    picked: dict[int, Stacked] = field(default_factory=dict)
    size: int = 0

    def operand(self, tensor: gs.Tensor) -> Own | Stacked | Shared | Beside | None:
        """Returns the operand of a step for a tensor: the matrix of each row's expert, a vector for
        all rows, or a tensor with as many rows. None if the tensor is none of these."""
        if id(tensor) in self.picked:
            return self.picked[id(tensor)]
        if isinstance(tensor, gs.Constant):
            return Shared(tensor) if len(tensor_shape(tensor) or ()) == 1 else None
        shape = tensor_shape(tensor)
        if shape is not None and len(shape) == 2 and shape[0] == self.size and shape[0]:
            return Beside(tensor)
        return None

    def group(self, group: _Group) -> bool:
        """Records the product of sorted rows as a step; returns False if no step has computed the
        rows."""
        x = self.rows(group.rows)
        columns = (tensor_shape(group.weight) or (None,))[-1]
        if x is None or x.labels != "Rf" or columns is None:
            return False
        step = ("MatMul", (self._row(x), Stacked(group.weight)))
        self._add(group.joined, "Rf", step, columns)
        return True


def gathered_mixtures(graph: gs.Graph, folder: Path) -> None:
    """Rewrites the mixtures of a graph in place, with the expert as a dimension. `folder` has the
    model's external data."""
    for ids, picks in _picks(graph):
        _rewrite(graph, folder, ids, picks, [])
    groups = list(_groups(graph))
    for ends in {id(g.ends): g.ends for g in groups}.values():
        _rewrite(graph, folder, ends, {}, [g for g in groups if g.ends is ends])


def _picks(graph: gs.Graph) -> Iterator[tuple[gs.Tensor, dict[int, Stacked]]]:
    """Yields each vector with the number of each row's expert, together with the tensors that are
    gathered by these numbers from stacked weights, by id. At least one of the weights is a matrix
    for each expert."""
    by_ids: dict[int, dict[int, Stacked]] = defaultdict(dict)
    numbers: dict[int, gs.Tensor] = {}
    for node in graph.nodes:
        if node.op not in ("Gather", "GatherND") or not _is_stored(node.inputs[0]):
            continue
        shape, at = tensor_shape(node.inputs[0]) or (), tensor_shape(node.inputs[1]) or ()
        ids = node.inputs[1]
        if isinstance(ids, gs.Constant) or node.attrs.get("axis", 0) or len(shape) not in (2, 3):
            continue
        if node.attrs.get("batch_dims", 0) or None in at:
            continue
        if (node.op == "Gather" and len(at) != 1) or (node.op == "GatherND" and at[1:] != (1,)):
            continue
        while ids.inputs and ids.inputs[0].op in _SAME_ORDER:
            ids = ids.inputs[0].inputs[0]
        if not _is_chosen(ids):
            continue
        numbers[id(ids)] = ids
        by_ids[id(ids)] |= _moved(node.outputs[0], Stacked(node.inputs[0]))
    for key, picks in by_ids.items():
        if any(len(tensor_shape(p.tensor) or ()) == 3 for p in picks.values()):
            yield numbers[key], picks


def _is_chosen(tensor: gs.Tensor) -> bool:
    """True for numbers that the model computes with TopK, ArgMax or ArgMin, and not from an input:
    rows that an input selects from a table of adapters, say, are no mixture."""
    todo, seen, is_any = [tensor], {id(tensor)}, False
    while todo:
        each = todo.pop()
        node = each.inputs[0] if each.inputs else None
        if node is not None and node.op in ("TopK", "ArgMax", "ArgMin"):
            is_any = True
        elif node is None and not isinstance(each, gs.Constant):
            return False
        elif node is not None:
            sources = [t for t in node.inputs if t.name and id(t) not in seen]
            seen.update(map(id, sources))
            todo += sources
    return is_any


def _is_stored(tensor: gs.Tensor) -> bool:
    """True for a weight, perhaps behind Identities and Transposes."""
    while tensor.inputs and tensor.inputs[0].op in ("Identity", "Transpose"):
        tensor = tensor.inputs[0].inputs[0]
    return is_weight(tensor)


def _moved(tensor: gs.Tensor, pick: Stacked) -> dict[int, Stacked]:
    """Returns what tensors are, by id: `tensor`, which has a matrix or vector of the stack `pick`
    for each row, and the results of nodes that only transpose these or add a dimension."""
    moved = {id(tensor): pick}
    for node in tensor.outputs:
        if node.op == "Transpose" and node.attrs.get("perm") == [0, 2, 1]:
            moved |= _moved(node.outputs[0], Stacked(pick.tensor, not pick.flipped))
        elif node.op == "Identity" or (node.op == "Unsqueeze" and _is_vector(pick)):
            moved |= _moved(node.outputs[0], pick)
    return moved


def _is_vector(pick: Stacked) -> bool:
    return len(tensor_shape(pick.tensor) or ()) == 2


def _groups(graph: gs.Graph) -> Iterator[_Group]:
    """Yields the products of sorted rows, which a Concat joins."""
    for node in graph.nodes:
        if node.op == "Concat" and node.attrs.get("axis") == 0 and len(node.inputs) > 1:
            group = _group(node)
            if group is not None:
                yield group


def _group(joined: gs.Node) -> _Group | None:
    """Returns the product of sorted rows that the Concat `joined` ends; None if it is of another
    form."""
    rows: list[gs.Tensor] = []
    weights: list[gs.Tensor] = []
    ends: list[gs.Tensor] = []
    readers = set()
    for i, tensor in enumerate(joined.inputs):
        product = _maker(tensor, "MatMul")
        gather = _maker(product.inputs[0], "Gather") if product else None
        between = _maker(gather.inputs[1], "Range") if gather else None
        weight = _part(product.inputs[1], i) if product else None
        if gather is None or between is None or weight is None or gather.attrs.get("axis", 0):
            return None
        start, end, step = between.inputs
        end_of = _part(end, i)
        before = start is ends[-1] if ends else integers(start) == [0]
        if end_of is None or not before or integers(step) != [1]:
            return None
        rows.append(gather.inputs[0])
        weights.append(weight)
        ends.append(end)
        readers.add(id(gather))
    sources = [_part(e, i) for i, e in enumerate(ends)]
    alike = all(len({id(t) for t in each}) == 1 for each in (rows, weights, sources))
    count = len(joined.inputs)
    sizes = [(tensor_shape(t) or (None,))[0] for t in (weights[0], sources[0])]
    if not alike or sizes != [count, count] or sources[0] is None:
        return None
    return _Group(rows[0], weights[0], sources[0], joined, frozenset(readers))


def _maker(tensor: gs.Tensor, op: str) -> gs.Node | None:
    """Returns the node that makes a tensor, if it has this op; else None."""
    node = tensor.inputs[0] if tensor.inputs else None
    return node if node is not None and node.op == op else None


def _part(tensor: gs.Tensor, number: int) -> gs.Tensor | None:
    """Returns y if `tensor` is element `number` of y along the first dimension:
    Squeeze(Split(y)[number]), perhaps with Casts. Else None."""
    while (node := _maker(tensor, "Squeeze") or _maker(tensor, "Cast")) is not None:
        tensor = node.inputs[0]
    split = _maker(tensor, "Split")
    if split is None or split.attrs.get("axis", 0) or split.outputs[number] is not tensor:
        return None
    sizes = given_integers(split, 1)
    return split.inputs[0] if sizes is None or set(sizes) == {1} else None


def _rewrite(
    graph: gs.Graph, folder: Path, source: gs.Tensor, picks: dict[int, Stacked],
    groups: list[_Group],
) -> None:  # fmt: skip
    """Replaces a mixture of experts by one in which the expert is the first dimension of tensors,
    in place: the nodes from the first to the last one that reads an expert's matrix or vector.

    source  the number of each row's expert, or (with `groups`) the end of each expert's range
    picks   the tensors gathered by `source`, as `_picks` yields them
    groups  the products of ranges of rows
    """
    order = {id(node): i for i, node in enumerate(graph.nodes)}
    start = _start(graph, picks, groups, order)
    if start is None:
        return
    entry, labels = start
    shape = tensor_shape(entry) or ()
    if None in shape:
        return
    program = _Rows(shape[labels.index("f")] or 0, entry.dtype, picked=picks)
    program.size = shape[labels.index("R")] or 0
    program.enter(entry, labels)
    outside = _follow_all(program, entry, order, groups)
    uses = [
        i for i, s in enumerate(program.steps, 1) if any(isinstance(o, Stacked) for o in s.operands)
    ]
    if not uses:
        return
    last = uses[-1]
    if any(0 < rows.number < last for rows in outside):
        return
    program.steps[last:] = []
    stacks = [o.tensor for s in program.steps for o in s.operands if isinstance(o, Stacked)]
    experts = {(tensor_shape(t) or (None,))[0] for t in stacks}
    steps = merged([program], folder, "")
    if steps is None or len(experts) != 1 or None in experts:
        return
    size = experts.pop() or 0
    result, result_labels = program.made[last - 1]
    write = DenseExperts(graph, f"{result.name}/experts", size, program.size)
    readers = {reader for group in groups for reader in group.readers}
    sort = find_sorted_rows(graph, entry, result, readers)
    ones = [i for i, label in enumerate(labels) if label == "1"]
    rows = _without(write, entry, ones)
    if sort is not None:
        rows = copies(write, sort)
        chosen = _in_range(write, source, places(write, sort.order))
    elif groups:
        chosen = _in_range(write, source, numbers(write, entry))
    else:
        chosen = _of_expert(write, source)
    y = write.write(steps, rows, chosen)
    added = [i for i, label in enumerate(result_labels) if label == "1"]
    if added:
        to = [1 if label == "1" else y.shape["Rf".index(label)] for label in result_labels]
        y = write.add("Unsqueeze", [y, np.array(added, np.int64)], y.dtype, to)
    result.shape = list(y.shape)
    _settle_rows(result)
    put(graph, write.made, result, y, order)
    for node in (*sort.sides, *sort.backs) if sort is not None else ():
        skip(node)
    drop_unread(graph)


def _start(
    graph: gs.Graph, picks: Mapping[int, Stacked], groups: list[_Group], order: Mapping[int, int]
) -> tuple[gs.Tensor, str] | None:
    """Returns the tensor of rows that enters a mixture of experts, and the labels of its dimensions
    (see `Rows`); None if the dimensions are not known. The first product is the first of `groups`
    or, without groups, the first MatMul with weights in `picks`.

    order  the places of nodes, by id()
    """
    firsts = [n for n in graph.nodes if n.op == "MatMul" and any(id(t) in picks for t in n.inputs)]
    if groups:
        first = min(groups, key=lambda g: order[id(g.joined)])
        return first.rows, "Rf"
    if not firsts:
        return None
    node = firsts[0]
    at = 0 if id(node.inputs[0]) in picks else 1
    x = node.inputs[1 - at]
    if len(tensor_shape(x) or ()) != 3 or id(x) in picks:
        return None
    return x, "Rf1" if at == 0 else "R1f"


def _follow_all(
    program: _Rows, entry: gs.Tensor, order: Mapping[int, int], groups: list[_Group]
) -> list[Rows]:
    """Records in `program` all nodes from `entry` on that compute each row by itself. Returns the
    rows that other nodes read.

    order   the places of nodes, by id()
    groups  products of sorted rows; the nodes of each are one step
    """
    todo: list[tuple[int, gs.Node]] = []
    queued: set[int] = set()
    outside: list[Rows] = []
    joined = {id(g.joined): g for g in groups}
    readers = {reader: g for g in groups for reader in g.readers}

    def push(tensor: gs.Tensor) -> None:
        for node in tensor.outputs:
            node = readers[id(node)].joined if id(node) in readers else node
            if id(node) in order and id(node) not in queued:
                queued.add(id(node))
                heapq.heappush(todo, (order[id(node)], node))

    push(entry)
    while todo:
        _, node = heapq.heappop(todo)
        read = [r for t in node.inputs if (r := program.rows(t)) is not None]
        group = joined.get(id(node))
        count = len(program.steps)
        if program.group(group) if group else program.follow(node):
            for tensor in node.outputs:
                push(tensor)
        else:
            del program.steps[count:], program.made[count:]
            for tensor in node.outputs:
                program.found.pop(id(tensor), None)
            outside += read
    return outside


def _of_expert(write: DenseExperts, ids: gs.Tensor) -> gs.Tensor:
    """Returns the mask of each expert's rows, [expert, row, 1], from `ids`, the number of each
    row's expert."""
    shape = [1, write.tokens, 1]
    ids = write.add("Reshape", [ids, np.array([1, -1, 1], np.int64)], ids.dtype, shape)
    if not _is_found(ids, write.experts):
        # A Gather also takes numbers from the end, and refuses those that are out of range.
        every = np.arange(write.experts).astype(dtype_of(ids) or np.int64)
        ids = write.add("Gather", [every, ids], ids.dtype, shape, axis=0)
    numbers = np.arange(write.experts).reshape(-1, 1, 1).astype(dtype_of(ids) or np.int64)
    shape = [write.experts, write.tokens, 1]
    return write.add("Equal", [ids, numbers], np.dtype(bool), shape)


def _is_found(tensor: gs.Tensor, count: int) -> bool:
    """True for numbers that TopK, ArgMax or ArgMin gives as indices of `count` elements: none of
    them is out of range."""
    while tensor.inputs and tensor.inputs[0].op in _SAME_ORDER:
        tensor = tensor.inputs[0].inputs[0]
    node = tensor.inputs[0] if tensor.inputs else None
    if node is None:
        return False
    axis = node.attrs.get("axis", -1 if node.op == "TopK" else 0)
    shape = tensor_shape(node.inputs[0]) if node.inputs else None
    if not shape or shape[axis] != count:
        return False
    return node.op in ("ArgMax", "ArgMin") or (node.op == "TopK" and tensor is node.outputs[1])


def _in_range(write: DenseExperts, ends: gs.Tensor, places: gs.Tensor) -> gs.Tensor:
    """Returns the mask of each expert's rows, [expert, row, 1], from `ends`, the end of each
    expert's range, and `places`, the place of each row in the sorted order."""
    kind = np.dtype(np.int64)
    flag, shape = np.dtype(bool), [write.experts, write.tokens, 1]
    ends = write.add("Cast", [ends], kind, [write.experts], to=7)
    column = [write.experts, 1, 1]
    ends = write.add("Reshape", [ends, np.array([-1, 1, 1], np.int64)], kind, column)
    places = write.add(
        "Reshape", [places, np.array([1, -1, 1], np.int64)], kind, [1, write.tokens, 1]
    )
    after = write.add("Not", [write.add("Less", [places, ends], flag, shape)], flag, shape)
    after = write.add("Cast", [after], kind, shape, to=7)
    number = write.reduce("ReduceSum", after, 0, True)  # of ranges that end before the row
    return write.add("Equal", [number, np.arange(write.experts).reshape(-1, 1, 1)], flag, shape)


def _without(write: DenseExperts, tensor: gs.Tensor, ones: list[int]) -> gs.Tensor:
    """Returns a tensor without its dimensions `ones`, which have one element."""
    if not ones:
        return tensor
    node = tensor.inputs[0] if tensor.inputs else None
    if node is not None and node.op == "Unsqueeze" and len(tensor_shape(node.inputs[0]) or ()) == 2:
        return node.inputs[0]
    shape = [s for i, s in enumerate(tensor_shape(tensor) or ()) if i not in ones]
    return write.add("Squeeze", [tensor, np.array(ones, np.int64)], tensor.dtype, shape)


def _settle_rows(tensor: gs.Tensor) -> None:
    """Gives the results of elementwise nodes behind a tensor its number of rows, which was open
    before the mixture was replaced."""
    for node in tensor.outputs:
        out = node.outputs[0]
        is_open = out.shape is not None and None in out.shape
        is_like = is_open and node.op in ("Mul", "Add", "Cast")
        if is_like and len(out.shape) == len(tensor.shape):
            pairs = zip(out.shape, tensor.shape, strict=True)
            out.shape = [b if a is None else a for a, b in pairs]
            _settle_rows(out)
