"""Ops that resize or pad space, or trade it for channels."""

from __future__ import annotations

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


def unchanged_rule(node: gs.Node, kept: set[int], reason: str, **fields: Any) -> Rule:
    """`a b c -> a b y`: the dimensions of operand 0 that are kept pass, the others are whole."""
    rank = len(tensor_shape(node.inputs[0]) or ())
    before = names("d", rank)
    after = [d if i in kept else f"y{i}" for i, d in enumerate(before)]
    changed = [d for i in range(rank) if i not in kept for d in (before[i], after[i])]
    rest = ", _" * (len(node.inputs) - 1)
    text = f"{dims_text(before)}{rest} -> {dims_text(after)}"
    return einsum(node, text, whole=dict.fromkeys(changed, reason), **fields)


@rule("Resize Upsample")
def resize(node: gs.Node) -> Rule:
    """`n c h w -> n c y x`: dimensions of scale 1 pass, those that are interpolated are whole."""
    shape = tensor_shape(node.inputs[0]) or ()
    axes = [a % len(shape) for a in node.attrs.get("axes") or range(len(shape))]
    if node.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        return whole_rule(node, "a region of interest")
    if node.attrs.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        return whole_rule(node, "one scale for all its dimensions")
    linear = (FIRST,) if is_float(node.outputs[0]) else ()
    if _has_values(given(node, 3)):
        out = tensor_shape(node.outputs[0]) or ()
        kept = {i for i, size in enumerate(shape) if size is not None and size == out[i]}

        def sizes(local: Local) -> np.ndarray[Any, Any]:
            return int64([local.output_shape(0)[a] for a in axes])

        return unchanged_rule(node, kept, _SCALED, linear=linear, local={3: sizes})
    scales = _scales(node)
    if scales is None:
        return whole_rule(node, "scales that only a run can tell")
    by_axis = dict(zip(axes, scales, strict=True))
    kept = {i for i in range(len(shape)) if by_axis.get(i, 1.0) == 1.0}
    return unchanged_rule(node, kept, _SCALED, linear=linear)


def _has_values(tensor: gs.Tensor | None) -> bool:
    return tensor is not None and tensor_shape(tensor) != (0,)


def _scales(node: gs.Node) -> list[float] | None:
    if "scales" in node.attrs:
        return list(node.attrs["scales"])
    operand = given(node, 1 if len(node.inputs) == 2 else 2)
    value = None if operand is None else constant(operand)
    return None if value is None else [float(v) for v in value]


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
    copied = node.attrs.get("mode", "constant") != "constant"
    linear = (FIRST,) if copied or not fill else ()
    return unchanged_rule(node, set(range(rank)) - padded, "it is padded", linear=linear)


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
