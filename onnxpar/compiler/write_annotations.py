"""Writes a plan's layouts into the original model, as ONNX's multi-device annotations.

Metadata beside the annotations have what the standard cannot express: names of mesh axes, axes of
factors and segments inside a dimension, uneven sizes, and partial results.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import onnx
import onnx.inliner

from onnxpar.base.errors import OnnxparError, StrategyError
from onnxpar.base.own_folder import OwnFolder
from onnxpar.base.write_file import PREFIX, cause, new_file
from onnxpar.compiler.pass_ import PassContext
from onnxpar.graph.annotations import (
    AXES,
    PARTIAL,
    TENSORS,
    NodeConfiguration,
    TensorSharding,
    annotate_model,
    annotate_node,
    clear_annotations,
)
from onnxpar.graph.metadata import layouts_metadata
from onnxpar.graph.stored import external_location, stored_tensors
from onnxpar.graph.write_model import put_model
from onnxpar.layout.mesh import Axes
from onnxpar.load.read_file import read_proto
from onnxpar.sharding.factors import OpFactors, sizes_of
from onnxpar.sharding.state import ShardingState
from onnxpar.strategy.annotated_strategy import MESH, PARTS, node_key, read_axes
from onnxpar.strategy.standard_shardings import axes_text, node_shardings

CONFIGURATION = "onnxpar"
Operands = Mapping[str, tuple[str, list[str]]]
"""By name of a node: the key under which its annotations are stored, and the names of all its
operands and results."""


def original(path: Path) -> onnx.ModelProto:
    """Returns the model of a file, with its functions inlined, as annotations cannot refer to nodes
    inside functions."""
    model = read_proto(path)
    return onnx.inliner.inline_local_functions(model) if model.functions else model


def save(model: onnx.ModelProto, source: Path, output: Path) -> None:
    """Writes a model, with its external data, to `output`. `source` is the file from which it was
    read, beside which its external data lie. Errors: OnnxparError."""
    locations = {
        external_location(t)[0]
        for t in stored_tensors(model.graph)
        if t.data_location == onnx.TensorProto.EXTERNAL
    }
    there = output.parent
    copied = [n for n in locations if (there / n).resolve() != (source.parent / n).resolve()]
    if not copied:
        with new_file(output) as written:
            written.write_bytes(model.SerializeToString())
        return
    try:
        with OwnFolder(PREFIX, there) as folder:
            data = {name: folder / f"data{number}" for number, name in enumerate(copied)}
            for name, file in data.items():
                (there / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source.parent / name, file)
            put_model(model, output, folder, data)
    except OSError as error:
        raise OnnxparError(f"cannot write {output}: {cause(error)}") from error


def operand_names(sharding: ShardingState) -> Operands:
    """Returns the names of each node's tensors in the model file; must be called before passes
    insert other tensors."""
    return {
        op.node.name: (node_key(op.node), [t.name for t in (*op.node.inputs, *op.node.outputs)])
        for op in sharding.factors.ops
    }


def write_annotations(model: onnx.ModelProto, ctx: PassContext, operands: Operands) -> None:
    """Replaces the annotations of a model by the layouts of a plan. `ctx` is the context after
    insert-collectives, `operands` the result of `operand_names` before."""
    sharding, mesh = ctx.sharding, ctx.sharding.mesh
    clear_annotations(model)
    pinned = {
        ctx.model.file_name(name): [
            axes_text(a, mesh) for a in sharding.tensor_sharding(name).leaves
        ]
        for name in sorted(sharding.pinned)
    }
    nodes = {next((o for o in node.output if o), ""): node for node in model.graph.node}
    open_axes = _open_axes(ctx)
    inner = {}
    for op in sharding.factors.ops:
        key, names = operands[op.node.name]
        key = ctx.model.file_name(key)
        if key in nodes:
            _annotate(nodes[key], op, names, ctx, open_axes)
        elif op.leaves:
            inner[key] = [axes_text(a, mesh) for a in sharding.op_axes(op)]
    metadata = {MESH: str(mesh)}
    metadata |= {key: json.dumps(said) for key, said in ((TENSORS, pinned), (AXES, inner)) if said}
    annotate_model(model, CONFIGURATION, mesh.size, metadata)


def _open_axes(ctx: PassContext) -> set[tuple[str, int]]:
    """Returns the dimensions (tensor, axis) whose sizes the model leaves open."""
    sizes = ctx.model.sizes
    other = {} if sizes is None else sizes.graph(1).tensors()
    return {
        (name, axis)
        for name, factors in ctx.sharding.factors.tensors.items()
        if name in other and other[name].shape is not None
        for axis, (a, b) in enumerate(zip(factors.dims, other[name].shape, strict=True))
        if a.size != b
    }


def _annotate(
    node: onnx.NodeProto,
    op: OpFactors,
    names: list[str],
    ctx: PassContext,
    open_axes: set[tuple[str, int]],
) -> None:
    """Adds the layouts of a node's tensors to the node of the model file; `names` are the tensors'
    names there."""
    sharding, mesh = ctx.sharding, ctx.sharding.mesh
    axes = dict(enumerate(sharding.op_axes(op)))
    shardings = [
        _without_sizes(s, open_axes)
        for s in node_shardings(op, names, axes, sharding)
        if ctx.model.file_name(s.tensor) in (*node.input, *node.output)
    ]
    metadata = {}
    partial = {
        ctx.model.file_name(name): f"{layout.reduce}({axes_text(layout.partial, mesh)})"
        for name, tensor in zip(names[len(op.inputs) :], op.node.outputs, strict=True)
        if (layout := ctx.layouts.get(tensor.name)) is not None and layout.partial
    }
    if partial:
        metadata[PARTIAL] = json.dumps(partial)
    parts = {
        i: list(sizes)
        for i, leaf in enumerate(op.leaves)
        if leaf.atom not in sharding.factors.open_atoms
        and (shares := sharding.parts_of(leaf.atom, axes[i])) is not None
        and (sizes := sizes_of(shares, leaf.size, axes[i]))
    }
    note = NodeConfiguration(op.node.name, {s.tensor: s for s in shardings}, None, metadata)
    if parts or not _says(op, names, note, axes, sharding):
        metadata[AXES] = json.dumps([axes_text(a, mesh) for a in axes.values()])
    if parts:
        metadata[PARTS] = json.dumps(parts)
    metadata |= _layouts(op, names, ctx)
    in_file = [replace(s, tensor=ctx.model.file_name(s.tensor)) for s in shardings]
    annotate_node(node, CONFIGURATION, in_file, metadata)


def _layouts(op: OpFactors, names: list[str], ctx: PassContext) -> dict[str, str]:
    """Returns the layouts of a node's operands and results as metadata that people can read; empty
    for a node that runs whole."""
    layouts = [
        (ctx.model.file_name(name), ctx.layouts.get(tensor.name))
        for name, tensor in zip(names, (*op.node.inputs, *op.node.outputs), strict=True)
    ]
    texts = [(n, "" if x is None or x.is_whole else x.text(ctx.sharding.mesh)) for n, x in layouts]
    inputs = len(op.node.inputs)
    return layouts_metadata(texts[:inputs], texts[inputs:])


def _without_sizes(sharding: TensorSharding, open_axes: set[tuple[str, int]]) -> TensorSharding:
    """Returns the sharding of a tensor without the sizes of its open dimensions."""
    dims = {
        axis: tuple(
            (None if (sharding.tensor, axis) in open_axes else size, n) for size, n in components
        )
        for axis, components in sharding.dims.items()
    }
    return replace(sharding, dims=dims)


def _says(
    op: OpFactors,
    names: list[str],
    note: NodeConfiguration,
    axes: Mapping[int, Axes],
    sharding: ShardingState,
) -> bool:
    """True if the standard part of an annotation alone tells the axes of every factor, so that it
    needs no metadata."""
    try:
        return read_axes(op, names, note, sharding) == axes
    except StrategyError:
        return False
