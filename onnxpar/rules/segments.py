"""Ops that join segments to a dimension, or cut it into segments: Concat, Split, Slice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.ir.tensors import Size, constant, tensor_shape
from onnxpar.rules.index_maps import IndexMap, tied_fields
from onnxpar.rules.movement import PERMUTES, int64
from onnxpar.rules.notation import Cat, Expr, Spec, Var
from onnxpar.rules.rule import Local, Lowering, Rule, rule, whole_rule


@rule("Concat")
def concat(node: gs.Node) -> Rule:
    """`a d, b d -> (a + b) d`: segments, jointly linear."""
    out = tensor_shape(node.outputs[0]) or ()
    axis = node.attrs["axis"] % len(out)
    dims: list[Expr] = [Var(f"d{i}") for i in range(len(out))]
    sizes: dict[str, Size] = {f"d{i}": s for i, s in enumerate(out) if i != axis}
    inputs: list[Spec] = []
    for i, tensor in enumerate(node.inputs):
        sizes[f"s{i}"] = (tensor_shape(tensor) or ())[axis]
        inputs.append((*dims[:axis], Var(f"s{i}"), *dims[axis + 1 :]))
    joined = Cat(tuple(Var(f"s{i}") for i in range(len(inputs))))
    everything = frozenset(range(len(inputs)))
    return Rule(
        tuple(inputs),
        ((*dims[:axis], joined if len(inputs) > 1 else Var("s0"), *dims[axis + 1 :]),),
        sizes,
        linear=(everything,),
        monotone=everything if len(inputs) == 1 else frozenset(),
    )


@rule("Split")
def split(node: gs.Node) -> Rule:
    """`(a + b) d -> a d ; b d`: the inverse of Concat; sizes follow the local parts."""
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

    old = "split" in node.attrs or node.attrs.get("onnxpar.opset", 13) < 13
    return Rule(
        ((*dims[:axis], joined, *dims[axis + 1 :]), *[None] * (len(node.inputs) - 1)),
        tuple((*dims[:axis], s, *dims[axis + 1 :]) for s in segments),
        sizes,
        local={"split": lambda local: parts(local).tolist()}
        if old
        else {1: parts, "num_outputs": _drop},
        **PERMUTES,
    )


def _drop(local: Local) -> None:
    """The attribute goes: explicit sizes stand in its place."""


def slice_bounds(node: gs.Node) -> dict[int, tuple[int, int, int]] | None:
    """(start, stop, step) by axis, clamped as ONNX does; None where they are not constant."""
    shape = tensor_shape(node.inputs[0]) or ()
    if "starts" in node.attrs:
        parts: list[Any] = [node.attrs.get(k) for k in ("starts", "ends", "axes", "steps")]
    else:
        operands = [*node.inputs[1:], *[None] * (5 - len(node.inputs))]
        parts = [constant(t) if t is not None and t.name else None for t in operands]
        given = [t is not None and t.name for t in operands]
        if any(g and p is None for g, p in zip(given, parts, strict=True)):
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
    """`(before + kept + after) d -> kept d`; strided dimensions `x -> d`, x tied to d."""
    bounds = slice_bounds(node)
    if bounds is None:
        return whole_rule(node, "bounds that only a run can tell")
    shape, out = (tensor_shape(t) or () for t in (node.inputs[0], node.outputs[0]))
    sizes: dict[str, Size] = {}
    whole: dict[str, str] = {}
    left: list[Expr] = []
    right: list[Expr] = []
    strided: dict[int, IndexMap] = {}
    for i, (size, kept) in enumerate(zip(shape, out, strict=True)):
        start, _, step = bounds.get(i, (0, 0, 1))
        if kept == 1 and step != 1:
            bounds[i], step = (start, start + 1, 1), 1
        sizes[f"d{i}"] = kept
        right.append(Var(f"d{i}"))
        if size == kept and step == 1:
            left.append(Var(f"d{i}"))
        elif step != 1 or kept is None or size is None:
            sizes[f"x{i}"] = size
            left.append(Var(f"x{i}"))
            if kept and size:
                strided[i] = IndexMap(f"x{i}", f"d{i}", start + step * np.arange(kept))
            else:
                whole |= dict.fromkeys((f"d{i}", f"x{i}"), "a strided slice")
        else:
            sizes |= {f"p{i}": start, f"q{i}": size - start - kept}
            left.append(Cat((Var(f"p{i}"), Var(f"d{i}"), Var(f"q{i}"))))

    def starts(local: Local) -> list[int]:
        return [local.size(f"p{i}") if f"p{i}" in sizes else b[0] for i, b in bounds.items()]

    def ends(local: Local) -> list[int]:
        return [
            s + local.size(f"d{i}") if step == 1 else node_end(i)
            for s, (i, (_, _, step)) in zip(starts(local), bounds.items(), strict=True)
        ]

    def node_end(axis: int) -> int:
        stop = bounds[axis][1]
        return stop if stop >= 0 else -(2**31)

    axes, steps = list(bounds), [b[2] for b in bounds.values()]
    if "starts" in node.attrs:
        local: Any = {"starts": starts, "ends": ends, "axes": lambda _: axes}
    else:
        local = {
            1: lambda at: int64(starts(at)),
            2: lambda at: int64(ends(at)),
            3: lambda _: int64(axes),
            4: lambda _: int64(steps),
        }

    def lower(builder: Lowering) -> None:
        x = builder.input(0)
        at = {i for i, m in strided.items() if m.is_split(builder.local)}
        for i in sorted(at):
            x = strided[i].take(builder, x, i)
        rest = [k for k, axis in enumerate(bounds) if axis not in at]

        def of(values: Callable[[Local], list[int]]) -> gs.Tensor:
            return builder.per_rank(lambda local: int64([values(local)[k] for k in rest]))

        fixed = [int64([values[k] for k in rest]) for values in (axes, steps)]
        builder.finish("Slice", [x, of(starts), of(ends), *fixed])

    rest: list[Spec | None] = [None] * (len(node.inputs) - 1)
    return Rule(
        (tuple(left), *rest),
        (tuple(right),),
        sizes,
        whole=whole,
        local=local,
        lower=lower,
        **tied_fields(strided),
        **PERMUTES,
    )
