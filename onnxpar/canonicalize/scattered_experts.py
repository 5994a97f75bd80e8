"""Finds mixtures whose experts each select their tokens with NonZero, and add what they compute to
the rows of these tokens.

This is what loops over experts become when they are traced:

    for expert in range(experts):
        slot, token = torch.where(mask[expert])
        y.index_add_(0, token, f(x[token], w[expert]) * weights[token, slot, None])
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.canonicalize.dense_experts import DenseExperts, merged, put
from onnxpar.canonicalize.known_integers import integers, operand_or_attribute
from onnxpar.canonicalize.row_program import Beside, Own, RowProgram, Rows, Shared, Stacked
from onnxpar.ir.stored import stacked_parts
from onnxpar.ir.tensors import constant, given, tensor_shape

_MOVES = frozenset(["Transpose", "Squeeze", "Unsqueeze", "Reshape", "Cast", "Identity", "Expand"])

_ALL = 2**31 - 1
"""The end of a Slice that takes everything, or a larger one."""
_IN_ORDER = frozenset(["Flatten", "Unsqueeze", "Squeeze", "Reshape", "Identity"])
"""Ops that keep the flat order of elements."""


@dataclass(frozen=True)
class _Index:
    """Integers that number the selected pairs: each of `forms` is a number a * row + b * column of
    the mask. `labels` names the dimensions: R for pairs, c for forms, 1 for others."""

    forms: tuple[tuple[int, int], ...]
    labels: str


@dataclass(frozen=True)
class _Weight:
    """A weight for each pair, [pair, 1] or [pair]: element `form` of `table` in its flat order."""

    table: gs.Tensor
    form: tuple[int, int]


@dataclass(frozen=True)
class _Scaled:
    """Rows, times a weight for each pair."""

    rows: Rows
    weight: _Weight


@dataclass(frozen=True)
class _Placed:
    """Zeros, in which the rows of pairs replace those of their tokens."""

    rows: Rows
    weight: _Weight | None


@dataclass(eq=False)
class _Expert(RowProgram):
    """One expert: the NonZero that selects its pairs, and what becomes of them.

    which       the number of the expert in the mask, if it is constant
    number      the tensor that has that number
    tokens      the tensor that the expert reads rows of, and its dimension of tokens
    token       the form of an index of tokens
    total       the tensor to whose rows the expert adds, and the sum
    overwrites  true if of two equal tokens the last one counts
    guards      the If around each sum that is the result of its first branch, by the sum
    """

    seed: gs.Node = field(default_factory=gs.Node)
    which: int | None = None
    number: gs.Tensor | None = None
    tokens: tuple[gs.Tensor, int] | None = None
    token: tuple[int, int] | None = None
    result: Rows | None = None
    weight: _Weight | None = None
    total: tuple[gs.Tensor, gs.Tensor] | None = None
    overwrites: bool = False
    others: dict[int, Any] = field(default_factory=dict)
    guards: Mapping[int, gs.Node] = field(default_factory=dict)

    def operand(self, tensor: gs.Tensor) -> Own | Stacked | Shared | Beside | None:
        """A constant, or the expert's slice of a tensor for all experts."""
        flipped, made = False, tensor.inputs[0] if tensor.inputs else None
        if made is not None and made.op == "Transpose" and made.attrs.get("perm") == [1, 0]:
            flipped, tensor = True, made.inputs[0]
            made = tensor.inputs[0] if tensor.inputs else None
        if made is not None and made.op == "Gather" and made.attrs.get("axis", 0) == 0:
            value = constant(made.inputs[1])
            is_same = value is not None and value.ndim == 0 and value.item() == self.which
            if made.inputs[1] is self.number or is_same:
                return Stacked(made.inputs[0], flipped)
        return None if flipped else super().operand(tensor)


def scattered_mixtures(graph: gs.Graph, folder: Path, apart: bool) -> None:
    """Rewrites the mixtures of a graph in place; those whose experts have weights of their own only
    if `apart`."""
    order, guards = _places(graph)
    for mask, axis, seeds in _seeds(graph):
        experts = [_traced(seed, order, guards) for seed in seeds]
        if all(e is not None for e in experts):
            found = [e for e in experts if e is not None]
            if apart or not any(_has_own(e) for e in found):
                _rewrite(graph, mask, axis, found, folder, order)


