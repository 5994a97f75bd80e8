"""Infers which integers an input may hold from the nodes that read it: an input of Gather holds row
numbers of the table. For random inputs, and for checks of feeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.lookup import Lookup
from onnxpar.graph.interchange import default_of
from onnxpar.graph.tensors import constant, given, tensor_shape

Range = tuple[int, int]
"""(low, high): the integers low <= x < high."""
Limit = Callable[[gs.Node, int], Range | None]

_SAME_ELEMENTS = frozenset(
    ("Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Identity", "Expand", "Cast")
)
_FOLLOW = frozenset((*_SAME_ELEMENTS, "Concat", "Slice", "Split"))
_LOSSES = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
_COUNT = frozenset(("ReduceSum", "CumSum", "Sub"))
"""Ops by which models compute lengths or positions from a mask."""
_MASK = (0, 2)
"""The range of a mask: an input that nodes cast to floating point or bool, compare, or multiply."""
_ONES = (1, 2)
"""The range of a mask from which lengths or positions are computed: only ones, so that nothing is
masked."""
_MICROSOFT = "com.microsoft"


def integer_ranges(graph: gs.Graph) -> dict[str, Range]:
    """Returns the integers [low, high) that each integer input may hold, by name: row numbers of
    the tables that it indexes, or lengths or positions of a cache; (0, 2), as for a mask, for any
    other input."""
    return {
        tensor.name: _range(tensor, set()) or _MASK
        for tensor in graph.inputs
        if tensor.dtype is not None and "int" in str(tensor.dtype)
    }


def lookups(graph: gs.Graph, is_open: bool) -> list[Lookup]:
    """Returns the integer inputs whose elements (or some columns of them) are row numbers of a
    table, or the classes of a loss, with their bounds. If sizes are open (`is_open`), only tables
    that are stored weights count, because only their sizes are fixed."""
    return [
        _lookup(tensor.name, node, rows, columns)
        for tensor in graph.inputs
        if tensor.dtype is not None and "int" in str(tensor.dtype)
        for read, columns in [(tensor, ()), *_selections(tensor)]
        for node, rows in _tables(read, set())
        if not is_open or _is_stored(node.inputs[0])
    ]


def _lookup(name: str, node: gs.Node, rows: int, columns: tuple[int, ...]) -> Lookup:
    if node.op in _LOSSES:
        return Lookup(name, node.name, "", rows, columns, node.attrs.get("ignore_index"))
    return Lookup(name, node.name, node.inputs[0].name, rows, columns)


def _selections(tensor: gs.Tensor) -> Iterator[tuple[gs.Tensor, tuple[int, ...]]]:
    """Yields (tensor, columns) for each tensor that is a slice of `tensor` along one dimension,
    with the columns as (dimension, start, stop, step)."""
    for node in tensor.outputs:
        if node.inputs[0] is not tensor:
            continue
        shape = tensor_shape(tensor) or ()
        cuts = node.op in ("Gather", "Slice")  # other constants stay unread, in files
        bounds = [constant(t) for t in node.inputs[1:]] if cuts else []
        if node.op == "Identity":
            yield from _selections(node.outputs[0])
        elif node.op == "Gather" and bounds[0] is not None and bounds[0].size == 1:
            dim, at = int(node.attrs.get("axis", 0)) % len(shape), int(bounds[0].reshape(-1)[0])
            yield node.outputs[0], (dim, at, at + 1 or 2**31, 1)
        elif node.op == "Slice" and all(b is not None and b.size == 1 for b in bounds):
            start, stop, dim, *step = (int(b.reshape(-1)[0]) for b in bounds if b is not None)
            if len(bounds) > 2 and (not step or step[0] > 0):
                yield node.outputs[0], (dim % len(shape), start, stop, *(step or [1]))
        elif node.op == "Split":
            dim, start = int(node.attrs.get("axis", 0)) % len(shape), 0
            for result in node.outputs:
                size = (tensor_shape(result) or (None,) * len(shape))[dim]
                if size is None:
                    break
                yield result, (dim, start, start + size, 1)
                start += size


def _tables(tensor: gs.Tensor, seen: set[str]) -> Iterator[tuple[gs.Node, int]]:
    """Yields (node, number of rows) for each node that uses the elements of `tensor` as row numbers
    of a table, or as classes of a loss."""
    seen.add(tensor.name)
    for node in tensor.outputs:
        position = next(i for i, t in enumerate(node.inputs) if t is tensor)
        limit = _limit(node, position)
        if limit is not None and node.op in ("Gather", "GatherElements", *_LOSSES):
            yield node, limit[1]
        elif node.op == "Scan":  # over micro-batches
            yield from _tables(node.attrs["body"].inputs[position], seen)
        elif node.op in _SAME_ELEMENTS and position == 0:
            result = node.outputs[0]
            if result.name not in seen and "float" not in str(result.dtype):
                yield from _tables(result, seen)


def _is_stored(table: gs.Tensor) -> bool:
    return isinstance(table, gs.Constant) or default_of(table) is not None


def _range(tensor: gs.Tensor, seen: set[str]) -> Range | None:
    """Returns the integers that all readers of a tensor accept in it (the intersection of their
    ranges); None if no reader limits them. `seen` are names of tensors that have been visited."""
    seen.add(tensor.name)
    ranges: list[Range] = []
    for node in tensor.outputs:
        position = next(i for i, t in enumerate(node.inputs) if t is tensor)
        limit = _limit(node, position)
        if limit is not None:
            ranges.append(limit)
            continue
        is_counted = node.op in _COUNT and position == 0
        if (node.op in _FOLLOW and position == 0) or node.op == "Concat" or is_counted:
            for result in node.outputs:
                if result.name not in seen and "float" not in str(result.dtype):
                    inner = _range(result, seen)
                    ranges += [_ONES if is_counted else inner] if inner else []
    low = max((r[0] for r in ranges), default=0)
    high = min((r[1] for r in ranges), default=0)
    return (min(low, high - 1), high) if ranges else None


def _limit(node: gs.Node, position: int) -> Range | None:
    """Returns the integers that a node accepts in its operand at `position`; None if it accepts
    any."""
    domain = "" if node.domain in (None, "ai.onnx") else node.domain
    limits = _LIMITS.get((domain, node.op), {})
    accepted = limits[position](node, position) if position in limits else None
    return None if accepted is None or accepted[1] <= accepted[0] else accepted


def _size(node: gs.Node, index: int, axis: int) -> int | None:
    """Returns the size of operand number `index` along an axis; None if it is unknown."""
    tensor = given(node, index)
    shape = None if tensor is None else tensor_shape(tensor)
    return shape[axis] if shape and -len(shape) <= axis < len(shape) else None


def _below(size: int | None, low: int = 0) -> Range | None:
    return None if size is None else (low, size)


def _rows(data: int, axis: int | None = None) -> Limit:
    """Returns a limit for row numbers: the indices along `axis` of the operand number `data`; None:
    along the node's attribute `axis`."""

    def limit(node: gs.Node, position: int) -> Range | None:
        return _below(_size(node, data, node.attrs.get("axis", 0) if axis is None else axis))

    return limit


