"""onnxruntime's EmbedLayerNormalization, also quantized: adds the embeddings of words, positions
and segments, and normalizes the sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto

from onnxpar.graph.tensors import dtype_of, given, tensor_shape
from onnxpar.rules.communicate import (
    communicating,
    finish,
    finish_chain,
    has_output,
    held_positions,
    inverse_root,
    like,
    moments,
    widen,
)
from onnxpar.rules.rule import Lowering, Rule, einsum, given_specs, rule

DOMAIN = "com.microsoft"
_LEAST_EPSILON = 1e-12


@dataclass(frozen=True)
class _Operands:
    """The indices of operands that differ between the float op and the quantized op.

    places  the position ids; 0: the op has no such operand
    scales  the scales of the tables of words, positions and segments, of gamma and of beta; empty
            for the float op
    points  the zero points, in the same order
    """

    places: int = 0
    scales: tuple[int, ...] = ()
    points: tuple[int, ...] = ()


_FORMS = {
    "EmbedLayerNormalization": _Operands(places=8),
    "QEmbedLayerNormalization": _Operands(scales=(8, 9, 10, 11, 12), points=(13, 14, 15, 16, 17)),
}
_MASK = 7
_TABLES = {"v": 2, "p": 3, "t": 4}


@rule("EmbedLayerNormalization QEmbedLayerNormalization", domain=DOMAIN)
def embedding(node: gs.Node) -> Rule:
    """Sharding rule of EmbedLayerNormalization:
    `b s, b s, v h, p h, t h, h, h, b s, b s -> b s h ; b ; b s h`: ids of words and of segments,
    tables of v words, p positions and t segments, gamma, beta, mask, positions. If rows of a table
    are split, each rank looks up its rows, and an all-reduce adds the results; if h is split, ranks
    add the sums of the normalization."""
    form = _FORMS[node.op]
    specs = ["b s", "b s", "v h", "p h", "t h", "h", "h", "b s"]
    if form.places:
        places = given(node, form.places)
        rows = (tensor_shape(places) or ())[:1] if places is not None else ()
        specs.append("1 s" if rows == (1,) else "b s")
    specs += ["_"] * (len(node.inputs) - len(specs))
    used = given_specs(specs, node.inputs)
    results = given_specs(["b s h", "b", "b s h"], node.outputs)
    factors = {c for text in used for c in text}
    over = [f for f in "svpth" if f in factors]
    sizes = [(tensor_shape(node.inputs[0]) or ())[1]]
    sizes += [size for at in _TABLES.values() for size in _shape(node, at)]

    def lower(build: Lowering) -> None:
        _Embedding(build, form).lower()

    fields = communicating(node, over, sizes, lower)
    fields["contiguous"] = frozenset(_TABLES) & factors
    return einsum(node, f"{', '.join(used)} -> {'; '.join(results)}", reduce={}, **fields)


def _shape(node: gs.Node, index: int) -> tuple[Any, ...]:
    """The shape of an operand; () without that operand."""
    tensor = given(node, index)
    return () if tensor is None else tensor_shape(tensor) or ()


class _Embedding:
    """Builds the nodes that a rank runs in place of one embedding node."""

    def __init__(self, build: Lowering, form: _Operands) -> None:
        self.build, self.form, self.node = build, form, build.local.node

    def lower(self) -> None:
        """Adds the three lookups (words, segments, positions), normalizes their sum, and counts the
        words of each row."""
        build, node = self.build, self.node
        x = self._rows("v", build.input(0))
        if given(node, 1) is not None:
            x = build.add("Add", [x, self._rows("t", build.input(1))])
        given_places = self.form.places and given(node, self.form.places) is not None
        places = build.input(self.form.places) if given_places else held_positions(build, "s")
        x = build.add("Add", [x, self._rows("p", places)])
        if has_output(build, 2):
            finish(build, "Identity", [x], 2)
        width = _shape(node, 2)[1:]
        _, centred, variance = moments(build, x, [2], ["h"], width)
        scale = inverse_root(build, variance, node.attrs.get("epsilon", _LEAST_EPSILON))
        steps = [("Mul", scale), ("Mul", self._number(5, 3)), ("Add", self._number(6, 4))]
        finish_chain(build, centred, steps)
        if has_output(build, 1):
            self._count_words()

    def _number(self, index: int, at: int, x: gs.Tensor | None = None) -> gs.Tensor:
        """Returns operand `index` dequantized to float32; if `x` is not None, `x`, which has that
        operand's scale. `at` is the index of its scale in `_Operands.scales`."""
        build, form = self.build, self.form
        x = build.input(index) if x is None else x
        if not form.scales:
            return widen(build, x)
        x, point = (
            build.add("Cast", [integers], to=TensorProto.FLOAT)
            for integers in (x, build.input(form.points[at]))
        )
        return build.add("Mul", [build.add("Sub", [x, point]), build.input(form.scales[at])])

    def _rows(self, factor: str, ids: gs.Tensor) -> gs.Tensor:
        """Looks up `ids` in the table whose rows are `factor` ("v", "p" or "t"). If the rows are
        split, each rank looks up the ids in its shard, and an all-reduce adds the results. An id
        outside the whole table stays out of range, so that the kernel refuses it as before."""
        build, index = self.build, _TABLES[factor]
        at = list(_TABLES).index(factor)
        if not build.local.is_split(factor):
            rows_found = build.add("Gather", [build.input(index), ids], axis=0)
            return self._number(index, at, rows_found)
        dtype = dtype_of(ids)
        start, count = (
            build.per_rank(lambda local: np.array(local.interval(factor)[0], dtype)),
            build.per_rank(lambda local: np.array(local.size(factor), dtype)),
        )
        size = _shape(self.node, index)[0]
        rows = build.per_rank(lambda _: np.array(size, dtype))
        local_ids = build.add("Sub", [ids, start])
        held = self._between(local_ids, count)
        other = build.add("Where", [self._between(ids, rows), like(ids, 0), rows])
        local_ids = build.add("Where", [held, local_ids, other])
        table = build.filled(build.input(index), factor, 0)
        rows_found = self._number(index, at, build.add("Gather", [table, local_ids], axis=0))
        held = build.add("Unsqueeze", [held], axes=[-1])
        return build.all_reduce(
            build.add("Where", [held, rows_found, like(rows_found, 0)]), [factor]
        )

    def _between(self, ids: gs.Tensor, end: gs.Tensor) -> gs.Tensor:
        """Returns a boolean mask: True for ids in [0, end)."""
        build = self.build
        above = build.add("Not", [build.add("Less", [ids, like(ids, 0)])])
        return build.add("And", [above, build.add("Less", [ids, end])])

    def _count_words(self) -> None:
        """Makes result 1 of the node: the number of ones in each row of the mask; zeros without a
        mask."""
        build = self.build
        mask = given(self.node, _MASK)
        ids = build.input(_MASK if mask is not None else 0)
        one = like(ids, 1)
        seen = build.add("Equal", [ids, one]) if mask is not None else build.add("Less", [ids, ids])
        counted = build.add("Cast", [seen], to=TensorProto.INT64)
        total = build.all_reduce(build.add("ReduceSum", [counted], axes=[1], keepdims=0), ["s"])
        finish(build, "Identity", [total], 1)
