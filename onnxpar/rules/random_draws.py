"""Rules of random ops: a split model draws the same numbers as the unsplit one.

With a seed, the n-th run draws the same numbers in every session of onnxruntime. So each rank draws
the whole tensor and keeps its shard, without communication. Without a seed, the op stays whole: one
rank draws and broadcasts.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import dtype_of, tensor_shape
from onnxpar.rules.communicate import finish, has_output, is_short_float, like, own_shard, widen
from onnxpar.rules.notation import dims_text
from onnxpar.rules.rule import Lowering, Rule, einsum, names, rule, whole_rule

_UNSEEDED = "without a seed, one rank draws for all"


@rule("RandomNormalLike RandomUniformLike")
def random_like(node: gs.Node) -> Rule:
    """Sharding rule of RandomNormalLike, RandomUniformLike: `d0 d1 -> d0 d1`: with a seed, every
    rank draws the whole tensor and keeps its shard."""
    shape = tensor_shape(node.inputs[0]) or ()
    if "seed" not in node.attrs or None in shape:
        return whole_rule(node, _UNSEEDED)
    dims = names("d", len(shape))
    text = dims_text(dims)
    dtype = onnx.helper.np_dtype_to_tensor_dtype(dtype_of(node.outputs[0]))
    attrs = {**node.attrs, "dtype": dtype, "shape": list(shape)}

    def lower(build: Lowering) -> None:
        drawn = build.add(node_op, [], **attrs)
        build.finish("Identity", [own_shard(build, drawn, dims)])

    node_op = node.op.removesuffix("Like")
    return einsum(node, f"{text} -> {text}", lowered=frozenset(dims), lower=lower)


def training_dropout(node: gs.Node) -> Rule:
    """Sharding rule of Dropout in training: `d0 d1, _, _ -> d0 d1 ; d0 d1`: every rank draws the
    whole mask, by a Dropout of a tensor of ones, and keeps its shard.

    onnxruntime removes a Dropout, even in training, unless its mask has a reader or its result is
    an output of the graph; this lowering drops nothing in the same case.
    """
    shape = tensor_shape(node.inputs[0]) or ()
    if "seed" not in node.attrs or None in shape:
        return whole_rule(node, _UNSEEDED)
    dims = names("d", len(shape))
    text = dims_text(dims)
    rest = ", _" * (len(node.inputs) - 1)
    results = "; ".join(text if t.name else "_" for t in node.outputs)
    attrs = dict(node.attrs)

    def lower(build: Lowering) -> None:
        x = build.input(0)
        one = np.ones((), np.float32 if is_short_float(x) else dtype_of(x))
        ones = build.add("Expand", [one, np.array(shape, np.int64)])
        controls = [build.input(i) for i in range(1, len(build.local.node.inputs))]
        scale, mask = build.add_each("Dropout", [ones, *controls], 2, **attrs)
        if build.is_graph_output(0) or has_output(build, 1):
            scale = build.add("Where", [mask, scale, like(scale, 0)])
        finish(build, "Mul", [widen(build, x), own_shard(build, scale, dims)])
        if has_output(build, 1):
            build.finish("Identity", [own_shard(build, mask, dims)], 1)

    return einsum(node, f"{text}{rest} -> {results}", lowered=frozenset(dims), lower=lower)


@rule("Bernoulli Multinomial RandomNormal RandomUniform")
def random_draw(node: gs.Node) -> Rule:
    """Sharding rule of other random ops: all dimensions stay whole. With a seed, every rank draws
    the tensor; without one, one rank draws for all."""
    seeded = "with a seed, every rank draws all of it"
    return whole_rule(node, seeded if "seed" in node.attrs else _UNSEEDED)
