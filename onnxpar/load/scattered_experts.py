"""Finds mixtures whose experts each select their tokens with NonZero, and add what they compute to
the rows of these tokens.

This is what loops over experts become when they are traced:

    for expert in range(experts):
        slot, token = torch.where(mask[expert])
        y.index_add_(0, token, f(x[token], w[expert]) * weights[token, slot, None])
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.lazy_values import stacked_parts
from onnxpar.graph.tensors import constant, tensor_shape
from onnxpar.load.dense_experts import DenseExperts, merged, put
from onnxpar.load.follow_expert import ScatteredExpert, Weight, follow, is_zero
from onnxpar.load.pair_indices import MOVES, Index
from onnxpar.load.row_program import Stacked
from onnxpar.load.shape_values import given_integers, integers


def scattered_mixtures(graph: gs.Graph, folder: Path) -> None:
    """Rewrites the mixtures of a graph in place, with the expert as a dimension. `folder` has the
    model's external data."""
    order, guards = _places(graph)
    for mask, axis, seeds in _seeds(graph):
        experts = [_traced(seed, order, guards) for seed in seeds]
        if all(e is not None for e in experts):
            traced = [e for e in experts if e is not None]
            _rewrite(graph, mask, axis, traced, folder, order)


def _places(graph: gs.Graph) -> tuple[dict[int, int], dict[int, gs.Node]]:
    """Returns the places of all nodes, by id(), including nodes in the first branch of each If of
    one result; and these Ifs, by the id of the branch's result."""
    order: dict[int, int] = {}
    guards: dict[int, gs.Node] = {}
    for node in graph.nodes:
        branch = node.attrs.get("then_branch")  # an op of another domain may be called If, too
        if node.op == "If" and len(node.outputs) == 1 and isinstance(branch, gs.Graph):
            guards[id(branch.outputs[0])] = node
            for inner in branch.nodes:
                order[id(inner)] = len(order)
        order[id(node)] = len(order)
    return order, guards


def _seeds(graph: gs.Graph) -> Iterator[tuple[gs.Tensor, int, list[gs.Node]]]:
    """Yields, for each mixture of experts: the mask of tokens and slots (places among the top k) of
    all experts, its dimension of experts, and the NonZeros that each list the tokens of one
    expert."""
    readers: dict[tuple[int, int], list[gs.Node]] = defaultdict(list)
    masks: dict[int, gs.Tensor] = {}
    for node in graph.nodes:
        pick = _pick(node) if node.op == "NonZero" else None
        if pick is not None and len(tensor_shape(pick.inputs[0]) or ()) == 3:
            masks[id(pick.inputs[0])] = pick.inputs[0]
            readers[id(pick.inputs[0]), pick.attrs.get("axis", 0) % 3].append(node)
    for (mask, axis), seeds in readers.items():
        yield masks[mask], axis, seeds


def _pick(seed: gs.Node) -> gs.Node | None:
    """Returns the Gather `mask[expert]` whose result the NonZero `seed` reads, perhaps through
    Casts; None if there is none."""
    tensor = seed.inputs[0]
    while tensor.inputs and tensor.inputs[0].op in ("Cast", "Identity"):
        tensor = tensor.inputs[0].inputs[0]
    node = tensor.inputs[0] if tensor.inputs else None
    is_one = node is not None and node.op == "Gather" and tensor_shape(node.inputs[1]) == ()
    return node if is_one else None


def _traced(
    seed: gs.Node, order: Mapping[int, int], guards: Mapping[int, gs.Node]
) -> ScatteredExpert | None:
    """Follows an expert from its NonZero, `seed`, to the sum to which it adds; returns None if a
    node on the way is of no known form.

    order   the places of nodes, by id()
    guards  Ifs that run an expert only if it has tokens, by the id of their branch's result
    """
    pick = _pick(seed)
    assert pick is not None
    which = constant(pick.inputs[1])
    expert = ScatteredExpert(0, None, seed=seed, number=pick.inputs[1], guards=guards)
    expert.which = None if which is None else int(which)
    expert.others[id(seed.outputs[0])] = Index(((1, 0), (0, 1)), "cR")
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
        if not follow(expert, node):
            return None
        for tensor in node.outputs:
            is_known = id(tensor) in expert.others or expert.rows(tensor) is not None
            if is_known and not push(tensor.outputs):
                return None
    return expert if expert.total is not None else None


def _rewrite(
    graph: gs.Graph, mask: gs.Tensor, axis: int, experts: list[ScatteredExpert], folder: Path,
    order: Mapping[int, int],
) -> None:  # fmt: skip
    """Replaces a mixture of experts by one in which the expert is the first dimension, in place, if
    all of its experts compute the same steps.

    mask   the tokens and slots of each expert
    axis   the mask's dimension of experts
    order  the places of nodes, by id()
    """
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
    alike = all(_is_like(e, first, len(steps), token_at, slots) for e in experts)
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


