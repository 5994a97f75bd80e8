"""Rules of Pad and CenterCropPad: ranks add the padding at the ends of the global dimension, not at
the ends of their shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.graph.tensors import constant, given, tensor_shape
from onnxpar.rules.index_maps import IndexMap, tied_fields
from onnxpar.rules.movement import int64
from onnxpar.rules.notation import dims_text
from onnxpar.rules.rule import FIRST, Local, Lowering, Rule, einsum, names, rule, whole_rule

Pads = tuple[int, int]
"""(at the start, at the end): numbers of elements; negative ones crop."""
_MODES = {"edge": "edge", "reflect": "reflect", "wrap": "wrap"}


@dataclass(frozen=True)
class _Constant:
    """A dimension padded with a constant. If 6 elements with pads (1, 1) are split over two ranks,
    rank 0 has the padding and 3 elements, rank 1 has 3 elements and the padding.

    before  the factor of the dimension
    after   the factor of the padded dimension
    size    the global number of elements before
    pads    the numbers of elements added at the start and at the end
    """

    before: str
    after: str
    size: int
    pads: Pads

    def held(self, local: Local) -> Pads:
        """Returns the range (start, end) of operand elements that the rank's shard of the result
        contains. If it contains none, the range has one element, which `padding` drops."""
        start, end = self._wanted(local)
        first = min(max(start, 0), self.size - 1)
        return first, min(max(end, first + 1), self.size)

    def padding(self, local: Local) -> Pads:
        """Returns the padding before and after the range of elements that the method `held` returns
        for a rank; -1 drops the element that replaces an empty range."""
        start, end = self._wanted(local)
        if end <= 0:
            return end - start, -1
        if start >= self.size:
            return -1, end - start
        return max(-start, 0), max(end - self.size, 0)

    def _wanted(self, local: Local) -> Pads:
        """Returns the rank's shard of the result as a range (start, end) of positions in the
        operand; positions of padding are below 0, or beyond the operand's end."""
        start, end = local.interval(self.after)
        return start - self.pads[0], end - self.pads[0]


@rule("Pad")
def pad(node: gs.Node) -> Rule:
    """Sharding rule of Pad: `a h -> a y`: a padded dimension h is split over the same axes as y,
    the dimension after padding. The op is linear if the padding is zeros or copies."""
    padding = _padding(node)
    if padding is None:
        return whole_rule(node, "data-dependent padding")
    pads, is_zero = padding
    mode = node.attrs.get("mode", "constant")
    shape = tensor_shape(node.inputs[0]) or ()
    before, after = names("d", len(shape)), names("d", len(shape))
    constants: dict[int, _Constant] = {}
    copies: dict[int, IndexMap] = {}
    for i, (size, amounts) in enumerate(zip(shape, pads, strict=True)):
        if amounts != (0, 0):
            after[i] = f"y{i}"
            if not size or size + min(amounts[0], 0) + min(amounts[1], 0) < 1:
                continue
            if mode == "constant":
                constants[i] = _Constant(before[i], after[i], size, amounts)
            else:
                copies[i] = IndexMap(before[i], after[i], _copied(size, amounts, mode))
    maps: Any = {**constants, **copies}
    whole = [
        d for i, amounts in enumerate(pads) if any(amounts) and i not in maps for d in _pair(i)
    ]
    return einsum(
        node,
        f"{dims_text(before)}{', _' * (len(node.inputs) - 1)} -> {dims_text(after)}",
        whole=dict.fromkeys(whole, "it is padded"),
        linear=(FIRST,) if mode != "constant" or is_zero else (),
        lower=lambda builder: _lower(builder, pads, constants, copies),
        nonempty=frozenset(before) & set(after) if mode == "wrap" else frozenset(),
        **tied_fields(maps),
    )


