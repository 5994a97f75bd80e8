"""Rules of ops that move or repeat elements unchanged: reshapes, transposes, repetitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import Size, constant, given, tensor_shape
from onnxpar.rules.elementwise import broadcast
from onnxpar.rules.notation import ONE, Expr, Prod, Spec, Var
from onnxpar.rules.rule import (
    FIRST,
    Local,
    Lowering,
    Rule,
    einsum,
    invalid,
    names,
    rule,
    whole_rule,
)

PERMUTES: dict[str, Any] = {"linear": (FIRST,), "monotone": FIRST}
"""Fields of rules for ops that only move elements of operand 0, through which any partial sum, max
or min passes."""


def int64(values: Sequence[int]) -> np.ndarray[Any, Any]:
    """An int64 array, as ONNX wants shapes, axes and bounds."""
    return np.array(values, np.int64)


def output_shape(local: Local) -> np.ndarray[Any, Any]:
    """The shape of the rank's shard of result 0, as an int64 array."""
    return int64(local.output_shape(0))


def regroup(
    before: Sequence[int], after: Sequence[int]
) -> tuple[Spec, Spec, dict[str, Size], list[str]]:
    """Writes two shapes with the same number of elements, row-major, as products of common factors:
    (8, 6) and (2, 4, 6) as `(f0 f1) f2` and `f0 f1 f2`.

    Returns both specs, the sizes of the factors, and the factors that only one shape has, which
    must stay whole: (4, 6) and (6, 4) share only a leading factor of 2.
    """
    sizes: dict[str, Size] = {}
    sides: tuple[list[list[Expr]], list[list[Expr]]] = ([[] for _ in before], [[] for _ in after])
    alone: list[str] = []
    rest = ([*before], [*after])
    at = [0, 0]

    def take(side: int, name: str, size: int) -> None:
        sides[side][at[side]].append(Var(name))
        rest[side][at[side]] //= size
        sizes[name] = size

    while True:
        for side in (0, 1):
            while at[side] < len(rest[side]) and rest[side][at[side]] == 1:
                at[side] += 1
        if at[0] == len(before) or at[1] == len(after):
            break
        name = f"f{len(sizes)}"
        common = math.gcd(rest[0][at[0]], rest[1][at[1]])
        if common > 1 and not alone:
            take(0, name, common)
            take(1, name, common)
            continue
        for side in (0, 1):
            for i in range(at[side], len(rest[side])):
                at[side] = i
                if rest[side][i] > 1:
                    name = f"w{len(sizes)}"
                    alone.append(name)
                    take(side, name, rest[side][i])
            at[side] = len(rest[side])
    left, right = (tuple(_merge(dim) for dim in side) for side in sides)
    return left, right, sizes, alone


def _merge(dim: list[Expr]) -> Expr:
    """The dimension that has these factors."""
    return dim[0] if len(dim) == 1 else Prod(tuple(dim))


@rule("Reshape", "Flatten", "Unsqueeze")
def reshape(node: gs.Node) -> Rule:
    """Sharding rule of Reshape, Flatten, Unsqueeze: `(b h) s d -> b h s d`: the factors that both
    shapes have in common may be split."""
    before, after = (tensor_shape(t) or () for t in (node.inputs[0], node.outputs[0]))
    if None in before or None in after or 0 in before:
        return whole_rule(node, "a data-dependent size")
    left, right, sizes, alone = regroup(_known(before), _known(after))
    whole = dict.fromkeys(alone, "the two shapes divide the elements differently")
    rest: list[Spec | None] = [None] * (len(node.inputs) - 1)
    local: Any = {1: output_shape} if node.op == "Reshape" else {}
    return Rule.of((left, *rest), (right,), sizes, whole=whole, local=local, **PERMUTES)


@rule("Squeeze")
def squeeze(node: gs.Node) -> Rule:
    """Sharding rule of Squeeze: the rule of Reshape. If the node names no axes, the rank's node
    names them: otherwise a Squeeze would also drop a dimension with one element in the rank's
    shard."""
    same = reshape(node)
    if given(node, 1) is not None:
        return same
    return same.with_op(lowered=frozenset(same.sizes), lower=lower_squeeze)


def lower_squeeze(build: Lowering) -> None:
    """Adds a Squeeze that names the dimensions with one element in the global tensor."""
    shape = tensor_shape(build.local.node.inputs[0]) or ()
    axes = [i for i, size in enumerate(shape) if size == 1]
    build.finish("Squeeze", [build.input(0)], axes=axes)


def _known(shape: tuple[Size, ...]) -> tuple[int, ...]:
    """The shape, all of whose sizes must be known, as ints."""
    assert None not in shape
    return tuple(s or 0 for s in shape)


@rule("Transpose")
def transpose(node: gs.Node) -> Rule:
    """Sharding rule of Transpose: `a b c -> c a b`."""
    rank = len(tensor_shape(node.inputs[0]) or ())
    dims = names("d", rank)
    perm = node.attrs.get("perm") or range(rank)[::-1]
    if sorted(perm) != list(range(rank)):
        raise invalid(
            node, f"perm={list(perm)}, which does not order the {rank} dimensions of its operand"
        )
    return einsum(
        node, f"{' '.join(dims) or '()'} -> {' '.join(dims[p] for p in perm) or '()'}", **PERMUTES
    )


@rule("Expand")
def expand(node: gs.Node) -> Rule:
    """Sharding rule of Expand: `1 d1 -> d0 d1`: broadcasts to the target shape, which for a rank is
    the shape of its shard."""
    if None in (tensor_shape(node.outputs[0]) or ()):
        return whole_rule(node, "a data-dependent shape")
    aligned = broadcast(node)
    return Rule.of(
        (aligned.inputs[0], None),
        aligned.outputs,
        aligned.sizes,
        local={1: output_shape},
        **PERMUTES,
    )


@rule("Tile")
def tile(node: gs.Node) -> Rule:
    """Sharding rule of Tile: `d -> (r d)`: r, the number of repeats of a dimension, is the major
    factor."""
    repeats = constant(node.inputs[1])
    if repeats is None:
        return whole_rule(node, "data-dependent repeats")
    left: list[Expr] = []
    right: list[Expr] = []
    sizes: dict[str, Size] = {}
    for i, (size, times) in enumerate(
        zip(tensor_shape(node.inputs[0]) or (), repeats.tolist(), strict=True)
    ):
        sizes[f"d{i}"] = size
        left.append(Var(f"d{i}"))
        right.append(Var(f"d{i}") if times == 1 else Prod((Var(f"r{i}"), Var(f"d{i}"))))
        if times != 1:
            sizes[f"r{i}"] = times

    def local_repeats(local: Local) -> np.ndarray[Any, Any]:
        return int64([local.size(f"r{i}") if f"r{i}" in sizes else 1 for i in range(len(left))])

    return Rule.of(
        (tuple(left), None), (tuple(right),), sizes, local={1: local_repeats}, **PERMUTES
    )


@rule("ConstantOfShape")
def constant_of_shape(node: gs.Node) -> Rule:
    """Sharding rule of ConstantOfShape: `_ -> d0 d1`: every rank fills its own shard."""
    if constant(node.inputs[0]) is None:
        return whole_rule(node, "a data-dependent shape")
    shape = tensor_shape(node.outputs[0]) or ()
    spec = tuple(ONE if s == 1 else Var(f"d{i}") for i, s in enumerate(shape))
    sizes = {f"d{i}": s for i, s in enumerate(shape) if s != 1}
    return Rule.of((None,), (spec,), sizes, local={0: output_shape})
