"""Rules of ops that join segments to a dimension, or divide one into segments: Concat, Split,
Slice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import Size, constant, tensor_shape
from onnxpar.rules.index_maps import IndexMap, tied_fields
from onnxpar.rules.movement import PERMUTES, int64
from onnxpar.rules.notation import Cat, Expr, Spec, Var
from onnxpar.rules.rule import Local, Lowering, Rule, rule, whole_rule


@rule("Concat")
def concat(node: gs.Node) -> Rule:
    """Sharding rule of Concat: `a d, b d -> (a + b) d`: linear in all operands together."""
    out = tensor_shape(node.outputs[0]) or ()
    axis = node.attrs["axis"] % len(out)
    if _are_single(node.inputs, axis):
        specs, stacked, stack_sizes, whole = _stack(node.outputs[0], node.inputs, axis)
        return Rule.of(
            specs, (stacked,), stack_sizes, linear=(frozenset(range(len(specs))),), whole=whole
        )
    dims: list[Expr] = [Var(f"d{i}") for i in range(len(out))]
    sizes: dict[str, Size] = {f"d{i}": s for i, s in enumerate(out) if i != axis}
    inputs: list[Spec] = []
    for i, tensor in enumerate(node.inputs):
        sizes[f"s{i}"] = (tensor_shape(tensor) or ())[axis]
        inputs.append((*dims[:axis], Var(f"s{i}"), *dims[axis + 1 :]))
    joined = Cat(tuple(Var(f"s{i}") for i in range(len(inputs))))
    everything = frozenset(range(len(inputs)))
    return Rule.of(
        tuple(inputs),
        ((*dims[:axis], joined if len(inputs) > 1 else Var("s0"), *dims[axis + 1 :]),),
        sizes,
        linear=(everything,),
        monotone=everything if len(inputs) == 1 else frozenset(),
    )


def _are_single(parts: Sequence[gs.Tensor], axis: int) -> bool:
    """True if these are several tensors, each of which has one element along `axis`."""
    return len(parts) > 1 and all((tensor_shape(t) or ())[axis] == 1 for t in parts)


def _stack(
    stacked: gs.Tensor, parts: Sequence[gs.Tensor], axis: int
) -> tuple[tuple[Spec, ...], Spec, dict[str, Size], dict[str, str]]:
    """For a Concat or Split of tensors with one element along `axis`: returns (specs of these
    parts, spec of the whole, sizes of factors, reasons why factors stay whole), as in
    `1 d, 1 d -> e d`. e stays whole in this node; but unlike `(a + b)`, e is one factor, so nodes
    that read the result can split it."""
    shape = tensor_shape(stacked) or ()
    sizes: dict[str, Size] = {f"d{i}": s for i, s in enumerate(shape)}
    sizes |= {f"s{i}": 1 for i in range(len(parts))}
    dims = tuple(Var(f"d{i}") for i in range(len(shape)))
    specs = tuple((*dims[:axis], Var(f"s{i}"), *dims[axis + 1 :]) for i in range(len(parts)))
    return specs, dims, sizes, {f"d{axis}": "its elements are tensors of their own"}


@rule("Split")
def split(node: gs.Node) -> Rule:
    """Sharding rule of Split: `(a + b) d -> a d ; b d`: the inverse of Concat. A rank's node gets
    the sizes of the rank's shards."""
    shape = tensor_shape(node.inputs[0]) or ()
    axis = node.attrs.get("axis", 0) % len(shape)
    dims: list[Expr] = [Var(f"d{i}") for i in range(len(shape))]
    sizes: dict[str, Size] = {f"d{i}": s for i, s in enumerate(shape) if i != axis}
    segments = [Var(f"s{i}") for i in range(len(node.outputs))]
    for segment, tensor in zip(segments, node.outputs, strict=True):
        sizes[segment.name] = (tensor_shape(tensor) or ())[axis]
    joined: Expr = Cat(tuple(segments)) if len(segments) > 1 else segments[0]

    def parts(local: Local) -> np.ndarray[Any, Any]:
        return int64([local.output_shape(i)[axis] for i in range(len(segments))])

    if _are_single(node.outputs, axis):
        specs, stacked, stack_sizes, whole = _stack(node.inputs[0], node.outputs, axis)
        inputs = (stacked, *[None] * (len(node.inputs) - 1))
        return Rule.of(inputs, specs, stack_sizes, whole=whole, **PERMUTES)

    return Rule.of(
        ((*dims[:axis], joined, *dims[axis + 1 :]), *[None] * (len(node.inputs) - 1)),
        tuple((*dims[:axis], s, *dims[axis + 1 :]) for s in segments),
        sizes,
        local={1: parts, "num_outputs": _drop},
        **PERMUTES,
    )


def _drop(local: Local) -> None:
    """Returns None as the rank's value of an attribute, which removes it: the rank's node has
    explicit sizes instead."""