def _has_own(expert: _Expert) -> bool:
    return any(isinstance(o, Own) for step in expert.steps for o in step.operands)


def _places(graph: gs.Graph) -> tuple[dict[int, int], dict[int, gs.Node]]:
    """The places of all nodes, also of those in the first branch of an If with one result; and such
    Ifs by the result of that branch."""
    order: dict[int, int] = {}
    guards: dict[int, gs.Node] = {}
    for node in graph.nodes:
        if node.op == "If" and len(node.outputs) == 1:
            branch = node.attrs["then_branch"]
            guards[id(branch.outputs[0])] = node
            for inner in branch.nodes:
                order[id(inner)] = len(order)
        order[id(node)] = len(order)
    return order, guards


def _seeds(graph: gs.Graph) -> Iterator[tuple[gs.Tensor, int, list[gs.Node]]]:
    """The masks that have a matrix for each expert, with their dimension of experts and the NonZero
    nodes that read these matrices."""
    found: dict[tuple[int, int], list[gs.Node]] = defaultdict(list)
    masks: dict[int, gs.Tensor] = {}
    for node in graph.nodes:
        pick = _pick(node) if node.op == "NonZero" else None
        if pick is not None and len(tensor_shape(pick.inputs[0]) or ()) == 3:
            masks[id(pick.inputs[0])] = pick.inputs[0]
            found[id(pick.inputs[0]), pick.attrs.get("axis", 0) % 3].append(node)
    for (mask, axis), seeds in found.items():
        yield masks[mask], axis, seeds


def _pick(seed: gs.Node) -> gs.Node | None:
    """The Gather that takes an expert's matrix out of the mask."""
    tensor = seed.inputs[0]
    while tensor.inputs and tensor.inputs[0].op in ("Cast", "Identity"):
        tensor = tensor.inputs[0].inputs[0]
    node = tensor.inputs[0] if tensor.inputs else None
    is_one = node is not None and node.op == "Gather" and tensor_shape(node.inputs[1]) == ()
    return node if is_one else None


def _traced(
    seed: gs.Node, order: Mapping[int, int], guards: Mapping[int, gs.Node]
) -> _Expert | None:
    """Follows an expert from its NonZero to the sum; None if it does anything else."""
    pick = _pick(seed)
    assert pick is not None
    which = constant(pick.inputs[1])
    expert = _Expert(0, None, seed=seed, number=pick.inputs[1], guards=guards)
    expert.which = None if which is None else int(which)
    expert.others[id(seed.outputs[0])] = _Index(((1, 0), (0, 1)), "cR")
    todo: list[tuple[int, gs.Node]] = []
    queued: set[int] = set()

    def push(nodes: Iterable[gs.Node]) -> bool:
        for node in nodes:
            if id(node) not in order:
                return False  # a node of a body reads it
            if id(node) not in queued:
                queued.add(id(node))
                heapq.heappush(todo, (order[id(node)], node))
        return True

    if not push(seed.outputs[0].outputs):
        return None
    while todo:
        _, node = heapq.heappop(todo)
        if node.op == "Shape":
            continue  # `known_integers` reads it
        if not _follow(expert, node):
            return None
        for tensor in node.outputs:
            is_known = id(tensor) in expert.others or expert.rows(tensor) is not None
            if is_known and not push(tensor.outputs):
                return None
    return expert if expert.total is not None else None


def _follow(expert: _Expert, node: gs.Node) -> bool:
    """Records a node that reads something of an expert; False if that is not understood."""
    reads = [expert.others.get(id(t)) for t in node.inputs]
    rows = [expert.rows(t) for t in node.inputs]
    if any(isinstance(r, _Index) for r in reads):
        if node.op in ("Gather", "GatherND") and isinstance(reads[1], _Index):
            return _gather(expert, node, reads[1])
        if node.op in ("ScatterND", "ScatterElements"):
            return _scatter(expert, node, reads[1])
        return not any(rows) and _move_index(expert, node, reads)
    if any(isinstance(r, _Placed) for r in reads):
        return _add_placed(expert, node, reads)
    if any(isinstance(r, _Scaled) for r in reads):
        return _pass_scaled(expert, node, reads[0])
    if any(isinstance(r, _Weight) for r in reads):
        return _scale(expert, node, reads, rows)
    return any(r is not None for r in rows) and expert.follow(node)


