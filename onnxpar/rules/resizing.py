"""Rules of ops that resize space, or move elements between space and channels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.graph.kernel_sizes import keeps_size
from onnxpar.graph.tensors import Size, constant, dtype_of, given, is_float, tensor_shape
from onnxpar.rules.communicate import finish, like, widen
from onnxpar.rules.index_maps import IndexMap, tied_fields
from onnxpar.rules.interpolation import Scaling, Taps, taps
from onnxpar.rules.movement import PERMUTES, int64
from onnxpar.rules.notation import dims_text
from onnxpar.rules.rule import FIRST, Local, Lowering, Rule, einsum, names, rule, whole_rule

Region = tuple[float, float]
Shape = tuple[int, ...]

_SCALED = "it is interpolated"
_MODES = {"nearest": "nearest", "linear": "linear", "bilinear": "linear", "cubic": "cubic"}


@rule("Resize")
def resize(node: gs.Node) -> Rule:
    """Sharding rule of Resize: `n c h w -> n c y x`: an interpolated dimension h is split over the
    same axes as its result y; scale 1 gives one factor.

    If nearest neighbours only repeat each element r times, the rule is `n c h -> n c (h r)`.
    """
    shape = tensor_shape(node.inputs[0]) or ()
    axes = _axes(node)
    by_size = _has_values(given(node, 3))
    if keeps_size(node.attrs):
        return whole_rule(node, "onnxruntime reads its axes differently from ONNX")
    changed = scalings(node)
    if changed is None:
        return whole_rule(node, "data-dependent scales")
    before, after = names("d", len(shape)), names("d", len(shape))
    sizes: dict[str, Size] = {}
    whole: dict[str, str] = {}
    taps_of: dict[int, Taps] = {}
    reason = _refusal(node, changed.values())
    for i, scaling in changed.items():
        after[i] = f"y{i}"
        if reason:
            whole |= dict.fromkeys((before[i], after[i]), reason)
            continue
        taps_of[i] = taps(scaling)
        if _policy(node) == "stretch" and _repeats(taps_of[i], scaling.size):
            times = scaling.out // scaling.size
            after[i], sizes[f"r{i}"] = f"(d{i} r{i})", times
            whole[f"r{i}"] = _SCALED

    def local_sizes(local: Local) -> Array:
        return int64([local.output_shape(0)[a] for a in axes])

    maps = {
        i: IndexMap(f"d{i}", f"y{i}", t.index) for i, t in taps_of.items() if after[i] == f"y{i}"
    }
    rest = ", _" * (len(node.inputs) - 1)
    extrapolates = any(t.outside.any() for t in taps_of.values())
    follows = by_size and (not changed or _policy(node) == "stretch")
    return einsum(
        node,
        f"{dims_text(before)}{rest} -> {dims_text(after)}",
        sizes=sizes,
        whole=whole,
        linear=(FIRST,) if is_float(node.outputs[0]) and not extrapolates else (),
        local={3: local_sizes} if follows else {},
        lower=lambda builder: _lower(builder, taps_of, maps),
        **tied_fields(maps),
    )


def _policy(node: gs.Node) -> str:
    """The attribute that says whether sizes keep the aspect ratio."""
    return str(node.attrs.get("keep_aspect_ratio_policy", "stretch"))


def scalings(node: gs.Node) -> dict[int, Scaling] | None:
    """Returns the scaling of each dimension that changes, by dimension; None if one is
    data-dependent. Empty if operand and result have the same shape: the kernel then copies the
    operand."""
    shape, out = (tensor_shape(t) or () for t in (node.inputs[0], node.outputs[0]))
    if shape == out and None not in shape:
        return {}
    axes = _axes(node)
    by_size = _has_values(given(node, 3))
    scales = _scales_of_sizes(node, axes, out) if by_size else _scales(node, axes)
    regions = _regions(node, axes)
    if scales is None or regions is None:
        return None
    return {
        i: _scaling(node, shape[i] or 0, out[i] or 0, scale, regions[i])
        for i, scale in enumerate(scales)
        if scale != 1 or regions[i] != (0, 1) or shape[i] != out[i]
    }


def _axes(node: gs.Node) -> list[int]:
    """The dimensions to which the node's scales or sizes belong."""
    rank = len(tensor_shape(node.inputs[0]) or ())
    return [a % rank for a in node.attrs.get("axes") or range(rank)]