def slice_bounds(node: gs.Node) -> dict[int, tuple[int, int, int]] | None:
    """Returns (start, stop, step) of a Slice by dimension, clamped to the global sizes as in ONNX;
    None if the bounds are not constant, or the size of a sliced dimension is data-dependent."""
    shape = tensor_shape(node.inputs[0]) or ()
    operands = [*node.inputs[1:], *[None] * (5 - len(node.inputs))]
    parts: list[Any] = [constant(t) if t is not None and t.name else None for t in operands]
    is_given = [t is not None and t.name for t in operands]
    if any(g and p is None for g, p in zip(is_given, parts, strict=True)):
        return None
    starts, ends = (np.atleast_1d(p).tolist() for p in parts[:2])
    axes = range(len(starts)) if parts[2] is None else np.atleast_1d(parts[2]).tolist()
    steps = [1] * len(starts) if parts[3] is None else np.atleast_1d(parts[3]).tolist()
    bounds = {}
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = shape[axis % len(shape)]
        if size is None:
            return None
        bounds[axis % len(shape)] = slice(start, end, step).indices(size)
    return bounds


@rule("Slice")
def slice_(node: gs.Node) -> Rule:
    """Sharding rule of Slice: `(before + kept + after) d -> kept d`; or `x -> d` for a dimension
    with a step other than 1, where x and d are split over the same axes."""
    bounds = slice_bounds(node)
    if bounds is None:
        return whole_rule(node, "data-dependent bounds")
    kept = _Kept(bounds)
    shape, out = (tensor_shape(t) or () for t in (node.inputs[0], node.outputs[0]))
    for i, (size, count) in enumerate(zip(shape, out, strict=True)):
        kept.add_dimension(i, size, count)
    rest: list[Spec | None] = [None] * (len(node.inputs) - 1)
    return Rule.of(
        (tuple(kept.left), *rest),
        (tuple(kept.right),),
        kept.sizes,
        whole=kept.whole,
        local=kept.local_operands(),
        lower=kept.lower,
        **tied_fields(kept.strided),
        **PERMUTES,
    )


@dataclass(eq=False)
class _Kept:
    """Collects the rule of a Slice, dimension by dimension, and computes the bounds for a rank's
    shard.

    bounds   (start, stop, step) by dimension
    left     the dimensions of the operand
    right    the dimensions of the result
    sizes    the sizes of factors
    whole    factors that must not be split, with the reason
    strided  the kept elements of each dimension with a step other than 1
    """

    bounds: dict[int, tuple[int, int, int]]
    left: list[Expr] = field(default_factory=list)
    right: list[Expr] = field(default_factory=list)
    sizes: dict[str, Size] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    strided: dict[int, IndexMap] = field(default_factory=dict)

    def add_dimension(self, i: int, size: Size, count: Size) -> None:
        """Adds dimension i of operand and result to the rule; the Slice keeps `count` of its `size`
        elements."""
        start, _, step = self.bounds.get(i, (0, 0, 1))
        if count == 1 and step != 1:
            self.bounds[i], step = (start, start + 1, 1), 1
        self.sizes[f"d{i}"] = count
        self.right.append(Var(f"d{i}"))
        if size == count and step == 1:
            self.left.append(Var(f"d{i}"))
        elif step != 1 or count is None or size is None:
            self.sizes[f"x{i}"] = size
            self.left.append(Var(f"x{i}"))
            if count and size:
                self.strided[i] = IndexMap(f"x{i}", f"d{i}", start + step * np.arange(count))
            else:
                self.whole |= dict.fromkeys((f"d{i}", f"x{i}"), "a strided slice")
        else:
            self.sizes |= {f"p{i}": start, f"q{i}": size - start - count}
            self.left.append(Cat((Var(f"p{i}"), Var(f"d{i}"), Var(f"q{i}"))))

    def local_operands(self) -> dict[str | int, Callable[[Local], Any]]:
        """Returns the operands of a rank's Slice (starts, ends, axes, steps) as functions of its
        view."""
        return {
            1: lambda local: int64(self._starts(local)),
            2: lambda local: int64(self._ends(local)),
            3: lambda _: int64(list(self.bounds)),
            4: lambda _: int64(self._steps()),
        }

    def lower(self, builder: Lowering) -> None:
        """Adds the rank's nodes: fetches the kept elements of strided dimensions that are split,
        and slices all other dimensions."""
        x = builder.input(0)
        at = {i for i, m in self.strided.items() if m.is_split(builder.local)}
        for i in sorted(at):
            x = self.strided[i].take(builder, x, i)
        rest = [k for k, axis in enumerate(self.bounds) if axis not in at]

        def of(values: Callable[[Local], list[int]]) -> gs.Tensor:
            return builder.per_rank(lambda local: int64([values(local)[k] for k in rest]))

        fixed = [int64([values[k] for k in rest]) for values in (list(self.bounds), self._steps())]
        builder.finish("Slice", [x, of(self._starts), of(self._ends), *fixed])

    def _starts(self, local: Local) -> list[int]:
        bounds = self.bounds.items()
        return [local.size(f"p{i}") if f"p{i}" in self.sizes else b[0] for i, b in bounds]

    def _ends(self, local: Local) -> list[int]:
        return [
            start + local.size(f"d{i}") if step == 1 else self._strided_end(i)
            for start, (i, (_, _, step)) in zip(
                self._starts(local), self.bounds.items(), strict=True
            )
        ]

    def _strided_end(self, axis: int) -> int:
        """Returns the node's own end; a large negative number for an end before the first element,
        because ONNX would count -1 from the last element."""
        stop = self.bounds[axis][1]
        return stop if stop >= 0 else -(2**31)

    def _steps(self) -> list[int]:
        return [step for _, _, step in self.bounds.values()]
