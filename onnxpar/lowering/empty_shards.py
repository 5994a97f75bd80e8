"""Puts an element, a stand-in, into empty shards before ops whose onnxruntime kernels do not accept
empty tensors, and drops the results of stand-ins after the op.

Any shard may be empty: most kernels then compute nothing, and a sum over nothing is zero. If the
rule of an op names a factor (an index variable of the op) in `nonempty`, the op gets one element of
zeros in place of an empty shard. A Slice removes the stand-in from a dimension of the result; where
the op reduces over the factor, the result becomes the neutral element of the reduction (unless the
op has a bias: zeros then give the bias, and this rank may be the one that adds it). Nodes are added
only where a shard may be empty.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.graph.tensors import dtype_of
from onnxpar.layout.layout import Concat, Dim, Factor, Layout, indices, neutral
from onnxpar.lowering.rank_view import NodeView
from onnxpar.rules.indexing import SELECTED, wide_type
from onnxpar.rules.notation import expr_vars
from onnxpar.rules.rule import Local, Rule
from onnxpar.sharding.factors import OpFactors

if TYPE_CHECKING:
    from onnxpar.lowering.lowering_builder import LoweringBuilder

Step = Callable[[gs.Tensor], tuple[str, list[Any], dict[str, Any]]]
"""Returns the op, operands and attributes of the next node of a chain."""


def factors_to_fill(rule: Rule, view: NodeView) -> frozenset[str]:
    """Returns the factors (index variables of the node's rule) whose shards may be empty although
    the node's kernel rejects empty tensors. Their empty shards get an element, a stand-in.

    They include the dimensions of a window op's result: each rank computes at least one element of
    the result, and fetches the operands for that element.
    """
    results = {f for spec in rule.outputs for expr in spec or () for f in expr_vars(expr)}
    windows = {f for group in rule.co_sharded for f in group if f in results}
    return frozenset(f for f in rule.ranks.nonempty | windows if view.may_be_empty(f))


class StandIns:
    """Adds nodes before a node that put an element of zeros, a stand-in, into empty shards of its
    operands, and nodes after it that drop the results of stand-ins.

    op       the node
    names    the factors whose empty shards get stand-ins
    filled   builds nodes before the node; its view counts a stand-in as an element
    true     builds nodes after the node; its view counts true elements
    layouts  layouts of stored tensors, by name
    """

    def __init__(
        self,
        op: OpFactors,
        names: Collection[str],
        filled: LoweringBuilder,
        true: LoweringBuilder,
        layouts: Mapping[str, Layout],
    ) -> None:
        self._op, self._names = op, names
        self._filled, self._true, self._layouts = filled, true, layouts

    def surround(self) -> None:
        """Adds the nodes before and after the node. Call it before the node is lowered."""
        for i, tensor in enumerate(self._op.node.inputs):
            for axis in self._changed(tensor, self._true.view.inputs, self._filled.view.inputs, i):
                self._fill(i, axis)
        for i, tensor in enumerate(list(self._op.node.outputs)):
            axes = self._changed(tensor, self._true.view.outputs, self._filled.view.outputs, i)
            reductions = {self._op.rule.reduce.get(f) for f in self._names} - {None}
            if self._op.rule.additive:
                reductions = set()
            if tensor.name and (axes or reductions):
                self._drop(i, axes, reductions)

    def _changed(
        self, tensor: gs.Tensor, true: Sequence[Any], filled: Sequence[Any], i: int
    ) -> list[int]:
        """Returns the dimensions of operand or result i in which an empty shard gets an element, a
        stand-in. `true` and `filled` are the layouts of all operands or results, without and with
        stand-ins."""
        if not tensor.name or i >= len(true):
            return []
        pairs = zip(true[i].dims, filled[i].dims, strict=True)
        return [axis for axis, (a, b) in enumerate(pairs) if a != b]

    def _fill(self, i: int, axis: int) -> None:
        """Adds nodes that put an element of zeros, a stand-in, into operand i if its dimension
        `axis` is empty."""
        x = self._op.node.inputs[i]
        if _has_segments(self._filled.view.inputs[i].dims[axis]):
            self._fill_segments(i, axis)
            return
        if self._fill_stored(i):
            return
        size = self._filled.per_rank(lambda local: np.array([local.input_shape(i)[axis]], np.int64))
        self._op.node.inputs[i] = self._sized(i, axis, fill(self._filled, x, axis, size))

    def _sized(self, i: int, axis: int, y: gs.Tensor) -> gs.Tensor:
        """Returns `y`, the new operand i. For an Attention, gives its dimension `axis` a constant
        size, by a Reshape, if the size is equal in all runs: from an unknown width, ONNX's shape
        inference would infer 0."""
        build, spec = self._filled, self._op.rule.inputs[i]
        if self._op.node.op != "Attention" or spec is None:
            return y
        if set(expr_vars(spec[axis])) & build.view.open:
            return y

        def shape(local: Local) -> Any:
            return np.array([local.input_shape(i)[axis] if a == axis else 0 for a in at], np.int64)

        at = range(len(y.shape))
        return build.make("Reshape", [y, build.per_rank(shape)], (y.dtype, list(y.shape)))

    def _fill_stored(self, i: int) -> bool:
        """If a DequantizeLinear of stored tensors makes operand i, puts stand-ins (elements in
        empty shards) into these tensors, so that onnxruntime still fuses it with this node; returns
        False, and does nothing, for any other operand."""
        x = self._op.node.inputs[i]
        source = x.inputs[0] if x.inputs else None
        if source is None or source.op != "DequantizeLinear":
            return False
        if not all(isinstance(t, gs.Constant) for t in source.inputs if t.name):
            return False
        rank = len(x.shape)
        along, block = source.attrs.get("axis", 1) % rank, source.attrs.get("block_size", 0)
        for j, tensor in enumerate(source.inputs):
            layout = self._layouts.get(tensor.name)
            if layout is None:  # left out, or filled for another reader
                continue
            per = [block if block and j and a == along else 1 for a in range(rank)]
            of = list(enumerate(per)) if len(layout.dims) == rank else [(along, 1)]
            source.inputs[j] = self._filled.by_rank(
                partial(self._stored_part, i, tensor, layout, of)
            )
        return True

    def _stored_part(
        self, i: int, tensor: gs.Constant, layout: Layout, of: list[tuple[int, int]], rank: int
    ) -> Array:
        """Returns a rank's shard of the stored `tensor`, with an element of zeros if it is empty.

        of  for each dimension of the tensor, the dimension of operand i that it belongs to, and how
            many elements of the operand share one element of the tensor (a scale of a block, say)
        """
        view = self._filled.view
        part = layout.take(tensor.values, view.mesh, rank)
        operand = view.on(rank).input_shape(i)
        shape = [size or operand[a] // n for size, (a, n) in zip(part.shape, of, strict=False)]
        return part if part.size or not shape else np.zeros(shape, part.dtype)

    def _fill_segments(self, i: int, axis: int) -> None:
        """Adds nodes that put an element of zeros, a stand-in, into each empty segment of dimension
        `axis` of operand i. The dimension is
        a concatenation of segments that are split separately, so others may have elements."""
        build, x = self._filled, self._op.node.inputs[i]

        def places(rank: int) -> Any:
            """Returns, for each element with stand-ins, its index in the rank's shard; for a
            stand-in, the index of the zero that is appended to the shard."""
            true, filled = self._positions("inputs", i, axis, rank)
            place = {p: k for k, p in enumerate(true)}
            return np.array([place.get(p, len(true)) for p in filled], np.int64)

        shape = [1 if a == axis else s for a, s in enumerate(x.shape)]
        sizes = build.add("Shape", [x])
        one = (np.arange(len(shape)) == axis).astype(np.int64)
        others = build.add("Where", [one.astype(bool), one, sizes])
        zero = zeros(build, x, others, shape)
        joined = build.make("Concat", [x, zero], (x.dtype, list(x.shape)), axis=axis)
        self._op.node.inputs[i] = build.make(
            "Gather", [joined, build.by_rank(places)], (x.dtype, list(x.shape)), axis=axis
        )

    def _drop(self, i: int, axes: Sequence[int], reductions: Collection[str | None]) -> None:
        """Adds the nodes that drop the results of stand-ins from result i.

        axes        the dimensions of the result that have them, which are cut
        reductions  the reduction of the op, if it has one: its neutral element replaces a result of
                    stand-ins alone
        """
        result, build = self._op.node.outputs[i], self._true
        full = gs.Variable(f"{result.name}::filled", result.dtype, result.shape)
        self._op.node.outputs[i] = full
        steps: list[Step] = []
        if reductions:
            (reduction,) = reductions
            reduced = [f for f in sorted(self._names) if f in self._op.rule.reduce]

            def size(local: Local) -> Any:
                return np.array(np.prod([local.size(f) for f in reduced]), np.int64)

            is_empty = build.add("Equal", [build.per_rank(size), np.array(0, np.int64)])
            none: Any = neutral(reduction, dtype_of(result))  # type: ignore[arg-type]
            steps += self._emptied(is_empty, np.asarray(none))
        steps += [partial(self._cut, i, axis) for axis in axes]
        x: gs.Tensor = full
        for step in steps[:-1]:
            op, operands, attrs = step(x)
            x = build.add(op, operands, **attrs)
        op, operands, attrs = steps[-1](x)
        build.finish(op, operands, i, **attrs)

    def _emptied(self, is_empty: gs.Tensor, none: Array) -> Iterator[Step]:
        """Yields steps that replace a partial result by `none`, where `is_empty` is true at run
        time."""
        if str(none.dtype) in SELECTED:
            yield lambda x: ("Where", [is_empty, none, x], {})
            return
        wide = wide_type(none.dtype)
        other = none.astype(onnx.helper.tensor_dtype_to_np_dtype(wide))
        yield lambda x: ("Cast", [x], {"to": wide})
        yield lambda x: ("Where", [is_empty, other, x], {})
        yield lambda x: ("Cast", [x], {"to": onnx.helper.np_dtype_to_tensor_dtype(none.dtype)})

    def _cut(self, i: int, axis: int, x: gs.Tensor) -> tuple[str, list[Any], dict[str, Any]]:
        """Returns the op, operands and attributes of the node that removes stand-ins from `x` along
        dimension `axis` of result i: a Slice, or a Gather in a dimension of several segments."""
        build = self._true
        if _has_segments(build.view.outputs[i].dims[axis]):

            def kept(rank: int) -> Any:
                true, filled = self._positions("outputs", i, axis, rank)
                return np.flatnonzero(np.isin(filled, true))

            return "Gather", [x, build.by_rank(kept)], {"axis": axis}
        end = build.per_rank(lambda local: np.array([local.output_shape(i)[axis]], np.int64))
        return "Slice", [x, np.zeros(1, np.int64), end, np.array([axis], np.int64)], {}

    def _positions(self, side: str, i: int, axis: int, rank: int) -> tuple[list[int], list[int]]:
        """Returns the global positions that a rank holds along dimension `axis` of operand or
        result i: without and with the element that an empty shard gets. `side` is "inputs" or
        "outputs"."""
        views = (self._true.view, self._filled.view)
        dims = [getattr(view, side)[i].dims[axis] for view in views]
        true, filled = (indices(dim, views[0].mesh, rank).tolist() for dim in dims)
        return true, filled


def _has_segments(dim: Dim) -> bool:
    """True for a dimension that is a concatenation of segments, which are split separately."""
    return not isinstance(dim, Factor) and (
        isinstance(dim, Concat) or any(map(_has_segments, dim.children))
    )


def fill(build: LoweringBuilder, x: gs.Tensor, axis: int, size: Any, value: Any = 0) -> gs.Variable:
    """Returns `x`, or, if `x` has no elements along `axis` at run time, `size` elements of `value`
    there."""
    rank = len(x.shape)
    here = np.arange(rank) == axis
    shape = build.add("Shape", [x])
    is_empty = build.add("Equal", [shape, np.where(here, 0, -1).astype(np.int64)])
    others = build.add("Mul", [shape, (~here).astype(np.int64)])
    missing = build.add("Where", [is_empty, size, others])
    row = zeros(build, x, missing, x.shape, value)
    return build.make("Concat", [x, row], (x.dtype, list(x.shape)), axis=axis)


def zeros(
    build: LoweringBuilder, x: gs.Tensor, sizes: gs.Tensor, shape: Sequence[int], value: Any = 0
) -> gs.Variable:
    """Returns a new tensor full of `value`, in the dtype of `x`. `sizes` is its shape, as a tensor;
    `shape` is its shape on rank 0."""
    dtype = dtype_of(x)
    stored = np.dtype(np.float32) if str(dtype) == "bfloat16" else np.dtype(dtype)
    constant = gs.Constant("value", np.array([value], stored))
    filled = build.make("ConstantOfShape", [sizes], (stored, list(shape)), value=constant)
    if stored == dtype:
        return filled
    to = onnx.helper.np_dtype_to_tensor_dtype(dtype)
    return build.make("Cast", [filled], (dtype, list(shape)), to=to)