@rule("CenterCropPad")
def center_crop_pad(node: gs.Node) -> Rule:
    """Sharding rule of CenterCropPad: `a h, _ -> a y`: a cropped or padded dimension h is split
    over the same axes as y, the dimension of the result."""
    shape, out = (tensor_shape(t) or () for t in (node.inputs[0], node.outputs[0]))
    axes = [a % len(shape) for a in node.attrs.get("axes", range(len(shape)))]
    is_known = constant(node.inputs[1]) is not None
    before, after = names("d", len(shape)), names("d", len(shape))
    pads: list[Pads] = [(0, 0)] * len(shape)
    constants: Any = {}
    whole: list[str] = []
    for i in axes:
        size, wanted = shape[i], out[i]
        if is_known and size == wanted:
            continue
        after[i] = f"y{i}"
        if not is_known or not size or not wanted:
            whole += _pair(i)
            continue
        pads[i] = _around(wanted - size)
        constants[i] = _Constant(before[i], after[i], size, pads[i])
    return einsum(
        node,
        f"{dims_text(before)}, _ -> {dims_text(after)}",
        whole=dict.fromkeys(whole, "a data-dependent size"),
        linear=(FIRST,),
        local={1: lambda local: int64([local.output_shape(0)[a] for a in axes])}
        if is_known
        else {},
        lower=lambda builder: _lower(builder, pads, constants, {}),
        **tied_fields(constants),
    )


def _around(more: int) -> Pads:
    """Returns the numbers of elements to add at the start and at the end, `more` together: 5
    becomes (2, 3), -5 (a crop) becomes (-2, -3)."""
    start = abs(more) // 2
    return (start, more - start) if more > 0 else (-start, more + start)


def _pair(i: int) -> tuple[str, str]:
    """The factors of a dimension before and after padding."""
    return f"d{i}", f"y{i}"


def _padding(node: gs.Node) -> tuple[list[Pads], bool] | None:
    """Returns (the pads of every dimension, True if the padding value is zero); None if the amounts
    are data-dependent."""
    rank = len(tensor_shape(node.inputs[0]) or ())
    amounts, axes = given(node, 1), given(node, 3)
    values = None if amounts is None else constant(amounts)
    over = np.arange(rank) if axes is None else constant(axes)
    if values is None or over is None:
        return None
    pads = [(0, 0)] * rank
    for i, axis in enumerate(over.tolist()):
        pads[axis % rank] = (int(values[i]), int(values[len(over) + i]))
    fill = given(node, 2)
    value = np.zeros(()) if fill is None else constant(fill)
    return pads, value is not None and not np.any(value)


def _copied(size: int, pads: Pads, mode: str) -> Array:
    """Returns, for each position of the padded dimension, the index of the element that it copies:
    [1, 0, 1, 2] for 3 elements with pads (1, 0) and the mode "reflect"."""
    begin, end = pads
    kept = np.arange(size)[max(-begin, 0) : size - max(-end, 0)]
    how: Any = _MODES[mode]
    return np.asarray(np.pad(kept, (max(begin, 0), max(end, 0)), how))


def _lower(
    builder: Lowering,
    pads: Sequence[Pads],
    constants: dict[int, _Constant],
    copies: dict[int, IndexMap],
) -> None:
    """Replaces a Pad or CenterCropPad on a rank that holds a shard of a padded dimension.

    pads       the pads of every dimension
    constants  the dimensions padded with a constant
    copies     the dimensions padded with copies of elements
    """
    node, x = builder.local.node, builder.input(0)
    done = {i for i, m in copies.items() if m.is_split(builder.local)}
    cut = {i: c for i, c in constants.items() if builder.local.is_split(c.before)}
    for i in done:
        x = copies[i].take(builder, x, i)
    for i, dim in cut.items():
        x = builder.fetch(x, dim.before, i, dim.held)

    def local_pads(local: Local) -> list[int]:
        mine = [(0, 0) if i in done else p for i, p in enumerate(pads)]
        for i, dim in cut.items():
            mine[i] = dim.padding(local)
        return [p[0] for p in mine] + [p[1] for p in mine]

    attrs = {key: node.attrs[key] for key in ("mode", "value") if key in node.attrs}
    if not any(any(p) for i, p in enumerate(pads) if i not in done):
        builder.finish("Identity", [x])
    elif "pads" in node.attrs:
        builder.finish("Pad", [x], pads=local_pads, domain=node.domain, **attrs)
    else:
        amounts = builder.per_rank(lambda local: np.array(local_pads(local), np.int64))
        fill = [node.inputs[2]] if given(node, 2) is not None else []
        builder.finish("Pad", [x, amounts, *fill], domain=node.domain, **attrs)


rule("Pad", domain="com.microsoft")(pad)
