"""Dimensions of a node's operands that must be equal, by the definition of its op.

Two open sizes count as equal even if the op would broadcast a dimension of 1. A run in which only
one of the two is 1 is then rejected, because its sizes contradict the symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from onnx import NodeProto, helper

from onnxpar.graph.paged_attention import (
    KEY,
    KEYS,
    PAGED_ATTENTION,
    POSITIONS,
    QUERY,
    ROWS,
    VALUES,
)

Shape = tuple[int | None, ...]
Shapes = Sequence[Shape | None]
Place = tuple[int, int]
"""(index of an operand, axis)."""


class Multiple(NamedTuple):
    """The size of an operand's dimension (`place`), rounded down to a multiple of `of`."""

    place: Place
    of: int


Size = Place | int | Multiple
Pairs = Iterator[tuple[Place, Size]]
"""Pairs of a dimension and the size that it must have: another dimension, a number, or a
Multiple."""

_BROADCAST = frozenset(
    (
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Pow",
        "Mod",
        "BitShift",
        "BitwiseAnd",
        "BitwiseOr",
        "BitwiseXor",
        "And",
        "Or",
        "Xor",
        "Equal",
        "Less",
        "Greater",
        "LessOrEqual",
        "GreaterOrEqual",
        "Where",
        "Max",
        "Min",
        "Sum",
        "Mean",
        "PRelu",
        "BiasGelu",
        "BiasAdd",
    )
)

EVEN = _BROADCAST | frozenset(
    (
        "Relu",
        "Gelu",
        "Sigmoid",
        "Tanh",
        "Erf",
        "Exp",
        "Log",
        "Sqrt",
        "Neg",
        "Abs",
        "Cast",
        "Clip",
        "Softmax",
        "LayerNormalization",
        "Identity",
        "Not",
        "Transpose",
        "Sin",
        "Cos",
        "Reciprocal",
        "HardSigmoid",
        "HardSwish",
        "BatchNormalization",
        "Dropout",
        "MatMul",
        "Gemm",
    )
)
"""Ops whose results have no sizes but those of their operands."""


def equal_sizes(node: NodeProto, shapes: Shapes) -> Iterator[tuple[Place, Size, bool]]:
    """Yields (dimension of an operand, the size that it must have, True if a size of 1 is allowed,
    too, and broadcast). The size is another dimension, a number from an attribute, or a Multiple.
    """
    operands: Sequence[int] = range(len(shapes))
    skipped = 0
    if node.op_type not in _BROADCAST:
        yield from ((a, b, False) for a, b in _RULES.get(node.op_type, _none)(node, shapes))
        operands, skipped = _REPEATED.get(node.op_type, ((), 0))
        operands = [i for i in operands if i < len(shapes)]
    yield from ((a, b, True) for a, b in _aligned(shapes, operands, skipped))
    if (mask := _MASKS.get((node.domain, node.op_type), len(shapes))) < len(shapes):
        yield from ((a, b, True) for a, b in _mask(node, shapes, mask))


def _none(node: NodeProto, shapes: Shapes) -> Pairs:
    return iter(())


def _aligned(shapes: Shapes, operands: Sequence[int], skipped: int) -> Pairs:
    """Yields pairs of dimensions of different operands that numpy's broadcasting aligns: with equal
    distance from the end. Leaves out the last `skipped` dimensions."""
    for i, j in combinations(operands, 2):
        a, b = shapes[i], shapes[j]
        for back in range(1 + skipped, 1 + min(len(a or ()), len(b or ()))):
            yield (i, len(a or ()) - back), (j, len(b or ()) - back)


def _attributes(node: NodeProto) -> dict[str, object]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _matmul(node: NodeProto, shapes: Shapes) -> Pairs:
    a, b = shapes[0], shapes[1]
    if not a or not b:
        return
    attributes = _attributes(node)
    first, second = len(a) - 1, max(len(b) - 2, 0)
    if attributes.get("transA") and len(a) > 1:
        first -= 1
    if attributes.get("transB") and len(b) > 1:
        second += 1
    yield (0, first), (1, second)