def _move_index(expert: _Expert, node: gs.Node, reads: Sequence[Any]) -> bool:
    """Arithmetic on indices, and nodes that move their dimensions."""
    result = _moved_index(node, reads)
    if isinstance(result, list):
        expert.others |= {id(t): r for t, r in zip(node.outputs, result, strict=True)}
        return True
    if result is not None:
        expert.others[id(node.outputs[0])] = result
    return result is not None


def _moved_index(node: gs.Node, reads: Sequence[Any]) -> _Index | list[_Index] | None:
    index: _Index = next(r for r in reads if r is not None)
    at = index.labels.find("c")
    if node.op in ("Add", "Mul"):
        return _arithmetic(node, reads)
    if node.op == "Concat":
        return _concat(node, reads)
    if reads[0] is None:
        return None
    if node.op in ("Slice", "Split", "Gather") and at >= 0:
        return _some_forms(node, index, at)
    if node.op not in _MOVES:
        return None
    if node.op == "Transpose":
        perm = node.attrs.get("perm") or range(len(index.labels))[::-1]
        return _Index(index.forms, "".join(index.labels[i] for i in perm))
    if node.op in ("Cast", "Identity"):
        return index
    if len(index.forms) > 1 and node.op in ("Reshape", "Expand"):
        return None
    if node.op == "Expand":  # along columns, as ScatterElements wants it
        return index if index.labels in ("R1", "Rc") else None
    shape = tensor_shape(node.outputs[0])
    if shape is None or any(size not in (1, None, len(index.forms)) for size in shape):
        return None
    labels = "".join("R" if size is None else "1" for size in shape)
    if len(index.forms) > 1:
        labels = "".join("R" if s is None else "c" if s > 1 else "1" for s in shape)
    return _Index(index.forms, labels) if labels.count("R") == 1 else None


def _some_forms(node: gs.Node, index: _Index, at: int) -> _Index | list[_Index] | None:
    """A Slice, Split or Gather along the dimension of forms."""
    rank, count = len(index.labels), len(index.forms)
    if node.op == "Slice":
        starts = operand_or_attribute(node, 1, "starts")
        ends = operand_or_attribute(node, 2, "ends")
        axes = operand_or_attribute(node, 3, "axes")
        steps = integers(given(node, 4)) or [1]
        if starts is None or ends is None or axes is None or len(axes) != 1:
            return None
        if starts == [0] and steps == [1] and ends[0] >= _ALL:
            return index
        is_plain = axes[0] % rank == at and steps == [1]
        return _Index(index.forms[starts[0] : ends[0]], index.labels) if is_plain else None
    if node.attrs.get("axis", 0) % rank != at:
        return None
    if node.op == "Split":
        sizes = operand_or_attribute(node, 1, "split") or [1] * count
        if len(sizes) != len(node.outputs) or sum(sizes) != count:
            return None
        ends = np.cumsum([0, *sizes]).tolist()
        parts = itertools.pairwise(ends)
        return [_Index(index.forms[a:b], index.labels) for a, b in parts]
    places = integers(node.inputs[1])
    if places is None or not all(-count <= p < count for p in places):
        return None
    is_scalar = tensor_shape(node.inputs[1]) == ()
    labels = index.labels[:at] + ("" if is_scalar else "c") + index.labels[at + 1 :]
    return _Index(tuple(index.forms[p] for p in places), labels)


def _arithmetic(node: gs.Node, reads: Sequence[Any]) -> _Index | None:
    known = [r for r in reads if r is not None]
    if any(len(r.forms) != 1 for r in known):
        return None
    if node.op == "Add" and len(known) == 2:
        (a, b), (c, d) = known[0].forms[0], known[1].forms[0]
        same = known[0].labels == known[1].labels
        return _Index(((a + c, b + d),), known[0].labels) if same else None
    factor = integers(node.inputs[1 if reads[0] is not None else 0])
    if node.op != "Mul" or len(known) != 1 or factor is None or len(factor) != 1:
        return None
    a, b = known[0].forms[0]
    return _Index(((a * factor[0], b * factor[0]),), known[0].labels)