def _coordinates(node: gs.Node, position: int) -> Range | None:
    """The limit for the index tuples of a GatherND: the same range for all indices of a tuple, that
    of the smallest dimension."""
    count, start = _size(node, 1, -1), node.attrs.get("batch_dims", 0)
    shape = tensor_shape(node.inputs[0])
    sizes = (shape or ())[start : start + (count or 0)]
    known = [s for s in sizes if s is not None]
    return (0, min(known)) if known and len(known) == count else None


def _places(cache: int, axis: int, written: int, written_axis: int) -> Limit:
    """Returns a limit for a position in a cache: where `written` (an operand number) still fits
    into the operand `cache` along the given axes."""

    def limit(node: gs.Node, position: int) -> Range | None:
        length, count = _size(node, cache, axis), _size(node, written, written_axis)
        return None if length is None or count is None else (0, length - count + 1)

    return limit


def _lengths(of: int, axis: int, past: int | None = None, past_axis: int = 2) -> Limit:
    """Returns a limit for the lengths of sequences: 1 up to the size of operand `of` along `axis`,
    plus that of the operand `past` along `past_axis`. No limit if the operand has several
    dimensions: then it is a mask."""

    def limit(node: gs.Node, position: int) -> Range | None:
        shape = tensor_shape(node.inputs[position])
        size = _size(node, of, axis)
        before = (0 if past is None else _size(node, past, past_axis)) or 0
        return None if size is None or len(shape or ()) != 1 else (1, size + before + 1)

    return limit


def _total(node: gs.Node) -> int | None:
    """Returns how many keys a GroupQueryAttention attends to: past and new keys, or the length of
    the cache if it has a fixed length; None if unknown."""
    new, past = _size(node, 0, 1), _size(node, 3, 2) or 0
    shape = tensor_shape(node.outputs[1]) if len(node.outputs) > 1 else None
    fixed = shape[2] if shape and len(shape) == 4 else None
    return None if new is None else past if past and fixed == past else past + new


