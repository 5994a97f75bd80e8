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
    """`dp.tp:(1)2`, or `-` for whole."""
    return ".".join(mesh.text(a) for a in axes) or "-"


def parse_axes(entries: Sequence[str], mesh: Mesh) -> list[Axes]:
    """Parses texts such as `axes_text` writes. Errors: StrategyError for an unknown axis."""
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
    """The standard's shardings of a node's operands and results if its leaves have these axes;
    `names` are the names of these tensors.

    Leaves out what the standard cannot express: segments, a dimension that ranks at one coordinate
    hold, and a tensor that the node reads twice in different layouts.
    """
    stated: dict[str, TensorSharding | None] = {}
    links = [*op.inputs, *op.outputs]
    for name, own in zip(names, links, strict=True):
        factors = sharding.factors.tensors.get(name)
        if factors is None:
            continue
        given = iter([(() if k is None else axes.get(k, ()), None) for k in own])
        dims = [normalize(with_axes(dim, given)) for dim in factors.dims]
        found = _tensor_sharding(name, dims, sharding.mesh)
        stated[name] = found if stated.get(name, found) == found else None
    return [s for s in stated.values() if s is not None]


def _tensor_sharding(name: str, dims: Sequence[Dim], mesh: Mesh) -> TensorSharding | None:
    split: dict[int, tuple[Component, ...]] = {}
    order: Axes = ()
    for axis, dim in enumerate(dims):
        found = _components(dim)
        if found is None:
            return None
        if any(axes for _, axes in found):
            split[axis] = tuple((size, parts_over(axes)) for size, axes in found)
            order += tuple(a for _, axes in found for a in axes)
    return TensorSharding(name, devices_of(order, mesh), split)


def _components(dim: Dim) -> list[tuple[int, Axes]] | None:
    """The factors of a normalized dimension and their axes; None if it has segments, or if one
    coordinate of an axis holds it."""
    if any(axis.at is not None for axis in dim_axes(dim)):
        return None
    if isinstance(dim, Product):
        inner = [_components(c) for c in dim.children]
        return None if None in inner else [c for found in inner for c in found or ()]
    return None if isinstance(dim, Concat) else [(dim.size, dim.axes)]
