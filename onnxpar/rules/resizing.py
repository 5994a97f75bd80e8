"""Ops that resize or pad space, or trade it for channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.rules.movement import PERMUTES, int64
from onnxpar.rules.rule import (
    FIRST,
    Local,
    Rule,
    Size,
    constant,
    dims_text,
    einsum,
    given,
    is_float,
    names,
    rule,
    tensor_shape,
    whole_rule,
)

_SCALED = "it is interpolated"


@rule("Resize Upsample")
def resize(node: gs.Node) -> Rule:
    """`n c h w -> n c y x`: dimensions of scale 1 pass, those that are interpolated are whole.

    Nearest neighbours by a whole factor are repetitions: `n c h -> n c (h r)`.
    """
    shape, out = (tensor_shape(t) or () for t in (node.inputs[0], node.outputs[0]))
    if node.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        return whole_rule(node, "a region of interest")
    if node.attrs.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        return whole_rule(node, "one scale for all its dimensions")
    axes = [a % len(shape) for a in node.attrs.get("axes") or range(len(shape))]
    by_size = _has_values(given(node, 3))
    scales = _scales_of_sizes(shape, out) if by_size else _scales(node, axes)
    if scales is None:
        return whole_rule(node, "scales that only a run can tell")
    before, after = names("d", len(shape)), names("d", len(shape))
    sizes: dict[str, Size] = {}
    whole: dict[str, str] = {}
    for i, scale in enumerate(scales):
        if scale != 1 and scale == int(scale) and _repeats(node):
            after[i], sizes[f"r{i}"] = f"(d{i} r{i})", int(scale)
            whole[f"r{i}"] = _SCALED
        elif scale != 1:
            after[i] = f"y{i}"
            whole |= dict.fromkeys((before[i], after[i]), _SCALED)

    def local_sizes(local: Local) -> np.ndarray[Any, Any]:
        return int64([local.output_shape(0)[a] for a in axes])

    rest = ", _" * (len(node.inputs) - 1)
    return einsum(
        node,
        f"{dims_text(before)}{rest} -> {dims_text(after)}",
        sizes=sizes,
        whole=whole,
        linear=(FIRST,) if is_float(node.outputs[0]) else (),
        local={3: local_sizes} if by_size else {},
    )


def _repeats(node: gs.Node) -> bool:
    """Whether each element is repeated, if the scale is a whole number."""
    if node.attrs.get("mode", "nearest") != "nearest":
        return False
    how = (node.attrs.get("coordinate_transformation_mode"), node.attrs.get("nearest_mode"))
    return len(node.inputs) < 3 or how == ("asymmetric", "floor")


def _scales_of_sizes(shape: Sequence[Size], out: Sequence[Size]) -> list[float] | None:
    if None in shape or None in out or 0 in shape:
        return None
    return [(o or 0) / (s or 1) for s, o in zip(shape, out, strict=True)]


def _has_values(tensor: gs.Tensor | None) -> bool:
    return tensor is not None and tensor_shape(tensor) != (0,)


def _scales(node: gs.Node, axes: Sequence[int]) -> list[float] | None:
    """The scale of every dimension; 1 for those that are not in axes."""
    operand = given(node, 1 if len(node.inputs) == 2 else 2)
    values = node.attrs.get("scales")
    if values is None and operand is not None:
        values = constant(operand)
    if values is None:
        return None
    found = [1.0] * len(tensor_shape(node.inputs[0]) or ())
    for axis, scale in zip(axes, values, strict=True):
        found[axis] = float(scale)
    return found


@rule("Pad")
def pad(node: gs.Node) -> Rule:
    """`a b -> a y`: dimensions without padding pass; linear if the padding is zero or copied."""
    rank = len(tensor_shape(node.inputs[0]) or ())
    pads, fill, axes = (node.attrs.get("pads"), node.attrs.get("value", 0.0), list(range(rank)))
    for i, tensor in enumerate(node.inputs[1:4], 1):
        value = constant(tensor) if tensor.name else None
        if tensor.name and value is None and i != 2:
            return whole_rule(node, "padding that only a run can tell")
        if i == 1:
            pads = value
        elif i == 2 and tensor.name:
            fill = 1 if value is None else value.reshape(-1)[0]
        elif value is not None:
            axes = [int(a) % rank for a in value]
    assert pads is not None
    padded = {a for i, a in enumerate(axes) if pads[i] or pads[len(axes) + i]}
    before, after = names("d", rank), names("d", rank)
    for i in padded:
        after[i] = f"y{i}"
    copied = node.attrs.get("mode", "constant") != "constant"
    return einsum(
        node,
        f"{dims_text(before)}{', _' * (len(node.inputs) - 1)} -> {dims_text(after)}",
        whole=dict.fromkeys((d for i in padded for d in (before[i], after[i])), "it is padded"),
        linear=(FIRST,) if copied or not fill else (),
    )


@rule("DepthToSpace")
def depth_to_space(node: gs.Node) -> Rule:
    """`n (i j c) h w -> n c (h i) (w j)`; with mode CRD, `n (c i j) h w`."""
    channels = "c i j" if node.attrs.get("mode", "DCR") == "CRD" else "i j c"
    text = f"n ({channels}) h w -> n c (h i) (w j)"
    return _blocks(node, text, deep=node.inputs[0], shallow=node.outputs[0])


@rule("SpaceToDepth")
def space_to_depth(node: gs.Node) -> Rule:
    """`n c (h i) (w j) -> n (i j c) h w`."""
    text = "n c (h i) (w j) -> n (i j c) h w"
    return _blocks(node, text, deep=node.outputs[0], shallow=node.inputs[0])


def _blocks(node: gs.Node, text: str, deep: gs.Tensor, shallow: gs.Tensor) -> Rule:
    _, c, _, _ = tensor_shape(shallow) or ()
    _, _, h, w = tensor_shape(deep) or ()
    block = node.attrs["blocksize"]
    sizes: dict[str, Size] = {"c": c, "h": h, "w": w, "i": block, "j": block}
    whole = dict.fromkeys("ij", "the block size belongs to the op")
    return einsum(node, text, sizes=sizes, whole=whole, **PERMUTES)