def _concat(node: gs.Node, reads: Sequence[Any]) -> _Index | None:
    at = node.attrs["axis"] % len(reads[0].labels) if reads[0] is not None else -1
    if at < 0 or any(not isinstance(r, _Index) or r.labels[at] == "R" for r in reads):
        return None
    labels = reads[0].labels[:at] + "c" + reads[0].labels[at + 1 :]
    forms = tuple(form for r in reads for form in r.forms)
    return _Index(forms, labels)


def _gather(expert: _Expert, node: gs.Node, index: _Index) -> bool:
    """Rows of tokens, or weights of pairs."""
    data = node.inputs[0]
    shape = tensor_shape(data)
    is_nd = node.op == "GatherND"
    if shape is None or (is_nd and (node.attrs.get("batch_dims", 0) or index.labels[0] != "R")):
        return False
    if is_nd and (len(index.labels) != 2 or len(index.forms) > len(shape)):
        return False
    if not is_nd and (len(index.forms) != 1 or index.labels not in ("R", "R1", "Rc")):
        return False
    if None in shape:
        return False
    if len(index.forms) == 1 and index.forms[0] in ((1, 0), (0, 1)) and shape[-1] != 1:
        return _read_tokens(expert, node, index, shape)
    sizes = [s or 0 for s in shape]
    if is_nd:
        count = len(index.forms)
        strides = [int(np.prod(sizes[i + 1 :])) for i in range(count)]
        rest = sizes[count:]
        flat = [sum(f[i] * s for f, s in zip(index.forms, strides, strict=True)) for i in (0, 1)]
    else:
        axis = node.attrs.get("axis", 0) % len(sizes)
        rest = [s for i, s in enumerate(sizes) if i != axis]
        flat = list(index.forms[0])
    if any(size != 1 for size in rest):
        return False
    while data.inputs and data.inputs[0].op in _IN_ORDER:
        data = data.inputs[0].inputs[0]
    expert.others[id(node.outputs[0])] = _Weight(data, (flat[0], flat[1]))
    return True


def _read_tokens(
    expert: _Expert, node: gs.Node, index: _Index, shape: Sequence[int | None]
) -> bool:
    """The rows of an expert's tokens, which are its input."""
    axis = 0 if node.op == "GatherND" else node.attrs.get("axis", 0) % len(shape)
    others = [s for i, s in enumerate(shape[:-1]) if i != axis]
    if axis == len(shape) - 1 or any(s != 1 for s in others):
        return False
    if expert.tokens is not None and expert.tokens[0] is not node.inputs[0]:
        return False
    more = index.labels[1:] if node.op == "Gather" else ""
    labels = "1" * axis + "R" + "1" * len(more) + "1" * (len(shape) - 2 - axis) + "f"
    expert.tokens, expert.token = (node.inputs[0], axis), index.forms[0]
    expert.width, expert.dtype = shape[-1] or 0, node.inputs[0].dtype
    expert.enter(node.outputs[0], labels)
    return True


def _scale(
    expert: _Expert, node: gs.Node, reads: Sequence[Any], rows: Sequence[Rows | None]
) -> bool:
    """Nodes that move or cast weights of pairs, and the product of weights and rows."""
    weight = next(r for r in reads if r is not None)
    out = node.outputs[0]
    if node.op in _MOVES and reads[0] is weight:
        shape = tensor_shape(out)
        if shape is None or any(size not in (1, None) for size in shape):
            return False
        expert.others[id(out)] = weight
        return True
    main = next((r for r in rows if r is not None), None)
    at = next(i for i, r in enumerate(reads) if r is weight)
    if node.op != "Mul" or main is None or main.labels != "Rf":
        return False
    if len(tensor_shape(node.inputs[at]) or ()) != 2:
        return False
    expert.others[id(out)] = _Scaled(main, weight)
    return True


def _pass_scaled(expert: _Expert, node: gs.Node, scaled: Any) -> bool:
    """Casts and expansions that change nothing, between the product with weights and the sum."""
    if node.op == "Cast" and isinstance(scaled, _Scaled):
        is_same = bool(node.outputs[0].dtype == node.inputs[0].dtype)
    else:
        is_same = node.op in ("Identity", "Expand") and isinstance(scaled, _Scaled)
    if is_same and node.op == "Expand":
        sizes = integers(node.inputs[1])
        is_same = sizes is not None and sizes in ([1, expert.width_of(scaled.rows)], [1, 1])
    if is_same:
        expert.others[id(node.outputs[0])] = scaled
    return is_same


