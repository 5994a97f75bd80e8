"""Follows one expert of a mixture that selects its tokens with NonZero, from the NonZero to the sum
of results.

A pair is one entry of the mask of the expert: a token and a slot, that is, the place of the expert
among the top k of the token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import constant, tensor_shape
from onnxpar.load.pair_indices import MOVES, Index, moved_index
from onnxpar.load.row_program import Beside, Own, RowProgram, Rows, Shared, Stacked
from onnxpar.load.shape_values import integers

_IN_ORDER = frozenset(["Flatten", "Unsqueeze", "Squeeze", "Reshape", "Identity"])
"""Ops that keep the flat order of elements."""


@dataclass(frozen=True)
class Weight:
    """The weights with which an expert's results are multiplied, as elements of a table. A pair is
    an entry of the expert's mask, a token and a slot (place among the token's top k); the weight of
    the pair at (row, column) of the mask is element a * row + b * column of the flat `table`, where
    `form` is (a, b)."""

    table: gs.Tensor
    form: tuple[int, int]


@dataclass(frozen=True)
class _Scaled:
    """The rows of an expert's tokens, each multiplied by its weight."""

    rows: Rows
    weight: Weight


@dataclass(frozen=True)
class _Placed:
    """The result of a scatter of an expert's rows into zeros: each row is where its token is."""

    rows: Rows
    weight: Weight | None


@dataclass(eq=False)
class ScatteredExpert(RowProgram):
    """One expert, as far as its nodes are followed, from the NonZero `seed` that selects its pairs:
    a token and a slot (place among the token's top k).

    which       the number of the expert in the mask, if it is constant; else None
    number      the tensor with that number, if there is one
    tokens      the tensor whose rows the expert reads, and its dimension of tokens
    token       (a, b): the token of a pair is a * row + b * column of the mask
    result      the last step's rows, which are added to the total
    weight      the weight of each pair's result, if there is one
    total       the tensor to whose rows the expert adds, and the sum
    overwrites  True if of two pairs of one token only the last counts
    others      what tensors other than rows mean (an Index, a Weight ...), by the id of the tensor
    guards      an If that runs the expert only if it has tokens, by the id of its branch's result
    """

    seed: gs.Node = field(default_factory=gs.Node)
    which: int | None = None
    number: gs.Tensor | None = None
    tokens: tuple[gs.Tensor, int] | None = None
    token: tuple[int, int] | None = None
    result: Rows | None = None
    weight: Weight | None = None
    total: tuple[gs.Tensor, gs.Tensor] | None = None
    overwrites: bool = False
    others: dict[int, Any] = field(default_factory=dict)
    guards: Mapping[int, gs.Node] = field(default_factory=dict)

    def operand(self, tensor: gs.Tensor) -> Own | Stacked | Shared | Beside | None:
        """Returns the weight that a node of the expert reads: a constant, or the expert's slice of
        a tensor of all experts, perhaps transposed. None if the tensor is neither."""
        flipped, maker = False, tensor.inputs[0] if tensor.inputs else None
        if maker is not None and maker.op == "Transpose" and maker.attrs.get("perm") == [1, 0]:
            flipped, tensor = True, maker.inputs[0]
            maker = tensor.inputs[0] if tensor.inputs else None
        if maker is not None and maker.op == "Gather" and maker.attrs.get("axis", 0) == 0:
            value = constant(maker.inputs[1])
            is_same = value is not None and value.ndim == 0 and value.item() == self.which
            if maker.inputs[1] is self.number or is_same:
                return Stacked(maker.inputs[0], flipped)
        return None if flipped else super().operand(tensor)


def follow(expert: ScatteredExpert, node: gs.Node) -> bool:
    """Records what the results of a node mean that reads tensors of an expert; returns False if the
    node is of no known form."""
    reads = [expert.others.get(id(t)) for t in node.inputs]
    rows = [expert.rows(t) for t in node.inputs]
    if any(isinstance(r, Index) for r in reads):
        if node.op in ("Gather", "GatherND") and isinstance(reads[1], Index):
            return _gather(expert, node, reads[1])
        if node.op in ("ScatterND", "ScatterElements"):
            return _scatter(expert, node, reads[1])
        return not any(rows) and _move_index(expert, node, reads)
    if any(isinstance(r, _Placed) for r in reads):
        return _add_placed(expert, node, reads)
    if any(isinstance(r, _Scaled) for r in reads):
        return _pass_scaled(expert, node, reads[0])
    if any(isinstance(r, Weight) for r in reads):
        return _scale(expert, node, reads, rows)
    return any(r is not None for r in rows) and expert.follow(node)


