"""Converts layouts to the form of ONNX's multi-device annotations, and axes to text and back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from onnxpar.graph.annotations import Component, TensorSharding
from onnxpar.layout.layout import Concat, Dim, Product, dim_axes, normalize
from onnxpar.layout.mesh import Axes, Axis, Mesh, parts_over
from onnxpar.sharding.factors import OpFactors, with_axes
from onnxpar.sharding.state import ShardingState
from onnxpar.strategy.device_lists import devices_of


def axes_text(axes: Axes, mesh: Mesh) -> str:
    """Returns axes as text, such as `dp.tp:(1)2`; `-` if there are none."""
    return ".".join(mesh.text(a) for a in axes) or "-"


def parse_axes(entries: Sequence[str], mesh: Mesh) -> list[Axes]:
    """Returns the axes that each text stands for, such as `dp.tp:(1)2` or `-`; the inverse of
    `axes_text`. Errors: StrategyError for an unknown axis."""
    out: list[Axes] = []
    for entry in entries:
        axes: list[Axis] = []
        for text in entry.split(".") if entry != "-" else []:
            divided, _, at = text.partition("@")
            name, _, rest = divided.partition(":")
            whole = mesh.axis(name)
            part = re.fullmatch(r"\((\d+)\)(\d+)", rest)
            axis = Axis(name, int(part[2]), int(part[1])) if part else whole
            axes.append(replace(axis, at=int(at)) if at else axis)
        out.append(tuple(axes))
    return out


def node_shardings(
    op: OpFactors, names: Sequence[str], axes: Mapping[int, Axes], sharding: ShardingState
) -> list[TensorSharding]:
    """Returns the sharding of each operand and result of a node, in the form of ONNX's standard, if
    the node's leaves (parts of dimensions) have these axes (by index). `names` are the names of
    operands and results.

    Leaves out tensors that the standard cannot express: tensors with segments, with a dimension
    that only ranks at one coordinate hold, or that the node reads twice in different layouts.
    """
    shardings: dict[str, TensorSharding | None] = {}
    links = [*op.inputs, *op.outputs]
    for name, tensor_links in zip(names, links, strict=True):
        factors = sharding.factors.tensors.get(name)
        if factors is None:
            continue
        splits = iter([(() if k is None else axes.get(k, ()), None) for k in tensor_links])
        dims = [normalize(with_axes(dim, splits)) for dim in factors.dims]
        new = _tensor_sharding(name, dims, sharding.mesh)
        shardings[name] = new if shardings.get(name, new) == new else None
    return [s for s in shardings.values() if s is not None]


def _tensor_sharding(name: str, dims: Sequence[Dim], mesh: Mesh) -> TensorSharding | None:
    """Returns the sharding of one tensor in the form of ONNX's standard; None if it cannot express
    it."""
    split: dict[int, tuple[Component, ...]] = {}
    order: Axes = ()
    for axis, dim in enumerate(dims):
        components = _components(dim)
        if components is None:
            return None
        if any(axes for _, axes in components):
            split[axis] = tuple((size, parts_over(axes)) for size, axes in components)
            order += tuple(a for _, axes in components for a in axes)
    return TensorSharding(name, devices_of(order, mesh), split)


def _components(dim: Dim) -> list[tuple[int, Axes]] | None:
    """Returns (size, axes) of each factor of a normalized dimension. None if the dimension has
    segments, or if only ranks at one coordinate of an axis hold it."""
    if any(axis.at is not None for axis in dim_axes(dim)):
        return None
    if isinstance(dim, Product):
        inner = [_components(c) for c in dim.children]
        return None if None in inner else [c for factors in inner for c in factors or ()]
    return None if isinstance(dim, Concat) else [(dim.size, dim.axes)]
