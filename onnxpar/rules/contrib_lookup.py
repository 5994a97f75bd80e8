"""onnxruntime's GatherBlockQuantized: a lookup in a table that is quantized by blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import Size, dtype_of, given, tensor_shape
from onnxpar.rules.indexing import finish_held, local_rows
from onnxpar.rules.notation import dims_text
from onnxpar.rules.rule import Lowering, Rule, einsum, names, rule

_PACKED = "its elements are packed in blocks"


@rule("GatherBlockQuantized", domain="com.microsoft")
def gather_blocks(node: gs.Node) -> Rule:
    """Sharding rule of GatherBlockQuantized: `v (k z w), i, v (k z), v k -> i (k z e)`: table,
    indices, scales, zero points. A block of the table has e elements in w bytes, and z blocks share
    a byte of zero points. If the rows v are split, each rank looks up the rows in its shard, with
    zeros for all other rows: a partial sum."""
    shape, index = (tensor_shape(t) or () for t in node.inputs[:2])
    rank = len(shape)
    axis, along = (
        node.attrs.get(k, d) % rank for k, d in (("gather_axis", 0), ("quantize_axis", 1))
    )
    data, at = names("d", rank), names("i", len(index))
    blocks = _blocks(node, shape, along)
    if axis == along or blocks is None:
        return _by_index(node, data, at, axis)
    sizes, fields = blocks
    specs = [list(data) for _ in range(5)]
    for spec, columns in zip(specs, ("(k z w)", "_", "(k z)", "k", "(k z e)"), strict=True):
        spec[along] = columns
    for spec in specs:
        spec[axis] = "v"
    table, _, scales, points, result = specs
    out = [*result[:axis], *at, *result[axis + 1 :]]
    operands = list(map(dims_text, (table, at, scales, points)))[: len(node.inputs)]
    return einsum(
        node,
        f"{', '.join(operands)} -> {dims_text(out)}",
        sizes=sizes,
        lowered=frozenset({"v"}),
        lower=_lower(shape[axis], axis, rank - axis - 1),
        reduce={"v": "sum"},
        **fields,
    )


def _blocks(
    node: gs.Node, shape: tuple[Size, ...], along: int
) -> tuple[dict[str, Size], dict[str, Any]] | None:
    """Returns (sizes of the factors of the quantized dimension, fields of the rule that keep some
    of them whole); None if blocks do not fill the dimension, or if the shape of the table is
    unknown.

    shape  the shape of the table
    along  the quantized dimension
    """
    block, bits = node.attrs.get("block_size", 128), node.attrs.get("bits", 4)
    is_bytes = str(dtype_of(node.inputs[0])) == "uint8"
    packed = 8 // bits if is_bytes else 1
    shared = packed if given(node, 3) is not None else 1
    width = shape[along]
    if None in shape or width is None or width * packed % (block * shared):
        return None
    if packed > 1 and along != len(shape) - 1:
        return None
    sizes: dict[str, Size] = {"k": width * packed // (block * shared), "z": shared}
    sizes |= {"w": block // packed, "e": block}
    one = "a block has a single scale"
    return sizes, {"whole": {"w": _PACKED, "e": one, "z": "several zero points share a byte"}}


def _by_index(node: gs.Node, data: list[str], at: list[str], axis: int) -> Rule:
    """Returns the rule for a table that stays whole: only the dimensions of the indices may be
    split.

    data  the factors of the table
    at    the factors of the indices
    axis  the dimension of the table's rows
    """
    out = names("o", len(data))
    result = [*out[:axis], *at, *out[axis + 1 :]]
    text = f"{dims_text(data)}, {dims_text(at)}" + ", _" * (len(node.inputs) - 2)
    whole = sorted({*data, *(d for d in result if d in out)})
    why = "it is looked up by index, or packed in blocks"
    return einsum(node, f"{text} -> {dims_text(result)}", whole=dict.fromkeys(whole, why))


def _lower(rows: Size, axis: int, trailing: int) -> Callable[[Lowering], None]:
    """Returns a lowering that looks up the rows in the rank's shard of the table, with zeros for
    other rows.

    rows      the global number of rows
    axis      the dimension of the rows in the table
    trailing  the number of dimensions of the result behind the dimensions of the indices
    """

    def lower(build: Lowering) -> None:
        node = build.local.node
        assert rows is not None
        local_index, held = local_rows(build, rows)
        if trailing:
            held = build.add("Unsqueeze", [held], axes=[-1 - i for i in range(trailing)])
        others = range(2, len(node.inputs))
        table, *more = (build.filled(build.input(i), "v", axis) for i in (0, *others))
        dtype = dtype_of(node.outputs[0])
        operands = [table, local_index, *more]
        shape = build.local.output_shape(0)
        looked_up = build.make(node.op, operands, (dtype, shape), domain=node.domain, **node.attrs)
        finish_held(build, held, looked_up)

    return lower