def _scatter(expert: _Expert, node: gs.Node, index: Any) -> bool:
    """Rows that are added to, or replace, those of their tokens."""
    total, updates = node.inputs[0], node.inputs[2]
    value = expert.others.get(id(updates)) or expert.rows(updates)
    is_token = isinstance(index, _Index) and index.forms == (expert.token,)
    if not is_token or not isinstance(value, (_Scaled, Rows)) or index.labels not in ("R1", "Rc"):
        return False
    rows, weight = (value.rows, value.weight) if isinstance(value, _Scaled) else (value, None)
    if rows.labels != "Rf" or node.attrs.get("axis", 0) != 0:
        return False
    if len(tensor_shape(total) or ()) != 2:
        return False
    reduction = node.attrs.get("reduction", "none")
    if reduction == "add":
        return _finish(expert, rows, weight, total, node.outputs[0])
    if reduction != "none" or not is_zero(total):
        return False
    expert.others[id(node.outputs[0])] = _Placed(rows, weight)
    return True


def _add_placed(expert: _Expert, node: gs.Node, reads: Sequence[Any]) -> bool:
    placed = next(r for r in reads if r is not None)
    others = [t for t, r in zip(node.inputs, reads, strict=True) if r is None]
    if node.op != "Add" or len(others) != 1:
        return False
    expert.overwrites = True
    return _finish(expert, placed.rows, placed.weight, others[0], node.outputs[0])


def _finish(
    expert: _Expert, rows: Rows, weight: _Weight | None, before: gs.Tensor, after: gs.Tensor
) -> bool:
    guard = expert.guards.get(id(after))
    if guard is not None:
        if not _runs_for_rows(guard, expert, before):
            return False
        after = guard.outputs[0]
    if expert.total is not None or tensor_shape(before) != tensor_shape(after):
        return False
    expert.result, expert.weight, expert.total = rows, weight, (before, after)
    return True


def _runs_for_rows(guard: gs.Node, expert: _Expert, before: gs.Tensor) -> bool:
    """True if an If runs its first branch where an expert has tokens, and else returns the sum
    before."""
    condition, sizes = guard.inputs[0], ("Cast", "Identity", "Squeeze", "ReduceProd", "Gather")
    while condition.inputs and condition.inputs[0].op in ("Cast", "Identity"):
        condition = condition.inputs[0].inputs[0]
    node = condition.inputs[0] if condition.inputs else None
    if node is None or node.op != "Greater" or not is_zero(node.inputs[1]):
        return False
    count = node.inputs[0]
    while count.inputs and count.inputs[0].op in sizes:
        count = count.inputs[0].inputs[0]
    node = count.inputs[0] if count.inputs else None
    if node is None or node.op not in ("Shape", "Size"):
        return False
    other = guard.attrs["else_branch"].outputs[0]
    while other.inputs and other.inputs[0].op == "Identity":
        other = other.inputs[0].inputs[0]
    is_before = other is before or other.name == before.name or (is_zero(other) and is_zero(before))
    return is_before and isinstance(expert.others.get(id(node.inputs[0])), _Index)


def is_zero(tensor: gs.Tensor) -> bool:
    """True for a tensor of zeros."""
    value = constant(tensor)
    if value is not None:
        return not value.any()
    node = tensor.inputs[0] if tensor.inputs else None
    if node is not None and node.op == "ConstantOfShape":
        filler = node.attrs.get("value")
        return filler is None or not np.asarray(filler.values).any()
    if node is not None and node.op in ("Expand", "Cast", "Identity", "Reshape"):
        return is_zero(node.inputs[0])
    return False


