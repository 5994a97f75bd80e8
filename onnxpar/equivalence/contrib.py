"""Lemmas of ops that ONNX does not have: of onnxruntime, and of the plugin that compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.equivalence.held import Held, Partial
from onnxpar.equivalence.lemma import (
    Case,
    Lemma,
    NotShown,
    Result,
    broadcast,
    elementwise,
    layer_norm,
    no_partial,
)
from onnxpar.equivalence.program import Shape
from onnxpar.equivalence.spans import Family

COMPUTE = "onnxpar.compute"
_MICROSOFT = "com.microsoft"


class _Heads:
    """The heads that ranks have of an attention whose heads of queries share heads of keys: query
    head q reads key head q // `each`.

    width    the elements of a head
    queries  of each rank, its heads of queries
    keys     of each rank, its heads of keys and values
    """

    def __init__(self, case: Case, width: int) -> None:
        self.case, self.width = case, width
        self.count, self.shared = int(case.attr("num_heads")), int(case.attr("kv_num_heads"))
        self.each = self.count // self.shared
        counts = [
            case.local.attrs(name, case.ranks.programs) for name in ("num_heads", "kv_num_heads")
        ]
        queries, keys = [], []
        is_packed = case.held[1] is None
        for rank, (own, shared) in enumerate(zip(*counts, strict=True)):
            span, end = case.operand(0).dims[2].spans[rank], int(own) * width
            parts = [case.operand(i).dims[2].spans[rank] for i in (1, 2)] if not is_packed else []
            if is_packed:
                parts = [span[end : end + int(shared) * width], span[end + int(shared) * width :]]
            begin = self.count * width if is_packed else 0
            second = begin + self.shared * width if is_packed else 0
            of_query = self._heads(span[:end] if is_packed else span, 0, self.count, rank)
            of_key = self._heads(parts[0], begin, self.shared, rank)
            of_value = self._heads(parts[1], second, self.shared, rank)
            if len(of_query) != int(own) or len(of_key) != int(shared):
                raise NotShown(f"rank {rank} has other numbers of heads than it says")
            if not np.array_equal(of_key, of_value):
                raise NotShown(f"rank {rank} has keys and values of other heads")
            together = len(of_query) // max(len(of_key), 1)
            if not np.array_equal(of_query // self.each, np.repeat(of_key, together)):
                raise NotShown(f"rank {rank} has keys of other heads than its queries read")
            queries.append(of_query)
            keys.append(of_key)
        self.queries, self.keys = case.families.of(queries), case.families.of(keys)

    def _heads(self, span: Array, begin: int, count: int, rank: int) -> Array:
        """The heads whose elements a rank has, from element `begin` on."""
        heads = (span[:: self.width] - begin) // self.width
        wanted = (heads[:, None] * self.width + np.arange(self.width)).reshape(-1) + begin
        is_inside = not len(heads) or 0 <= heads.min() <= heads.max() < count
        if not is_inside or not np.array_equal(span, wanted):
            raise NotShown(f"rank {rank} has parts of heads")
        return heads

    @property
    def result(self) -> Family:
        """The elements of the result: one head of queries behind the other."""
        spans = self.queries.spans
        wide = [(s[:, None] * self.width + np.arange(self.width)).reshape(-1) for s in spans]
        return self.case.families.of(wide)


def _holds(held: Held | None, wanted: Sequence[Family | None], shape: Shape, case: Case) -> None:
    """Raises NotShown unless an operand has these positions; None: it must be whole."""
    if held is None:
        return
    if len(wanted) != len(held.dims):
        raise NotShown(f"{held.term!r} has {len(held.dims)} dimensions")
    for axis, family in enumerate(wanted):
        if family is None:
            case.whole(held, axis, shape)
        elif held.dims[axis] is not family:
            raise NotShown(f"{held.term!r} holds other positions of dimension {axis}")


def paged_attention(case: Case) -> list[Result]:
    """PagedAttention: heads are free; tokens, pages and what says where tokens are, are whole."""
    case.same_attrs("num_heads", "kv_num_heads")
    no_partial(*case.held)
    cache, shapes = case.shapes[3], case.shapes
    heads = _Heads(case, cache[3] - int(case.node.attrs.get("scale_bytes", 0)))
    for index, held in enumerate(case.held):
        wanted: list[Family | None] = [None] * len(shapes[index])
        if index < 3 and wanted:
            assert held is not None
            wanted[2] = held.dims[2]
        elif index in (3, 4):
            wanted[1] = heads.keys
        elif index == 10 and wanted:
            wanted[0] = heads.queries
        _holds(held, wanted, shapes[index], case)
    whole = case.families.whole
    query = (*shapes[0][:2], heads.count * heads.width)
    results = [Result(0, (whole(query[0]), whole(query[1]), heads.result), query)]
    return results + [Result(i, case.operand(i + 2).dims, cache) for i in (1, 2)]


def grouped_attention(case: Case) -> list[Result]:
    """GroupQueryAttention: texts and heads are free, tokens are whole."""
    case.same_attrs("num_heads", "kv_num_heads")
    no_partial(*case.held)
    if any(case.node.outputs[3:]) or len(case.held) > 12:
        raise NotShown("it has more operands or results than a rule knows")
    shapes, query = case.shapes, case.operand(0)
    batch, tokens, size = shapes[0]
    shared = int(case.attr("kv_num_heads"))
    count = int(case.attr("num_heads")) + (2 * shared if case.held[1] is None else 0)
    heads = _Heads(case, size // count)
    for index, held in enumerate(case.held):
        own = shapes[index]
        wanted: list[Family | None] = [None] * len(own)
        if index in (0, 1, 2, 3, 4, 5, 9, 10) and own and own[0] == batch:
            wanted[0] = query.dims[0]
        if index < 3 and own:
            assert held is not None
            wanted[2] = held.dims[2]
        elif index in (3, 4) and own:
            wanted[1] = heads.keys
        elif index == 10 and own and own[1] == heads.count:
            wanted[1] = heads.queries
        elif index == 11 and own:
            wanted[0] = heads.queries
        _holds(held, wanted, own, case)
    whole, width = case.families.whole, heads.width
    result = (query.dims[0], whole(tokens), heads.result)
    results = [Result(0, result, (batch, tokens, heads.count * width))]
    for index in (1, 2):
        before = shapes[index + 2][2] if case.held[index + 2] is not None else 0
        known = (
            case.model.shapes.get(case.node.outputs[index]) if any(case.node.outputs[1:]) else ()
        )
        length = known[2] if known else before + tokens  # else data decide, and any will do
        dims = (query.dims[0], heads.keys, whole(length), whole(width))
        results.append(Result(index, dims, (batch, shared, length, width)))
    return results[: len(case.node.outputs)]


def skip_norm(case: Case) -> list[Result]:
    """SkipLayerNormalization and its like: what is added has the same positions; the last dimension
    is whole, and so are scale and bias."""
    case.same_attrs()
    no_partial(*case.held)
    held, shape = case.operand(0), tuple(case.shapes[0])
    if broadcast(case, (0, 1)) != (held.dims, shape):
        raise NotShown(f"{case.operand(1).term!r} is larger than {held.term!r}")
    case.whole(held, len(shape) - 1, shape)
    for other, own in zip(case.held[2:], case.shapes[2:], strict=True):
        if other is not None and not other.is_whole(tuple(own)):
            raise NotShown(f"{other.term!r} must be whole on each rank")
    one = (*held.dims[:-1], case.families.whole(1))
    statistics = [Result(i, one, (*shape[:-1], 1)) for i in (1, 2)]
    found = [Result(0, held.dims, shape), *statistics, Result(3, held.dims, shape)]
    return found[: len(case.node.outputs)]


def packed_matmul(case: Case) -> list[Result]:
    """MatMulNBits: rows of the weight, which are columns of the product, are free; ranks that have
    some blocks of all rows have a part of a sum."""
    case.same_attrs("N", "K")
    no_partial(*case.held)
    a, b, shape = case.operand(0), case.operand(1), case.shapes[0]
    count, size = int(case.attr("K")), int(case.attr("block_size"))
    bits, blocks = int(case.attr("bits") or 4), case.shapes[1][1]
    rows, cut = b.dims[0], b.dims[1]
    is_cut = not cut.is_whole(blocks)
    if is_cut and count % size:
        raise NotShown("the last block is shorter than others")
    inner = case.families.of(_blocks(span, size, count) for span in cut.spans)
    if a.dims[-1] is not inner:
        raise NotShown("both operands must hold the same positions of the dimension that is summed")
    wide = {"N": rows.sizes, "K": inner.sizes}
    for name, sizes in wide.items():
        if [int(n) for n in case.local.attrs(name, case.ranks.programs)] != [*sizes]:
            raise NotShown(f"a rank has another {name}")
    case.whole(b, 2, case.shapes[1])
    per_row = {blocks: cut, -(-blocks * bits // 8): _bytes(case, cut, blocks, bits)}
    for index in (2, 3):
        if index < len(case.held) and case.held[index] is not None:
            held, own = case.operand(index), tuple(case.shapes[index])
            each = own[1] if len(own) == 2 else own[0] // case.shapes[1][0]
            family = per_row.get(each)
            if family is None:
                raise NotShown(f"{held.term!r} has {each} elements for each row")
            wanted = (rows, family) if len(own) == 2 else (_flat(case, rows, family, each),)
            if held.dims != wanted:
                raise NotShown(f"{held.term!r} holds other positions than the weight")
    for index in range(4, len(case.held)):
        if case.held[index] is not None and (is_cut or index == 4):
            raise NotShown(f"{case.operand(index).term!r} is added on each rank, or an order")
        _holds(case.held[index], [rows], case.shapes[index], case)
    partial = (Partial("sum", inner, count),) if is_cut else ()
    dims = (*a.dims[:-1], rows)
    return [Result(0, dims, (*shape[:-1], case.shapes[1][0]), partial)]


def _blocks(span: Array, size: int, end: int) -> Array:
    """The elements of blocks of this size; the last block may be shorter."""
    wide = (span[:, None] * size + np.arange(size)).reshape(-1)
    return wide[wide < end]


def _bytes(case: Case, cut: Family, blocks: int, bits: int) -> Family | None:
    """The bytes with a number of so many bits for each block; None if ranks share one."""
    found = []
    for span in cut.spans:
        begin, end = (int(span[0]), int(span[-1]) + 1) if len(span) else (0, 0)
        is_apart = not begin * bits % 8 and (not end * bits % 8 or end == blocks)
        if not is_apart or end - begin != len(span) or (np.diff(span) != 1).any():
            return None
        found.append(np.arange(begin * bits // 8, -(-end * bits // 8)))
    return case.families.of(found)


def _flat(case: Case, rows: Family, columns: Family, size: int) -> Family:
    """The elements of a matrix, row by row, of which ranks have these rows and columns."""
    pairs = zip(rows.spans, columns.spans, strict=True)
    return case.families.of((r[:, None] * size + c).reshape(-1) for r, c in pairs)


CONTRIB: Mapping[tuple[str, str], Lemma] = {
    (COMPUTE, "PagedAttention"): paged_attention,
    (_MICROSOFT, "GroupQueryAttention"): grouped_attention,
    (_MICROSOFT, "MatMulNBits"): packed_matmul,
    (_MICROSOFT, "SkipLayerNormalization"): skip_norm,
    (_MICROSOFT, "SkipSimplifiedLayerNormalization"): skip_norm,
    ("", "SimplifiedLayerNormalization"): layer_norm,
    **{(_MICROSOFT, op): elementwise() for op in ("Gelu", "FastGelu", "QuickGelu")},
}
"""The lemmas of these ops, by domain and op."""
