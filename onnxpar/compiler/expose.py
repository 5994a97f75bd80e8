"""Makes inner tensors of a sharded graph outputs, so that `check --each` can compare each with the
same tensor of the unsplit model."""

from __future__ import annotations

from collections.abc import Collection

import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.compiler.open_ports import with_open_sizes
from onnxpar.compiler.pass_ import PassContext
from onnxpar.compiler.plan import Plan, Port
from onnxpar.graph.interchange import type_text
from onnxpar.graph.tensors import numpy_dtype

_TYPES = frozenset(
    [
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
    ]
)


def expose(plan: Plan, ctx: PassContext, names: Collection[str]) -> None:
    """Makes the tensors with these names outputs of the plan and of the ranks' graphs. Leaves out
    tensors in bodies (of loops and branches), and tensors whose shape or shards are known only
    during a run. Must be called on the rank-local graph, before split-ranks makes a graph for each
    rank."""
    graph = ctx.model.graph
    known = {tensor.name for tensor in (*graph.inputs, *graph.outputs)}
    for node in graph.nodes:
        for tensor in node.outputs:
            if tensor.name not in names or tensor.name in known:
                continue
            port = _port(tensor, ctx)
            if port is not None:
                tensor.shape = list(ctx.layouts[tensor.name].shape)
                graph.outputs.append(tensor)
                plan.outputs.append(port)


def _port(tensor: gs.Tensor, ctx: PassContext) -> Port | None:
    """Returns the entry of the plan for a tensor as an output; None if its layout or type is
    unknown, or if its sizes have no closed form."""
    layout = ctx.layouts.get(tensor.name)
    if layout is None or tensor.dtype is None or numpy_dtype(tensor).name not in _TYPES:
        return None
    dtype, shape = numpy_dtype(tensor).name, tuple(layout.shape)
    try:
        return with_open_sizes(Port(tensor.name, dtype, shape, layout, type_text(tensor)), ctx)
    except StrategyError:
        return None