def _move_index(expert: ScatteredExpert, node: gs.Node, reads: Sequence[Any]) -> bool:
    """Records the result of a node that computes with indices, or moves their dimensions (Add, Mul,
    Slice, Reshape ...). Returns False if the node is of no known form, as all functions do that
    `follow` calls."""
    result = moved_index(node, reads)
    if isinstance(result, list):
        expert.others |= {id(t): r for t, r in zip(node.outputs, result, strict=True)}
        return True
    if result is not None:
        expert.others[id(node.outputs[0])] = result
    return result is not None


def _gather(expert: ScatteredExpert, node: gs.Node, index: Index) -> bool:
    """Records the result of a Gather or GatherND by `index`, which numbers an expert's tokens: the
    rows of these tokens, or their weights."""
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
    expert.others[id(node.outputs[0])] = Weight(data, (flat[0], flat[1]))
    return True


def _read_tokens(
    expert: ScatteredExpert, node: gs.Node, index: Index, shape: Sequence[int | None]
) -> bool:
    """Records the result of a Gather as the input of the expert: the rows of its tokens. `shape` is
    that of the gathered tensor."""
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
    expert: ScatteredExpert, node: gs.Node, reads: Sequence[Any], rows: Sequence[Rows | None]
) -> bool:
    """Records the result of a node that reads the weights of an expert's rows: it moves or casts
    them, or multiplies the rows by them. For each operand, `reads` and `rows` have its known
    meaning, or None."""
    weight = next(r for r in reads if r is not None)
    out = node.outputs[0]
    if node.op in MOVES and reads[0] is weight:
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


def _pass_scaled(expert: ScatteredExpert, node: gs.Node, scaled: Any) -> bool:
    """Records the result of a Cast, Identity or Expand of scaled rows, if the op changes nothing.
    `scaled` is the meaning of the operand."""
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


def _scatter(expert: ScatteredExpert, node: gs.Node, index: Any) -> bool:
    """Records a ScatterND or ScatterElements that puts an expert's rows where their tokens are:
    adds them to a total, or overwrites zeros. `index` is the meaning of its indices."""
    total, updates = node.inputs[0], node.inputs[2]
    value = expert.others.get(id(updates)) or expert.rows(updates)
    is_token = isinstance(index, Index) and index.forms == (expert.token,)
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


def _add_placed(expert: ScatteredExpert, node: gs.Node, reads: Sequence[Any]) -> bool:
    """Records an Add of rows that a scatter has put into zeros, and of the total so far."""
    placed = next(r for r in reads if r is not None)
    others = [t for t, r in zip(node.inputs, reads, strict=True) if r is None]
    if node.op != "Add" or len(others) != 1:
        return False
    expert.overwrites = True
    return _finish(expert, placed.rows, placed.weight, others[0], node.outputs[0])


def _finish(
    expert: ScatteredExpert, rows: Rows, weight: Weight | None, before: gs.Tensor, after: gs.Tensor
) -> bool:
    """Records the end of the expert: `rows`, times `weight`, are added to the total `before`, which
    gives `after`. If an If guards the sum, its result is the total."""
    guard = expert.guards.get(id(after))
    if guard is not None:
        if not _runs_for_rows(guard, expert, before):
            return False
        after = guard.outputs[0]
    if expert.total is not None or tensor_shape(before) != tensor_shape(after):
        return False
    expert.result, expert.weight, expert.total = rows, weight, (before, after)
    return True


def _runs_for_rows(guard: gs.Node, expert: ScatteredExpert, before: gs.Tensor) -> bool:
    """True if the If `guard` runs its first branch only where the expert has tokens, and else
    returns `before`, the total without this expert."""
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
    return is_before and isinstance(expert.others.get(id(node.inputs[0])), Index)


def is_zero(tensor: gs.Tensor) -> bool:
    """True for a tensor that is known to be all zeros."""
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