def _gemm(node: NodeProto, shapes: Shapes) -> Pairs:
    attributes = _attributes(node)
    if shapes[0] and shapes[1]:
        yield (0, 0 if attributes.get("transA") else 1), (1, 1 if attributes.get("transB") else 0)


def _concat(node: NodeProto, shapes: Shapes) -> Pairs:
    axis = _attributes(node).get("axis", 1)
    assert isinstance(axis, int)
    for i, shape in enumerate(shapes[1:], 1):
        rank = len(shape or ())
        if rank == len(shapes[0] or ()):
            yield from (((0, d), (i, d)) for d in range(rank) if d != axis % rank)


def _recurrence(node: NodeProto, shapes: Shapes) -> Pairs:
    batch = 0 if _attributes(node).get("layout") else 1
    for i in (4, 5, 6):
        shape = shapes[i] if i < len(shapes) else None
        if shape and shapes[0]:
            yield (0, batch), (i, 0 if i == 4 else batch)


def _same_shape(*operands: int) -> Callable[[NodeProto, Shapes], Pairs]:
    def pairs(node: NodeProto, shapes: Shapes) -> Pairs:
        here = [i for i in operands if i < len(shapes) and shapes[i]]
        if len({len(shapes[i] or ()) for i in here}) == 1:
            yield from _aligned(shapes, here, 0)

    return pairs


def _attention(node: NodeProto, shapes: Shapes) -> Pairs:
    """Pairs for attention ops: queries, keys and values have the same batch, keys and values the
    same length, heads of queries and keys the same width; a cache has their batch, number of heads
    and head width."""
    q, k, v = ([*shapes, None, None, None])[:3]
    if q and k and v and len(q) == len(k) == len(v):
        yield (0, 0), (1, 0)
        yield (0, 0), (2, 0)
        length = len(k) - 2
        yield (1, length), (2, length)
        if len(q) == 4:
            yield (0, 3), (1, 3)
    attributes = _attributes(node)
    by_text = _BY_TEXT.get((node.domain, node.op_type), len(shapes))
    if q and by_text < len(shapes) and shapes[by_text]:
        yield (0, 0), (by_text, 0)
    if not q or attributes.get("k_quant_type", b"NONE") != b"NONE":
        return
    heads, width = _heads(attributes, q, is_packed=not k)
    of_values = (v[-1] or 0) // heads if v and heads and len(v) == 3 else width
    first = _CACHES.get((node.domain, node.op_type), len(shapes))
    for i, own, of_cache in ((first, 1, width), (first + 1, 2, of_values)):
        if i < len(shapes) and len(shapes[i] or ()) == 4:
            yield (0, 0), (i, 0)
            if own < len(shapes) and len(shapes[own] or ()) == 4:
                yield from (((i, axis), (own, axis)) for axis in (1, 3))
            else:
                yield from (((i, axis), n) for axis, n in ((1, heads), (3, of_cache)) if n)


def _mask(node: NodeProto, shapes: Shapes, mask: int) -> Pairs:
    """Pairs for the mask of an attention op (operand number `mask`), which is broadcast over batch,
    heads and queries. Without a cache, it covers all keys: a shorter mask would hide the others
    (ONNX's Attention from opset 24 on), and a longer one is invalid."""
    query, shape = shapes[0], shapes[mask]
    if not query or not shape:
        return
    heads = next((n for key in _HEADS if (n := _attributes(node).get(key))), None)
    of_scores: dict[int, Place | int] = {2: (0, 2 if len(query) == 4 else 1), 4: (0, 0)}
    if len(query) == 4:
        of_scores[3] = (0, 1)
    elif isinstance(heads, int):
        of_scores[3] = heads
    key = shapes[1] if len(shapes) > 1 else None
    if key and len(key) == len(query) and not any(shapes[_CACHES[node.domain, node.op_type] :][:1]):
        of_scores[1] = (1, len(key) - 2)
    yield from (((mask, len(shape) - b), n) for b, n in of_scores.items() if b <= len(shape))


def _depth_to_space(node: NodeProto, shapes: Shapes) -> Pairs:
    yield (0, 1), Multiple((0, 1), _block(node) ** 2)


def _space_to_depth(node: NodeProto, shapes: Shapes) -> Pairs:
    yield from (((0, axis), Multiple((0, axis), _block(node))) for axis in (2, 3))