def _is_like(
    expert: ScatteredExpert, first: ScatteredExpert, steps: int, token_at: int, slots: int
) -> bool:
    """True if an expert reads the same tokens as the first one, computes the same number of
    `steps`, and adds its results in the same way.

    token_at  the dimension of an expert's mask, 0 or 1, that is that of tokens
    slots     the number of slots of a token: the k of its top k experts
    """
    if expert.tokens is None or first.tokens is None or expert.result is None:
        return False
    return (
        expert.tokens[0] is first.tokens[0]
        and expert.token == first.token
        and expert.overwrites == first.overwrites
        and expert.result == first.result
        and expert.result.number == steps
        and _is_of(expert.weight, first.weight, token_at, slots)
    )


def _chain(experts: Sequence[ScatteredExpert]) -> tuple[gs.Tensor, gs.Tensor] | None:
    """Returns the total before the first expert adds to it, and the total after the last one; None
    if the sums do not follow one another."""
    totals = [e.total for e in experts if e.total is not None]
    after = {id(b): b for _, b in totals}
    before = {id(a): a for a, _ in totals}
    starts = [a for i, a in before.items() if i not in after]
    ends = [b for i, b in after.items() if i not in before]
    is_line = len(starts) == len(ends) == 1 and len(before) == len(after) == len(totals)
    return (starts[0], ends[0]) if is_line else None


def _count(mask: gs.Tensor, axis: int, experts: Sequence[ScatteredExpert]) -> int | None:
    """Returns the number of experts, if their numbers are the constants 0, 1, ... Returns -1 if
    each run computes the numbers, as the numbers of the experts that have a token. None for any
    other numbers."""
    numbers = [e.which for e in experts]
    if all(n is not None for n in numbers):
        return len(numbers) if sorted(n or 0 for n in numbers) == [*range(len(numbers))] else None
    origins = [_hit(e.number, mask, axis) for e in experts]
    parts = {part for _, part in origins}
    hits = {id(node) for node, _ in origins if node is not None}
    node = origins[0][0]
    if node is None or len(hits) != 1 or any(n is None for n, _ in origins):
        return None
    return -1 if parts == {*range(len(experts))} else None


def _hit(number: gs.Tensor | None, mask: gs.Tensor, axis: int) -> tuple[gs.Node | None, int]:
    """Returns the NonZero and the place of the element, if `number` is an element of a NonZero over
    the experts that have a token; else (None, -1). Dimension `axis` of `mask`, the tokens and slots
    of all experts, is that of experts."""
    part = -1
    while number is not None and number.inputs:
        node = number.inputs[0]
        if node.op == "NonZero":
            ok = part >= 0 and _has_token(node.inputs[0], mask, axis)
            return (node, part) if ok else (None, -1)
        if node.op == "Split":
            if part >= 0:
                return None, -1
            sizes = given_integers(node, 1) or []
            part = next(i for i, t in enumerate(node.outputs) if t is number)
            if set(sizes) - {1}:
                return None, -1
        elif node.op == "Gather":
            if integers(node.inputs[1]) != [0]:
                return None, -1
        elif node.op not in MOVES:
            return None, -1
        number = node.inputs[0]
    return None, -1


def _has_token(tensor: gs.Tensor, mask: gs.Tensor, axis: int) -> bool:
    """True if element i of the vector `tensor` says whether expert i of the mask has a token."""
    node = tensor.inputs[0] if tensor.inputs else None
    if node is None or node.op != "Greater" or not is_zero(node.inputs[1]):
        return False
    total = node.inputs[0].inputs[0] if node.inputs[0].inputs else None
    if total is None or total.op != "ReduceSum" or total.inputs[0] is not mask:
        return False
    axes = given_integers(total, 1)
    return axes is not None and {a % 3 for a in axes} == {0, 1, 2} - {axis}


def _is_of(weight: Weight | None, first: Weight | None, token_at: int, slots: int) -> bool:
    """True if an expert reads its weights from the first expert's table, at the token and slot of
    each pair; also if neither has weights.

    token_at  the dimension of an expert's mask, 0 or 1, that is that of tokens
    slots     the number of slots of a token: the k of its top k experts
    """
    if weight is None or first is None:
        return weight is first
    form = (1, slots) if token_at == 1 else (slots, 1)
    if (tensor_shape(weight.table) or (None,))[-1] not in (1, slots):
        return False
    return weight.table is first.table and weight.form == form


def _routed(
    write: DenseExperts, pairs: gs.Tensor, expert: ScatteredExpert, slots: int
) -> tuple[gs.Tensor, gs.Tensor | None]:
    """Returns the mask of each expert's tokens, and the weights of its results (None without
    weights), both [expert, token, 1]. `pairs` is the mask as [expert, token, slot]; `expert` is any
    of the experts."""
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
    """True if the mask comes from the indices of a TopK, so that an expert occurs at most once for
    a token."""
    todo, steps = pairs, 0
    while todo.inputs and steps < 16:
        node = todo.inputs[0]
        if node.op == "TopK":
            return todo is node.outputs[1]
        known = (*MOVES, "OneHot", "Slice")
        variable = [t for t in node.inputs if not isinstance(t, gs.Constant)]
        is_equal = node.op == "Equal" and len(variable) == 1
        if node.op not in known and not is_equal:
            return False
        todo, steps = variable[0] if is_equal else node.inputs[0], steps + 1
    return False


def _token_rows(write: DenseExperts, tensor: gs.Tensor, axis: int) -> gs.Tensor:
    """Returns `tensor`, whose dimension `axis` is that of tokens, as [token, column]."""
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
