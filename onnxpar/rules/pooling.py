"""Rules of pools over windows in space, and of global pools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.graph.tensors import Size, dtype_of, is_float, numel, tensor_shape
from onnxpar.rules.notation import dims_text
from onnxpar.rules.reductions import finish_share, weighted_mean
from onnxpar.rules.rule import FIRST, Local, Lowering, Rule, einsum, names, rule
from onnxpar.rules.windows import Windows, lower_windows, windows


@rule("MaxPool AveragePool LpPool")
def pool(node: gs.Node) -> Rule:
    """Sharding rule of MaxPool, AveragePool, LpPool: `n c h w -> n c y x`: h is split over the same
    axes as y, the windows along h, and w as x. A dimension that a single window covers is reduced:
    `n c h w -> n c 1 1`. The indices of maxima are positions in the global tensor."""
    space = windows(node, node.attrs["kernel_shape"])
    if len(node.outputs) > 1 and node.outputs[1].name:
        return _pool_with_indices(node, space)
    before, after = (dims_text(["n", "c", *dims]) for dims in (space.before, space.after))
    floating = is_float(node.outputs[0])
    shape = tensor_shape(node.inputs[0]) or ()
    covered = {f"h{i}": shape[2 + i] for i in space.covered}
    fields = space.fields()
    if node.op == "AveragePool":
        fields["lowered"] |= covered.keys()
    kernel = partial(space.kernel, list(node.attrs["kernel_shape"]))
    return einsum(
        node,
        f"{before} -> {after}",
        reduce=dict.fromkeys(covered, "max" if node.op == "MaxPool" else "sum"),
        whole=space.whole,
        linear=(FIRST,) if node.op == "AveragePool" and floating else (),
        local={"kernel_shape": kernel} if space.covered else {},
        lower=_lower(space, covered, _blank(node)),
        **fields,
    )


def _lower(space: Windows, covered: Mapping[str, Size], blank: Any) -> Callable[[Lowering], None]:
    """Returns a lowering to the same pool of the elements that the rank's windows read.

    covered  factors (with global sizes) that a single window covers; if they are split, a mean
             becomes the rank's share of it, which ranks add
    blank    a result of `_blank`
    """

    def lower(builder: Lowering) -> None:
        node = builder.local.node
        if node.op != "AveragePool" or not covered:
            lower_windows(space, blank=blank)(builder)
            return
        x, padded = space.read(builder, builder.input(0), blank)
        part = builder.add(node.op, [x], **space.attributes(node, padded))
        finish_share(builder, part, covered)

    return lower


def _pool_with_indices(node: gs.Node, space: Windows) -> Rule:
    """Returns the rule of a MaxPool that also returns the indices of maxima. It is the rule of
    `pool`, but a rank turns the indices in its shard into indices in the global tensor."""
    space.keep_covered()
    before, after = (dims_text(["n", "c", *dims]) for dims in (space.before, space.after))
    fields = space.fields()
    passed = set(space.before) & set(space.after)
    fields["lowered"] |= {"n", "c", *passed}
    fields["contiguous"] |= passed
    lower = _lower_indices(space, node.attrs.get("storage_order", 0) == 1)
    return einsum(node, f"{before} -> {after}; {after}", whole=space.whole, lower=lower, **fields)


def _blank(node: gs.Node) -> Any:
    """Returns the value that changes no result if it stands in an image in place of padding: the
    least number for MaxPool, 0 for LpPool and for an AveragePool that counts padding; None if there
    is no such value."""
    dtype = dtype_of(node.inputs[0]) or np.dtype(np.float32)
    if node.op == "MaxPool":
        return np.array(-np.inf if dtype.kind == "f" else np.iinfo(dtype).min, dtype)
    counts = node.attrs.get("count_include_pad", 0) and not node.attrs.get("ceil_mode", 0)
    return np.zeros((), dtype) if node.op == "LpPool" or counts else None


def _lower_indices(space: Windows, is_column_major: bool) -> Callable[[Lowering], None]:
    """Returns a lowering of a MaxPool with indices: runs it on the elements that the rank reads,
    then turns each index into the index in the global tensor."""

    def lower(builder: Lowering) -> None:
        node = builder.local.node
        shape = [s or 0 for s in tensor_shape(node.inputs[0]) or ()]
        order = range(len(space.before))
        x = space.fetch(builder, builder.input(0))
        best, index = builder.add_each(node.op, [x], 2, **space.attributes(node))
        first = builder.per_rank(lambda local: _first_indices(space, local))
        rest = builder.add("Sub", [index, first])
        result = builder.per_rank(lambda local: _first_indices(space, local, shape))
        step = 1
        for i in order if is_column_major else order[::-1]:
            start, extent = (builder.per_rank(_span_of(space, i, size)) for size in (False, True))
            at = builder.add("Add", [builder.add("Mod", [rest, extent]), start])
            result = builder.add("Add", [result, builder.add("Mul", [at, np.array(step)])])
            rest = builder.add("Div", [rest, extent])
            step *= shape[2 + i]
        builder.finish("Identity", [best])
        builder.finish("Identity", [result], 1)

    return lower


def _first_indices(space: Windows, local: Local, shape: Sequence[int] | None = None) -> Array:
    """Returns the flat index of the first element of each of the rank's images (one for each sample
    and channel): in a global tensor of this shape; if `shape` is None, in the elements that the
    rank reads."""
    n, c = (local.positions(f) for f in "nc")
    if shape is None:
        spans = [_span(space, local, i) for i in range(len(space.before))]
        shape = [len(n), len(c), *(end - first for first, end in spans)]
        n, c = np.arange(len(n)), np.arange(len(c))
    first = np.asarray((n[:, None] * shape[1] + c) * numel(shape[2:]), np.int64)
    return first.reshape(*first.shape, *[1] * len(space.before))


def _span_of(space: Windows, i: int, size: bool) -> Callable[[Local], Array]:
    """Returns a function from a rank's view to the start of the range that the rank reads in
    spatial dimension `i`; with `size`, to the size of that range."""

    def value(local: Local) -> Array:
        first, end = _span(space, local, i)
        return np.array(end - first if size else first, np.int64)

    return value


def _span(space: Windows, local: Local, i: int) -> tuple[int, int]:
    """Returns the range (first, end) of global positions that the rank's windows read in spatial
    dimension `i`."""
    if i in space.tied and local.is_split(f"h{i}"):
        return space.tied[i].held(local.interval(f"y{i}"))
    return local.interval(space.before[i])


@rule("GlobalAveragePool GlobalMaxPool GlobalLpPool")
def global_pool(node: gs.Node) -> Rule:
    """Sharding rule of GlobalAveragePool, GlobalMaxPool, GlobalLpPool: `n c h w -> n c 1 1`. If h
    or w is split, a mean is the sum of the shards' means, weighted by size, and a norm is the norm
    of the shards' norms."""
    shape = tensor_shape(node.inputs[0]) or ()
    space = names("h", len(shape) - 2)
    text = f"{dims_text(['n', 'c', *space])} -> {dims_text(['n', 'c', *['1'] * len(space)])}"
    if node.op == "GlobalLpPool":
        power = node.attrs.get("p", 2)
        return einsum(
            node,
            text,
            communicating=frozenset(space),
            lowered=frozenset(space),
            lower=lambda builder: _lower_norm(builder, space, power),
        )
    if node.op == "GlobalMaxPool":
        return einsum(node, text, reduce=dict.fromkeys(space, "max"))
    return einsum(
        node,
        text,
        linear=(FIRST,),
        lowered=frozenset(space),
        lower=weighted_mean(dict(zip(space, shape[2:], strict=True))),
    )


def _lower_norm(builder: Lowering, space: Sequence[str], power: int) -> None:
    """Replaces a GlobalLpPool: computes the norm (with the exponent `power`) over the factors
    `space` from the norms of the ranks' shards."""
    node = builder.local.node
    dtype = dtype_of(node.outputs[0])
    image = builder.input(0)
    for axis, factor in enumerate(space, 2):
        image = builder.filled(image, factor, axis)
    part = builder.add(node.op, [image], p=power)
    total = builder.all_reduce(builder.add("Pow", [part, np.array(power, dtype)]), space)
    builder.finish("Pow", [total, np.array(1 / power, dtype)])
