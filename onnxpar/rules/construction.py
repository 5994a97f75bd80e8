"""Rules of ops that compute a tensor from global sizes and positions: Trilu, EyeLike, OneHot,
Range."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import dtype_of, given, tensor_shape
from onnxpar.rules.communicate import finish_chain, held_positions
from onnxpar.rules.indexing import SELECTED
from onnxpar.rules.movement import PERMUTES
from onnxpar.rules.notation import dims_text
from onnxpar.rules.rule import Local, Lowering, Rule, einsum, names, rule

_COUNTED = ("int32", "int64", "float32", "float64")
"""Element types in which onnxruntime's Mul and Add can compute a Range."""


def _diagonal(local: Local, row: str, column: str) -> int:
    """Returns how far the global tensor's main diagonal lies off the main diagonal of the rank's
    shard, as Trilu's `k`: the first row of the shard minus its first column."""
    return local.interval(row)[0] - local.interval(column)[0]


@rule("Trilu")
def trilu(node: gs.Node) -> Rule:
    """Sharding rule of Trilu: `b m n, _ -> b m n`; if m or n is split, a rank shifts the diagonal
    by the position of its shard."""
    dims = names("d", len(tensor_shape(node.inputs[0]) or ()))
    text = dims_text(dims)
    row, column = dims[-2:]
    attrs, domain = dict(node.attrs), node.domain

    def lower(build: Lowering) -> None:
        shift = build.per_rank(lambda local: np.array(_diagonal(local, row, column), np.int64))
        if given(build.local.node, 1) is not None:
            shift = build.add("Add", [build.input(1), shift])
        build.finish("Trilu", [build.input(0), shift], domain=domain, **attrs)

    return einsum(
        node,
        f"{text}{', _' * (len(node.inputs) - 1)} -> {text}",
        contiguous=frozenset({row, column}),
        lowered=frozenset({row, column}),
        lower=lower,
        linear=PERMUTES["linear"],
    )


rule("Trilu", domain="com.microsoft")(trilu)


@rule("EyeLike")
def eye_like(node: gs.Node) -> Rule:
    """Sharding rule of EyeLike: `m n -> m n`; a rank shifts the diagonal by the position of its
    shard."""
    k = node.attrs.get("k", 0)
    return einsum(
        node,
        "m n -> m n",
        contiguous=frozenset("mn"),
        local={"k": lambda local: k + _diagonal(local, "m", "n")},
    )


@rule("OneHot")
def one_hot(node: gs.Node) -> Rule:
    """Sharding rule of OneHot: `a b, _, _ -> a b o`; o are the classes. If o is split, each rank
    compares the indices with its own classes."""
    index = names("i", len(tensor_shape(node.inputs[0]) or ()))
    axis = node.attrs.get("axis", -1) % (len(index) + 1)
    dims = [*index[:axis], "o", *index[axis:]]
    text = f"{dims_text(index)}, _, _ -> {dims_text(dims)}"
    depth = (tensor_shape(node.outputs[0]) or ())[axis]
    if str(dtype_of(node.outputs[0])) not in SELECTED:
        return einsum(node, text, whole={"o": "no op selects values of this type"})

    def lower(build: Lowering) -> None:
        at = build.add("Cast", [build.input(0)], to=onnx.TensorProto.INT64)
        from_end = build.add("Add", [at, np.array(depth, np.int64)])
        is_negative = build.add("Less", [at, np.array(0, np.int64)])
        at = build.add("Where", [is_negative, from_end, at])
        at = build.add("Unsqueeze", [at], axes=[axis])
        is_hot = build.add("Equal", [at, held_positions(build, "o", axis, len(dims))])
        off, on = (build.add("Gather", [build.input(2), np.array(i)]) for i in (0, 1))
        build.finish("Where", [is_hot, on, off])

    return einsum(node, text, lowered=frozenset("o"), lower=lower)


@rule("Range")
@rule("Range", domain="com.microsoft")
def range_(node: gs.Node) -> Rule:
    """Sharding rule of Range: `_, _, _ -> n`: every rank computes the values at its own positions.
    A missing step, which onnxruntime's own op allows, is 1."""

    def lower(build: Lowering) -> None:
        dtype = dtype_of(build.local.node.outputs[0])
        wide = dtype if str(dtype) in _COUNTED else np.dtype(np.int64)
        to = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(wide))
        x = build.add("Cast", [held_positions(build, "n")], to=to)
        steps = [(op, build.input(i)) for op, i in (("Mul", 2), ("Add", 0)) if given(node, i)]
        if wide != dtype:
            steps = [(op, build.add("Cast", [operand], to=to)) for op, operand in steps]
        finish_chain(build, x, steps)

    text = ", ".join(["_"] * len(node.inputs))
    return einsum(node, f"{text} -> n", lowered=frozenset("n"), lower=lower)