def _rewrite(
    graph: gs.Graph, mask: gs.Tensor, axis: int, experts: list[_Expert], folder: Path,
    order: Mapping[int, int],
) -> None:  # fmt: skip
    """Replaces a mixture, if all of its experts are alike."""
    chain = _chain(experts)
    if all(e.which is not None for e in experts):
        experts = sorted(experts, key=lambda e: e.which or 0)  # the order in which they are stacked
    first = experts[0]
    if chain is None or first.tokens is None or first.token is None:
        return
    before, after = chain
    count = _count(mask, axis, experts)
    token_at = 1 if first.token == (0, 1) else 0
    dims = [i for i in range(3) if i != axis]
    shape = tensor_shape(mask) or ()
    tokens, slots = shape[dims[token_at]], shape[dims[1 - token_at]]
    steps = merged(experts, folder, f"{after.name}/experts")
    stacks = {
        (tensor_shape(o.tensor) or (None,))[0]
        for step in steps or ()
        for o in step.operands
        if isinstance(o, Stacked)
    }
    if steps is None or count is None or slots is None or None in stacks or len(stacks) != 1:
        return
    operands = [o for step in steps for o in step.operands if isinstance(o, Stacked)]
    if count < 0 and any(
        isinstance(o.tensor, gs.Constant) and stacked_parts(o.tensor) for o in operands
    ):
        return  # which expert a number stands for is data-dependent
    read = [mask, first.tokens[0], before, *(o.tensor for o in operands)]
    read += [first.weight.table] if first.weight is not None else []
    here = {id(node) for node in graph.nodes}
    if any(t.inputs and id(t.inputs[0]) not in here for t in read):
        return  # computed in a branch
    size = stacks.pop()
    assert size is not None
    alike = all(
        e.tokens is not None and e.tokens[0] is first.tokens[0] and e.token == first.token
        and e.overwrites == first.overwrites and e.result == first.result
        and e.result is not None and e.result.number == len(steps)
        and _is_of(e.weight, first.weight, token_at, slots)
        for e in experts
    )  # fmt: skip
    rows = [tensor_shape(first.tokens[0]) or (), tensor_shape(before) or ()]
    fits = rows[0][first.tokens[1]] == rows[1][0] == tokens
    if not fits or not alike or (count >= 0 and count != size) or (shape[axis] or 0) < size:
        return
    write = DenseExperts(graph, f"{after.name}/experts", size, tokens)
    perm = [axis, dims[token_at], dims[1 - token_at]]
    pairs = write.add("Transpose", [mask], mask.dtype, [shape[i] for i in perm], perm=perm)
    if shape[axis] != size:  # the mask has rows for no expert, too
        bounds = [np.array([n], np.int64) for n in (0, size, 0)]
        pairs = write.add("Slice", [pairs, *bounds], pairs.dtype, [size, *pairs.shape[1:]])
    chosen, weights = _routed(write, pairs, first, slots)
    rows = _token_rows(write, *first.tokens)
    y = write.write(steps, rows, chosen, weights)
    if not is_zero(before):
        y = write.add("Add", [before, y], y.dtype, y.shape)
    put(graph, write.made, after, y, order)


def _chain(experts: Sequence[_Expert]) -> tuple[gs.Tensor, gs.Tensor] | None:
    """The tensor to which the first expert adds, and the sum after the last; None if the sums do
    not follow one another."""
    totals = [e.total for e in experts if e.total is not None]
    after = {id(b): b for _, b in totals}
    before = {id(a): a for a, _ in totals}
    starts = [a for i, a in before.items() if i not in after]
    ends = [b for i, b in after.items() if i not in before]
    is_line = len(starts) == len(ends) == 1 and len(before) == len(after) == len(totals)
    return (starts[0], ends[0]) if is_line else None


def _count(mask: gs.Tensor, axis: int, experts: Sequence[_Expert]) -> int | None:
    """How many experts of the mask are covered, if their numbers are constants 0, 1, ...; -1 if the
    numbers are those of all experts that have a token; None if neither is known."""
    numbers = [e.which for e in experts]
    if all(n is not None for n in numbers):
        return len(numbers) if sorted(n or 0 for n in numbers) == [*range(len(numbers))] else None
    found = [_hit(e.number, mask, axis) for e in experts]
    parts = {part for _, part in found}
    hits = {id(node) for node, _ in found if node is not None}
    node = found[0][0]
    if node is None or len(hits) != 1 or any(n is None for n, _ in found):
        return None
    return -1 if parts == {*range(len(experts))} else None


def _hit(number: gs.Tensor | None, mask: gs.Tensor, axis: int) -> tuple[gs.Node | None, int]:
    """The NonZero over the experts that have a token from which a number comes, and which of its
    elements the number is."""
    part = -1
    while number is not None and number.inputs:
        node = number.inputs[0]
        if node.op == "NonZero":
            ok = part >= 0 and _has_token(node.inputs[0], mask, axis)
            return (node, part) if ok else (None, -1)
        if node.op == "Split":
            if part >= 0:
                return None, -1
            sizes = operand_or_attribute(node, 1, "split") or []
            part = next(i for i, t in enumerate(node.outputs) if t is number)
            if set(sizes) - {1}:
                return None, -1
        elif node.op == "Gather":
            if integers(node.inputs[1]) != [0]:
                return None, -1
        elif node.op not in _MOVES:
            return None, -1
        number = node.inputs[0]
    return None, -1


