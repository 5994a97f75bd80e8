"""Normalizations of channels: over the batch, space, groups, or neighbouring channels."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import Size, float_attr, tensor_shape
from onnxpar.rules.communicate import (
    communicating,
    finish,
    finish_chain,
    has_output,
    inverse_root,
    like,
    moments,
    widen,
)
from onnxpar.rules.notation import dims_text
from onnxpar.rules.rule import Local, Lowering, Rule, einsum, names, rule, whole_rule


@rule("BatchNormalization")
def batch_normalization(node: gs.Node) -> Rule:
    """Sharding rule of BatchNormalization: `n c h w, c, c, c, c -> n c h w`; c are the channels. In
    training, the two new statistics are further results `c`, and ranks communicate if a factor
    other than c is split."""
    shape = tensor_shape(node.inputs[0]) or ()
    dims = names("d", len(shape))
    if node.attrs.get("spatial", 1) == 0 or len(dims) < 2:
        return whole_rule(node, "it has statistics per element")
    results = [dims_text(dims), *["d1" if t.name else "_" for t in node.outputs[1:]]]
    text = f"{dims_text(dims)}, d1, d1, d1, d1 -> {'; '.join(results)}"
    axes = [i for i in range(len(dims)) if i != 1]
    batch, sizes = [dims[i] for i in axes], [shape[i] for i in axes]
    if node.attrs.get("training_mode", 0) == 1:
        lower = _lower_training(node, axes, batch, sizes)
        fields = communicating(node, batch, sizes, lower)
        if "lowered" in fields:
            # onnxruntime's kernel writes new statistics over the old ones if no output has them
            fields["lowered"] = frozenset((*batch, dims[1]))
        return einsum(node, text, **fields)
    if len(results) > 1:
        return einsum(
            node, text, whole=dict.fromkeys(batch, "training is defined differently in this opset")
        )
    return einsum(node, text, linear=(frozenset({0, 2, 3}), frozenset({1, 2})))


def _lower_training(
    node: gs.Node, axes: list[int], factors: list[str], sizes: list[Size]
) -> Callable[[Lowering], None]:
    """Returns the lowering of a BatchNormalization in training whose batch or space is split: ranks
    normalise by the mean and variance over all shards, and update the running statistics.

    axes     the dimensions of operand 0 over which statistics are taken: all but the channels
    factors  the factors of those dimensions
    sizes    the global sizes of those dimensions
    """
    momentum = float_attr(node, "momentum", 0.9)
    epsilon = float_attr(node, "epsilon", 1e-5)

    def lower(build: Lowering) -> None:
        x = widen(build, build.input(0))
        middle, centred, variance = moments(build, x, axes, factors, sizes)
        scale, bias = (
            build.add("Unsqueeze", [widen(build, build.input(i))], axes=axes) for i in (1, 2)
        )
        inverse = inverse_root(build, variance, epsilon)
        finish_chain(build, centred, [("Mul", inverse), ("Mul", scale), ("Add", bias)])
        for i, statistic in ((1, middle), (2, variance)):
            if has_output(build, i):
                now = build.add("Squeeze", [statistic], axes=axes)
                new = build.add("Mul", [now, like(now, 1 - momentum)])
                before = widen(build, build.input(i + 2))
                old = build.add("Mul", [before, like(before, momentum)])
                finish(build, "Add", [old, new], i)

    return lower


@rule("InstanceNormalization")
def instance_normalization(node: gs.Node) -> Rule:
    """Sharding rule of InstanceNormalization: `n c h w, c, c -> n c h w`; if h or w is split, the
    ranks sum over all shards."""
    shape = tensor_shape(node.inputs[0]) or ()
    dims = names("d", len(shape))
    text = dims_text(dims)
    space, axes = dims[2:], list(range(2, len(dims)))
    epsilon = float_attr(node, "epsilon", 1e-5)

    def lower(build: Lowering) -> None:
        x = widen(build, build.input(0))
        _, centred, variance = moments(build, x, axes, space, shape[2:])
        scale, bias = (
            build.add("Unsqueeze", [widen(build, build.input(i))], axes=[a - 1 for a in axes])
            for i in (1, 2)
        )
        inverse = inverse_root(build, variance, epsilon)
        finish_chain(build, centred, [("Mul", inverse), ("Mul", scale), ("Add", bias)])

    fields = communicating(node, space, shape[2:], lower)
    return einsum(node, f"{text}, d1, d1 -> {text}", **fields)


@rule("GroupNormalization")
def group_normalization(node: gs.Node) -> Rule:
    """Sharding rule of GroupNormalization: `n (g c) h w, (g c), (g c) -> n (g c) h w` with g groups
    of c channels (before opset 21, `g` for scale and bias); if c, h or w is split, the ranks sum
    over all shards."""
    shape = tensor_shape(node.inputs[0]) or ()
    groups = node.attrs["num_groups"]
    if shape[1] is None:
        return whole_rule(node, "a data-dependent number of channels")
    space = names("h", len(shape) - 2)
    per_channel = tensor_shape(node.inputs[1]) == (shape[1],)
    scale = "(g c)" if per_channel else "g"
    text = dims_text(["n", "(g c)", *space])
    sizes: dict[str, Size] = {"g": groups, "c": shape[1] // groups}
    factors, counts = ["c", *space], [shape[1] // groups, *shape[2:]]
    epsilon = float_attr(node, "epsilon", 1e-5)

    def lower(build: Lowering) -> None:
        def grouped(local: Local) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
            extent = math.prod(map(local.size, space))
            return np.array([*map(local.size, "ngc"), extent], np.int64)

        def channels(local: Local) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
            return np.array([local.size("g"), local.size("c") if per_channel else 1, 1], np.int64)

        x = widen(build, build.input(0))
        cut = build.add("Reshape", [x, build.per_rank(grouped)], allowzero=1)
        _, centred, variance = moments(build, cut, [2, 3], factors, counts)
        weights = build.per_rank(channels)
        by, bias = (
            build.add("Reshape", [widen(build, build.input(i)), weights], allowzero=1)
            for i in (1, 2)
        )
        y = build.add("Mul", [centred, inverse_root(build, variance, epsilon)])
        y = build.add("Add", [build.add("Mul", [y, by]), bias])
        finish(build, "Reshape", [y, build.add("Shape", [x])], allowzero=1)

    return einsum(
        node,
        f"{text}, {scale}, {scale} -> {text}",
        sizes=sizes,
        local={"num_groups": lambda local: local.size("g")},
        **communicating(node, factors, counts, lower),
    )


@rule("LRN")
def local_response_normalization(node: gs.Node) -> Rule:
    """Sharding rule of LRN: `n c h w -> n c h w`; if the channels c are split, each rank fetches
    the neighbouring channels that its windows read."""
    shape = tensor_shape(node.inputs[0]) or ()
    dims = names("d", len(shape))
    text = dims_text(dims)
    size, attrs = node.attrs["size"], dict(node.attrs)
    before, after = (size - 1) // 2, size // 2

    def lower(build: Lowering) -> None:
        channels = shape[1] or 0

        def wide(local: Local) -> tuple[int, int]:
            low, high = local.interval("d1")
            return max(0, low - before), min(channels, high + after)

        def bound(end: int) -> gs.Tensor:
            return build.per_rank(
                lambda local: np.array([local.interval("d1")[end] - wide(local)[0]], np.int64)
            )

        x = build.fetch(build.input(0), "d1", 1, wide)
        y = build.add("LRN", [x], **attrs)
        build.finish("Slice", [y, bound(0), bound(1), np.array([1], np.int64)])

    return einsum(
        node,
        f"{text} -> {text}",
        contiguous=frozenset({"d1"}),
        **communicating(node, ["d1"], [shape[1]], lower),
    )
