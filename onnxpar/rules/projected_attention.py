"""Replaces onnxruntime's Attention and QAttention, which project their input, by a product and a
MultiHeadAttention, where the input's width or sequence is split.

If the width is split, ranks add their products. If the sequence is split, ranks gather keys and
values, and each rank attends with its own queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import given, tensor_shape
from onnxpar.rules.attention_lowering import least_of
from onnxpar.rules.communicate import FLOAT, has_output, held_positions, like, where_held
from onnxpar.rules.movement import int64
from onnxpar.rules.rule import Local, Lowering

_KEPT = ("mask_filter_value", "scale")
"""Attributes that both ops have."""


@dataclass(frozen=True)
class AttentionOperands:
    """The indices of an op's operands, besides input, weight and bias; None: the op has none.

    mask    the padding mask
    past    the cached keys and values
    added   the mask that is added to scores
    scales  the scales of a quantized input and weight
    zeros   their zero points
    """

    mask: int
    past: int
    added: int | None = None
    scales: tuple[int, int] | None = None
    zeros: tuple[int, int] | None = None


OPERANDS = {
    "Attention": AttentionOperands(mask=3, past=4, added=5),
    "QAttention": AttentionOperands(mask=5, past=8, scales=(3, 4), zeros=(6, 7)),
}
"""The operands by op."""


@dataclass(frozen=True)
class ProjectedAttention:
    """Replaces a node whose width h or sequence s is split. `at` has the indices of its
    operands."""

    at: AttentionOperands
    attrs: dict[str, Any]

    def lower(self, build: Lowering) -> None:
        """Adds the nodes that a rank runs in place of the node, if its width, its sequence or both
        are split."""
        is_split, node = build.local.is_split("s"), build.local.node
        query, both = build.add_each(
            "Split", [self._projected(build)], 2, axis=2, split=lambda at: [_keys(at), _rest(at)]
        )
        if is_split:
            both = build.all_gather(both, "s", 1, lambda local: local.size("s"))
        key, value = build.add_each(
            "Split", [both], 2, axis=2, split=lambda at: [_keys(at), _rest(at) - _keys(at)]
        )
        past = self._past(build)
        added = self._rows(build, self.at.added)
        if is_split and self.attrs.get("unidirectional"):
            earlier = self._earlier(build, key, past)
            added = earlier if added is None else build.add("Add", [added, earlier])
        bias = None if given(node, 2) is None else build.input(2)
        mask = self._rows(build, self.at.mask)
        operands = [build.filled(query, "s", 1), key, value, bias, mask, added, *past]
        present = [gs.Variable.empty() if x is None else x for x in operands]
        self._finish(build, present)

    def _projected(self, build: Lowering) -> gs.Tensor:
        """Returns the product of input and weight over the whole width, [batch, sequence, columns];
        ranks add their products."""
        x, weight = build.input(0), build.input(1)
        if self.at.scales is None or self.at.zeros is None:
            return build.all_reduce(build.add("MatMul", [x, weight]), ["h"])
        node = build.local.node
        zeros = [gs.Variable.empty() if given(node, i) is None else build.input(i)
                 for i in self.at.zeros]  # fmt: skip
        operands = [build.filled(x, "h", 2), build.filled(weight, "h", 0), *zeros]
        total = where_held(build, build.add("MatMulInteger", operands), "h")
        number = build.add("Cast", [build.all_reduce(total, ["h"])], to=FLOAT)
        scale = build.add("Mul", [build.input(i) for i in self.at.scales])
        return build.add("Mul", [number, scale])

    def _rows(self, build: Lowering, operand: int | None) -> gs.Tensor | None:
        """Returns an operand that may have a row for each query (dimension -2), with one stand-in
        row on ranks without queries; None if the node does not have the operand."""
        tensor = None if operand is None else given(build.local.node, operand)
        if tensor is None or operand is None:
            return None
        shape = tensor_shape(tensor) or ()
        x = build.input(operand)
        has_rows = len(shape) > 2 and shape[-2] != 1
        return build.filled(x, "s", len(shape) - 2) if has_rows else x

    def _past(self, build: Lowering) -> list[gs.Tensor | None]:
        """Returns [cached keys, cached values]; [None, None] without a cache."""
        if given(build.local.node, self.at.past) is None:
            return [None, None]
        both = build.input(self.at.past)
        return [build.add("Gather", [both, np.array(i, np.int64)], axis=0) for i in (0, 1)]

    def _earlier(self, build: Lowering, key: gs.Tensor, past: list[gs.Tensor | None]) -> gs.Tensor:
        """Returns the causal mask, which is added to scores: 0 where a query sees a key (its own
        position and earlier ones), elsewhere the least number."""
        rows, total = build.filled(held_positions(build, "s", 0, 2), "s", 0), _extent(build, key, 1)
        count = build.shape(key)[1]
        if past[0] is not None:
            before = _extent(build, past[0], 2)
            rows, total = build.add("Add", [rows, before]), build.add("Add", [total, before])
            count += build.shape(past[0])[2]
        bounds = [np.array(0, np.int64), total, np.array(1, np.int64)]
        columns = build.make("Range", bounds, (np.int64, [count]))
        sees = build.add("Not", [build.add("Less", [rows, columns])])
        hidden = build.add("Where", [sees, like(key, 0), like(key, least_of(key))])
        return build.add("Unsqueeze", [hidden], axes=[0, 1])

    def _finish(self, build: Lowering, operands: list[gs.Tensor]) -> None:
        """Adds the MultiHeadAttention on these operands, and nodes that turn its results into the
        op's results."""
        local, dtype = build.local, operands[0].dtype
        batch, rows = build.shape(operands[0])[:2]
        heads, width = local.size("n"), local.size("d")
        has_cache = has_output(build, 1)
        caches = []
        if has_cache:
            caches = [(dtype, [batch, heads, local.output_shape(1)[3], width])] * 2
        attrs = {name: self.attrs[name] for name in _KEPT if name in self.attrs}
        if self.attrs.get("unidirectional") and not local.is_split("s"):
            attrs["unidirectional"] = 1
        out, *cache = build.make_each(
            "MultiHeadAttention",
            operands,
            [(dtype, [batch, rows, heads * local.size("e")]), *caches],
            domain="com.microsoft",
            num_heads=lambda at: at.size("n"),
            **attrs,
        )
        if local.may_be_empty("s"):
            end = build.per_rank(lambda at: int64([at.size("s")]))
            out = build.add("Slice", [out, int64([0]), end, int64([1])])
        build.finish("Identity", [out])
        if has_cache:
            stacked = [build.add("Unsqueeze", [x], axes=[0]) for x in cache]
            build.finish("Concat", stacked, 1, axis=0)


def _keys(local: Local) -> int:
    """The number of columns of the keys; the queries have as many."""
    return local.size("n") * local.size("d")


def _rest(local: Local) -> int:
    """The number of columns of keys and values together."""
    return local.size("n") * (local.size("d") + local.size("e"))


def _extent(build: Lowering, x: gs.Tensor, axis: int) -> gs.Tensor:
    """Returns the size of dimension `axis` of `x` as a scalar tensor."""
    return build.add("Gather", [build.add("Shape", [x]), np.array(axis, np.int64)], axis=0)