def _has_token(tensor: gs.Tensor, mask: gs.Tensor, axis: int) -> bool:
    """True if a vector says of each expert of the mask whether it has a token."""
    node = tensor.inputs[0] if tensor.inputs else None
    if node is None or node.op != "Greater" or not is_zero(node.inputs[1]):
        return False
    total = node.inputs[0].inputs[0] if node.inputs[0].inputs else None
    if total is None or total.op != "ReduceSum" or total.inputs[0] is not mask:
        return False
    axes = operand_or_attribute(total, 1, "axes")
    return axes is not None and {a % 3 for a in axes} == {0, 1, 2} - {axis}


def _is_of(weight: _Weight | None, first: _Weight | None, token_at: int, slots: int) -> bool:
    """True if a weight is that of its pair in the table [token, slot] that the first expert
    reads."""
    if weight is None or first is None:
        return weight is first
    form = (1, slots) if token_at == 1 else (slots, 1)
    if (tensor_shape(weight.table) or (None,))[-1] not in (1, slots):
        return False
    return weight.table is first.table and weight.form == form


def _routed(
    write: DenseExperts, pairs: gs.Tensor, expert: _Expert, slots: int
) -> tuple[gs.Tensor, gs.Tensor | None]:
    """Which tokens each expert gets, and the weights of its results, both [expert, token, 1]."""
    dtype: Any = np.dtype(np.float32) if expert.weight is None else expert.weight.table.dtype
    code = gs.exporters.onnx_exporter.dtype_to_onnx(dtype)
    marks = write.add("Cast", [pairs], dtype, pairs.shape, to=code)
    total = write.reduce("ReduceSum", marks, 2, True)
    chosen = write.add("Cast", [total], np.dtype(bool), total.shape, to=9)
    if expert.weight is None:
        return chosen, None
    table = expert.weight.table
    shape = [pairs.shape[1], slots]
    table = write.add("Reshape", [table, np.array([-1, slots], np.int64)], dtype, shape)
    if expert.overwrites and not _is_top(pairs):
        numbers = np.arange(1, slots + 1).astype(dtype)
        places = write.add("Mul", [marks, numbers], dtype, marks.shape)
        last = write.reduce("ReduceMax", places, 2, True)
        same = write.add("Equal", [places, last], np.dtype(bool), marks.shape)
        kept = write.add("Cast", [same], dtype, marks.shape, to=code)
        marks = write.add("Mul", [marks, kept], dtype, marks.shape)
    weighted = write.add("Mul", [marks, table], dtype, marks.shape)
    return chosen, write.reduce("ReduceSum", weighted, 2, True)


def _is_top(pairs: gs.Tensor) -> bool:
    """True if the mask shows the results of a TopK, so that no token has an expert twice."""
    todo, steps = pairs, 0
    while todo.inputs and steps < 16:
        node = todo.inputs[0]
        if node.op == "TopK":
            return todo is node.outputs[1]
        known = (*_MOVES, "OneHot", "Slice")
        variable = [t for t in node.inputs if not isinstance(t, gs.Constant)]
        is_equal = node.op == "Equal" and len(variable) == 1
        if node.op not in known and not is_equal:
            return False
        todo, steps = variable[0] if is_equal else node.inputs[0], steps + 1
    return False


def _token_rows(write: DenseExperts, tensor: gs.Tensor, axis: int) -> gs.Tensor:
    """The tokens as [token, column]."""
    shape = tensor_shape(tensor) or ()
    ones = [i for i in range(len(shape) - 1) if i != axis]
    if not ones:
        return tensor
    node = tensor.inputs[0] if tensor.inputs else None
    if node is not None and node.op == "Unsqueeze" and len(tensor_shape(node.inputs[0]) or ()) == 2:
        return node.inputs[0]
    return write.add(
        "Squeeze", [tensor, np.array(ones, np.int64)], tensor.dtype, [shape[axis], shape[-1]]
    )
