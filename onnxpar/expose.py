"""Makes the tensors inside a graph outputs, so that each can be compared with the whole model's."""

from __future__ import annotations

from collections.abc import Collection

from onnxpar.interchange import type_text
from onnxpar.passes.pass_ import PassContext
from onnxpar.plan import Plan, Port, numpy_dtype

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


def expose(made: Plan, ctx: PassContext, names: Collection[str]) -> None:
    """Makes the results of nodes with these names outputs of the ranks' graphs and of the plan.

    Those in bodies are left out, and so is what has no layout, as only data decide its shape. The
    graph must be that of the ranks, short of being cut."""
    graph = ctx.model.graph
    known = {tensor.name for tensor in (*graph.inputs, *graph.outputs)}
    for node in graph.nodes:
        for tensor in node.outputs:
            layout = ctx.layouts.get(tensor.name)
            if tensor.name not in names or tensor.name in known or layout is None:
                continue
            if tensor.dtype is None or numpy_dtype(tensor).name not in _TYPES:
                continue
            tensor.shape = list(layout.shape)
            graph.outputs.append(tensor)
            dtype = numpy_dtype(tensor).name
            port = Port(tensor.name, dtype, tuple(layout.shape), layout, type_text(tensor))
            made.outputs.append(port)