def _exact(less: int) -> Limit:
    """Returns a limit that allows one value alone: the number of all keys minus `less`."""

    def limit(node: gs.Node, position: int) -> Range | None:
        total = _total(node)
        return None if total is None else (total - less, total - less + 1)

    return limit


def _classes(node: gs.Node, position: int) -> Range | None:
    return _below(_size(node, 0, 1))


def _offsets(node: gs.Node, position: int) -> Range | None:
    """The limit for offsets into the table of angles of a RotaryEmbedding: a row number; if one
    offset holds for a whole sequence, the rest of the sequence must fit behind it."""
    rows, shape = _size(node, 2, 0), tensor_shape(node.inputs[0]) or ()
    is_one = len(tensor_shape(node.inputs[1]) or ()) == 1
    length = (shape[1] if len(shape) == 3 else shape[2] if len(shape) == 4 else 1) if is_one else 1
    return None if rows is None or length is None else (0, rows - length + 1)


def _one(node: gs.Node, position: int) -> Range | None:
    """The limit for an operand that must be 1."""
    return 1, 2


def _compared(node: gs.Node, position: int) -> Range | None:
    """The limit for an operand that Equal compares with constants, as in a one-hot encoding: the
    range of these constants. None for fewer than 3 different ones."""
    listed = constant(node.inputs[1 - position])
    if listed is None or listed.dtype.kind not in "iu" or np.unique(listed).size < 3:
        return None
    return int(listed.min()), int(listed.max()) + 1


def _depth(node: gs.Node, position: int) -> Range | None:
    depth = constant(node.inputs[1])
    return None if depth is None else _below(int(depth.reshape(-1)[0]))


def _beams(node: gs.Node, position: int) -> Range | None:
    return _below(_size(node, position, 1))


_LIMITS: Mapping[tuple[str, str], Mapping[int, Limit]] = {
    ("", "Gather"): {1: _rows(0)},
    ("", "GatherElements"): {1: _rows(0)},
    ("", "GatherND"): {1: _coordinates},
    ("", "ScatterElements"): {1: _rows(0)},
    ("", "ScatterND"): {1: _coordinates},
    ("", "SoftmaxCrossEntropyLoss"): {1: _classes},
    ("", "NegativeLogLikelihoodLoss"): {1: _classes},
    ("", "ReverseSequence"): {
        1: lambda node, _: _below((_size(node, 0, node.attrs.get("time_axis", 0)) or 0) + 1, 1)
    },
    ("", "Equal"): {0: _compared, 1: _compared},
    ("", "OneHot"): {0: _depth},
    ("", "LSTM"): {4: _lengths(0, 0)},
    ("", "GRU"): {4: _lengths(0, 0)},
    ("", "RNN"): {4: _lengths(0, 0)},
    ("", "RotaryEmbedding"): {3: _rows(1, 0)},
    ("", "TensorScatter"): {
        2: lambda node, position: _places(
            0, node.attrs.get("axis", -2), 1, node.attrs.get("axis", -2)
        )(node, position)
    },
    ("", "Attention"): {6: _lengths(1, -2)},
    (_MICROSOFT, "GatherBlockQuantized"): {
        1: lambda node, _: _below(_size(node, 0, node.attrs.get("gather_axis", 0)))
    },
    (_MICROSOFT, "EmbedLayerNormalization"): {0: _rows(2, 0), 1: _rows(4, 0)},
    (_MICROSOFT, "RotaryEmbedding"): {1: _offsets},
    (_MICROSOFT, "GroupQueryAttention"): {5: _exact(1), 6: _exact(0), 9: _rows(7, 0)},
    (_MICROSOFT, "Attention"): {3: _lengths(0, 1, 4, 3), 6: _places(4, 3, 0, 1)},
    (_MICROSOFT, "MultiHeadAttention"): {4: _lengths(1, -2, 6), 8: _places(6, 2, 0, 1), 9: _one},
    (_MICROSOFT, "DecoderMaskedMultiHeadAttention"): {7: _places(5, 2, 0, 1), 8: _one, 9: _beams},
    (_MICROSOFT, "DecoderMaskedSelfAttention"): {6: _places(4, 3, 0, 1), 7: _one, 8: _beams},
}
"""By (domain, op) and operand number: a function that returns the integers that the op accepts
there."""
