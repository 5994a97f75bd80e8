"""Writes the ranks of a plan that splits nothing: each rank runs the model as it is in its file.

The loader's rewrites (folded constants, known shapes, newer ops, experts in one node) serve the
plan. In a rank that computes the whole model they would only change which ops onnxruntime fuses,
and so the last bits of results.
"""

from __future__ import annotations

import numpy as np
import onnx

from onnxpar.base.bundle_names import rank_name, suffix_of
from onnxpar.base.write_digested import DigestedFolder
from onnxpar.compiler.pass_ import PassContext
from onnxpar.layout.mesh import parts_over
from onnxpar.load.stored_model import StoredModel
from onnxpar.lowering.size_graph import add_size_input
from onnxpar.lowering.weights import WeightStore, whole_layout


def are_whole(ctx: PassContext) -> bool:
    """True if each rank would compute the whole model on its own: no tensor is split, and ranks
    neither communicate nor differ."""
    lowered = ctx.lowered
    if lowered.collectives or lowered.programs or lowered.row_outputs:
        return False
    ranks = range(1, ctx.sharding.mesh.size)
    if lowered.per_rank.attributes or any(
        not np.array_equal(value(0), value(rank))
        for value in lowered.per_rank.constants.values()
        for rank in ranks
    ):
        return False
    return all(parts_over(layout.axes) == 1 for layout in ctx.layouts.values())


def write_whole_ranks(
    folder: DigestedFolder,
    original: StoredModel,
    ctx: PassContext,
    store: WeightStore,
    name: str = "",
) -> None:
    """Writes rank files of a plan for which `are_whole` holds: each is the model as it is in its
    file.

    folder    gets the graphs, and files with first values of states
    original  the model as it was read
    store     gets the weights
    name      of a further program of the ranks (a length, the evaluation); then first values of
              states are not written, because the main program has them
    """
    model = original.bound()
    _open_outputs(model.graph, ctx)
    states = dict(ctx.model.states)
    names = [weight.name for weight in model.graph.initializer]
    data = [*original.weights, *model.graph.initializer[len(original.weights) :]]
    weights = [
        store.cut(name, weight, whole_layout(weight))[0]
        for name, weight in zip(names, data, strict=True)
    ]
    del model.graph.initializer[:]
    store.cut_inner(model.graph)
    model.graph.initializer.extend(w for w in weights if w.name not in states)
    first = onnx.GraphProto(initializer=[w for w in weights if w.name in states])
    if ctx.model.sizes is not None:
        add_size_input(model.graph, ctx.model.sizes.symbols)
    model.producer_name = model.producer_name or "onnxpar"
    program = model.SerializeToString()
    values = onnx.ModelProto(graph=first).SerializeToString()
    for rank in range(ctx.sharding.mesh.size):
        folder.put(rank_name(rank, suffix_of(name)), program, [rank])
        if first.initializer and not name:
            folder.put(rank_name(rank, "states.onnx"), values, [rank])


def _open_outputs(graph: onnx.GraphProto, ctx: PassContext) -> None:
    """Removes declared sizes of outputs that are wrong in some run. onnxruntime only warns of them,
    but fails for outputs that are bound to buffers."""
    bindings = [ctx, *(other for _, other in ctx.lowered.replays)]
    for port in graph.output:
        shapes = [
            binding.layouts[port.name].shape for binding in bindings if port.name in binding.layouts
        ]
        if not shapes or not port.type.tensor_type.HasField("shape"):
            continue
        declared = port.type.tensor_type.shape.dim
        if len(declared) != len(shapes[0]):
            port.type.tensor_type.ClearField("shape")
            continue
        for dim, *sizes in zip(declared, *shapes, strict=True):
            if dim.HasField("dim_value") and {dim.dim_value} != set(sizes):
                dim.Clear()