def _refusal(node: gs.Node, resized: Collection[Scaling]) -> str | None:
    """Returns the reason why resized dimensions must stay whole; None if they may be split."""
    crops = node.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    if not all(s.size and s.out for s in resized):
        return "a data-dependent size"
    if crops and (_policy(node) != "stretch" or any(s.scale == 1 for s in resized)):
        return "its scale is not that of the cropped region"
    if _MODES[node.attrs.get("mode", "nearest")] != "nearest" and not is_float(node.inputs[0]):
        return "the kernel interpolates integers in its own fixed-point format"
    return None


def _scaling(node: gs.Node, size: int, out: int, scale: float, region: Region) -> Scaling:
    """Returns the resizing of a dimension from `size` to `out` elements, with the node's mode and
    attributes."""
    mode = _MODES[node.attrs.get("mode", "nearest")]
    return Scaling(size, out, scale, mode, node.attrs, region)


def _repeats(source: Taps, size: int) -> bool:
    """True if `source`, where the results of a dimension with `size` elements come from, repeats
    each element equally often and in order."""
    out = len(source.index)
    if source.index.shape[1] > 1 or out % size or source.outside.any():
        return False
    return np.array_equal(source.index[:, 0], np.arange(size).repeat(out // size))


def _lower(builder: Lowering, taps_of: Mapping[int, Taps], maps: Mapping[int, IndexMap]) -> None:
    """Replaces a Resize: interpolates one dimension after the other, by sums of weighted elements.

    taps_of  elements and weights, by dimension
    maps     the needed positions of dimensions that are not mere repetitions
    """
    node, x = builder.local.node, builder.input(0)
    if any(t.index.shape[1] > 1 for t in taps_of.values()):
        x = widen(builder, x)
    rank = len(tensor_shape(node.outputs[0]) or ())
    for i, source in taps_of.items():
        inner = (1,) * (rank - 1 - i)
        if i in maps:
            x = _add_taps(builder, x, i, source, maps[i], inner)
        else:
            times = len(source.index)
            times //= (tensor_shape(node.inputs[0]) or ())[i] or 1
            rows = _repeated(f"d{i}", times)
            x = builder.add("Gather", [x, builder.per_rank(rows)], axis=i)
        if source.outside.any():
            mask = _of_rank(f"y{i}", source.outside, inner)
            value = like(x, node.attrs.get("extrapolation_value", 0.0))
            x = builder.add("Where", [builder.per_rank(mask), value, x])
    finish(builder, "Identity", [x])


def _add_taps(
    builder: Lowering, x: gs.Tensor, axis: int, weighted: Taps, source: IndexMap, inner: Shape
) -> gs.Tensor:
    """Returns `x` interpolated along dimension `axis`, for the rank's shard of the result.

    weighted  which elements of the dimension, with what weights
    source    the same positions as a map, by which ranks fetch elements
    inner     a 1 for each dimension behind `axis`, so that weights broadcast
    """
    x = source.fetch(builder, x, axis)
    terms: list[gs.Tensor] = []
    for k in range(weighted.index.shape[1]):
        term = builder.add("Gather", [x, builder.per_rank(_column(source, k))], axis=axis)
        if weighted.index.shape[1] > 1:
            weight = _of_rank(source.after, weighted.weight[:, k].astype(dtype_of(x)), inner)
            term = builder.add("Mul", [term, builder.per_rank(weight)])
        terms.append(term)
    total = terms[0]
    for term in terms[1:]:
        total = builder.add("Add", [total, term])
    return total


def _column(source: IndexMap, k: int) -> Callable[[Local], Array]:
    """Returns a function from a rank's view to the operand positions of the k-th element of each
    sum."""
    return lambda local: np.ascontiguousarray(source.rows(local)[:, k])


def _repeated(factor: str, times: int) -> Callable[[Local], Array]:
    """Returns a function from a rank's view to positions that repeat each element of its shard."""
    return lambda local: np.arange(local.size(factor)).repeat(times)


def _of_rank(factor: str, values: Array, inner: Shape) -> Callable[[Local], Array]:
    """Returns a function from a rank's view to the `values` of its shard of a factor, with
    dimensions `inner` behind."""
    return lambda local: values[local.positions(factor)].reshape(-1, *inner)


def _scales_of_sizes(node: gs.Node, axes: Sequence[int], out: Sequence[Size]) -> list[float] | None:
    """Returns the scale of every dimension, computed from the node's operand of sizes; None if a
    scale is data-dependent. If the aspect ratio is kept, all `axes` have one scale. `out` is the
    shape of the result."""
    shape = tensor_shape(node.inputs[0]) or ()
    if None in shape or None in out or 0 in shape:
        return None
    policy = _policy(node)
    if policy == "stretch":
        return [float(np.float32(o or 0) / np.float32(s)) for s, o in zip(shape, out, strict=True)]
    asked = constant(node.inputs[3])
    if asked is None:
        return None
    ratios = [n / (shape[a] or 1) for n, a in zip(asked.tolist(), axes, strict=True)]
    scale = min(ratios) if policy == "not_larger" else max(ratios)
    return [scale if i in axes else 1.0 for i in range(len(shape))]


def _has_values(tensor: gs.Tensor | None) -> bool:
    """True if the operand is present and not an empty list."""
    return tensor is not None and tensor_shape(tensor) != (0,)


def _scales(node: gs.Node, axes: Sequence[int]) -> list[float] | None:
    """Returns the scale of every dimension, from the node's operand of scales, with 1 for
    dimensions that are not in `axes`; None if scales are data-dependent."""
    operand = given(node, 2)
    values = None if operand is None else constant(operand)
    if values is None:
        return None
    scales = [1.0] * len(tensor_shape(node.inputs[0]) or ())
    for axis, scale in zip(axes, values, strict=True):
        scales[axis] = float(scale)
    return scales


def _regions(node: gs.Node, axes: Sequence[int]) -> list[Region] | None:
    """Returns the (start, end) of the cropped region of each dimension, as fractions of its size;
    None if regions are data-dependent."""
    regions: list[Region] = [(0, 1)] * len(tensor_shape(node.inputs[0]) or ())
    if node.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        operand = given(node, 1)
        values = None if operand is None else constant(operand)
        if values is None:
            return None
        for i, axis in enumerate(axes):
            regions[axis] = (float(values[i]), float(values[len(axes) + i]))
    return regions


@rule("DepthToSpace")
def depth_to_space(node: gs.Node) -> Rule:
    """Sharding rule of DepthToSpace: `n (i j c) h w -> n c (h i) (w j)`, blocks of i x j elements;
    with mode CRD, `n (c i j) h w`."""
    channels = "c i j" if node.attrs.get("mode", "DCR") == "CRD" else "i j c"
    text = f"n ({channels}) h w -> n c (h i) (w j)"
    return _blocks(node, text, deep=node.inputs[0], shallow=node.outputs[0])


@rule("SpaceToDepth")
def space_to_depth(node: gs.Node) -> Rule:
    """Sharding rule of SpaceToDepth: `n c (h i) (w j) -> n (i j c) h w`, blocks of i x j elements;
    with mode CRD, `n (c i j) h w`."""
    channels = "c i j" if node.attrs.get("mode", "DCR") == "CRD" else "i j c"
    text = f"n c (h i) (w j) -> n ({channels}) h w"
    return _blocks(node, text, deep=node.outputs[0], shallow=node.inputs[0])


def _blocks(node: gs.Node, text: str, deep: gs.Tensor, shallow: gs.Tensor) -> Rule:
    """Returns the rule with this text. `deep` is the tensor with blocks in channels, `shallow` the
    one with blocks in space."""
    _, c, _, _ = tensor_shape(shallow) or ()
    _, _, h, w = tensor_shape(deep) or ()
    block = node.attrs["blocksize"]
    sizes: dict[str, Size] = {"c": c, "h": h, "w": w, "i": block, "j": block}
    whole = dict.fromkeys("ij", "the block size is fixed by the op")
    return einsum(node, text, sizes=sizes, whole=whole, **PERMUTES)