def _block(node: NodeProto) -> int:
    size = _attributes(node).get("blocksize")
    return size if isinstance(size, int) and size > 0 else 1


def _paged_attention(node: NodeProto, shapes: Shapes) -> Pairs:
    """Pairs for PagedAttention: heads are as wide as the caches; each token has a row of the table
    and a position."""
    query, caches = shapes[QUERY], (KEYS, VALUES)
    if query and len(query) == 3:
        attributes = _attributes(node)
        heads, width = _heads(attributes, query, is_packed=not shapes[KEY])
        scale = attributes.get("scale_bytes", 0)
        if width and isinstance(scale, int):
            known = ((1, heads), (3, width + scale))
            yield from (((cache, axis), n) for cache in caches for axis, n in known)
        yield from (((QUERY, 1), (i, 0)) for i in (ROWS, POSITIONS))
    yield from (((KEYS, axis), (VALUES, axis)) for axis in (0, 2))


def _attention_of_one(node: NodeProto, shapes: Shapes) -> Pairs:
    """Pairs for an attention op that takes exactly one query for each sequence of the batch."""
    if shapes[0] and len(shapes[0]) == 3:
        yield (0, 1), 1
    yield from _attention(node, shapes)


def _heads(attributes: Mapping[str, object], q: Shape, is_packed: bool) -> tuple[int, int]:
    """Returns the number of heads of a cache and the width of a key; 0 for what is unknown.

    q          the shape of the first operand
    is_packed  True if the first operand has queries, keys and values side by side
    """
    own, shared = (
        next((n for key in keys if isinstance(n := attributes.get(key), int)), 0)
        for keys in (_HEADS, ("kv_num_heads",))
    )
    shared, size = shared or own, q[-1] or 0
    if len(q) == 3 and own:
        return shared, size // (own + 2 * shared if is_packed else own)
    return 0, size if len(q) == 4 else 0


_HEADS = ("num_heads", "q_num_heads")
_MASKS = {
    ("", "Attention"): 3,
    ("com.microsoft", "Attention"): 5,
    ("com.microsoft", "GroupQueryAttention"): 10,
    ("com.microsoft", "MultiHeadAttention"): 5,
    ("com.microsoft", "DecoderMaskedMultiHeadAttention"): 4,
}
"""Position of the operand that is the mask, or is added to the scores."""
_CACHES = {
    ("", "Attention"): 4,
    ("com.microsoft", "GroupQueryAttention"): 3,
    ("com.microsoft", "MultiHeadAttention"): 6,
    ("com.microsoft", "DecoderMaskedMultiHeadAttention"): 5,
}
"""Position of the operand with past keys; the next operand has past values."""
_BY_TEXT = {
    ("", "Attention"): 6,
    ("com.microsoft", "GroupQueryAttention"): 5,
}
"""Position of the operand that has a number for each sequence of the batch."""
_REPEATED: dict[str, tuple[Sequence[int], int]] = {
    "MatMul": ((0, 1), 2),
    "MatMulInteger": ((0, 1), 2),
    "FusedMatMul": ((0, 1), 2),
    "LayerNormalization": ((0, 1, 2), 0),
    "RMSNormalization": ((0, 1), 0),
    "SkipLayerNormalization": ((0, 1), 0),
    "SkipSimplifiedLayerNormalization": ((0, 1), 0),
    "SimplifiedLayerNormalization": ((0, 1), 0),
}
"""Operands that an op broadcasts against each other, and how many of their last dimensions it does
not broadcast."""
_RULES: dict[str, Callable[[NodeProto, Shapes], Pairs]] = {
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "FusedMatMul": _matmul,
    "Gemm": _gemm,
    "Concat": _concat,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "LSTM": _recurrence,
    "GRU": _recurrence,
    "RNN": _recurrence,
    "ScatterElements": _same_shape(1, 2),
    "Attention": _attention,
    "GroupQueryAttention": _attention,
    "MultiHeadAttention": _attention,
    "DecoderMaskedMultiHeadAttention": _attention_of_one,
    PAGED_ATTENTION: _paged_attention,
}
