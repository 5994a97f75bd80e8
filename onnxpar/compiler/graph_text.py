"""The graph as text, with a layout behind every tensor, for dumps and golden tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.compiler.pass_ import PassContext
from onnxpar.graph.reshards import is_reshard, reshard_of
from onnxpar.graph.subgraphs import constants, subgraphs
from onnxpar.graph.tensors import numpy_dtype
from onnxpar.layout.layout import Layout
from onnxpar.layout.mesh import Axis
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.state import FactorSharding
from onnxpar.strategy.derived_annotations import DerivedAnnotation
from onnxpar.strategy.strategy import Annotation, NodeAnnotation, TensorAnnotation


def graph_text(graph: gs.Graph, ctx: PassContext) -> str:
    """Returns the graph as text: a line for each input, weight, node and output, such as `input x:
    float32 4x6 [dp, -]`. Layouts come from insert-collectives, or before that pass, from
    propagation so far. While nothing is split yet, there is also a line for each annotation."""
    return "\n".join(_lines(graph, ctx)) + "\n"


def _lines(graph: gs.Graph, ctx: PassContext) -> Iterator[str]:
    mesh = ctx.sharding.mesh
    yield f"mesh {mesh}"
    yield from annotation_lines(ctx)
    stored = [f"const  {_typed(t, ctx)}{_value(t, ctx)}" for t in constants(graph)]
    yield from _graph_lines(graph, ctx, stored)


def annotation_lines(ctx: PassContext) -> Iterator[str]:
    """Yields a line for each annotation (requested split), with the number of its round; none once
    any node or tensor is split."""
    if ctx.layouts or any(map(any, (*ctx.sharding.tensors.values(), *ctx.sharding.ops.values()))):
        return
    for number, batch in enumerate(ctx.annotations, 1):
        for annotation in batch:
            yield f"annotate {_annotation_text(annotation, ctx)} {{round={number}}}"


def _annotation_text(annotation: Annotation, ctx: PassContext) -> str:
    """The text of an annotation: for a tensor its layout, for a node the axes of its factors
    (`m=dp`), for other kinds the fields."""
    if isinstance(annotation, TensorAnnotation):
        requested = FactorSharding(tuple(axes or () for axes in annotation.axes))
        layout = ctx.sharding.layout(annotation.tensor, requested)
        return f"{annotation.tensor}: {layout.text(ctx.sharding.mesh)}"
    if isinstance(annotation, (NodeAnnotation, DerivedAnnotation)):
        leaves = annotation.op.leaves
        axes = [
            f"{leaves[i].factor}={_attribute(a, ctx) if a else '-'}"
            for i, a in annotation.axes.items()
        ]
        return f"{annotation.op.node.name}: {' '.join(axes)}"
    values = {f.name: getattr(annotation, f.name) for f in fields(annotation)}  # type: ignore[arg-type]
    text = ", ".join(f"{name}={_attribute(value, ctx)}" for name, value in values.items())
    return f"{type(annotation).__name__}({text})"


def _graph_lines(graph: gs.Graph, ctx: PassContext, stored: Iterable[str]) -> Iterator[str]:
    for tensor in graph.inputs:
        yield f"input  {_typed(tensor, ctx)}"
    yield from stored
    for node in graph.nodes:
        results = ", ".join(_typed(t, ctx) for t in node.outputs if t.name)
        operands = ", ".join(t.name or "_" for t in node.inputs)
        op = node.op if node.domain in (None, "") else f"{node.domain}.{node.op}"
        yield f"{results} = {op}({operands}){attributes_text(node, ctx)}"
        for body in subgraphs(node):
            yield f"  {body.name}:"
            yield from (f"    {line}" for line in _graph_lines(body, ctx, ()))
    for tensor in graph.outputs:
        yield f"output {_typed(tensor, ctx)}"


def _typed(tensor: gs.Tensor, ctx: PassContext) -> str:
    dtype = numpy_dtype(tensor).name if tensor.dtype is not None else "?"
    shape = "?" if tensor.shape is None else "x".join(map(str, tensor.shape)) or "scalar"
    layout = layout_of(tensor.name, ctx)
    text = layout.text(ctx.sharding.mesh) if layout else "whole"
    return f"{tensor.name}: {dtype} {shape} {text}"


def layout_of(name: str, ctx: PassContext) -> Layout | None:
    """Returns the layout of a tensor in `ctx.layouts`; before these exist, the one that propagation
    has reached so far; None if the tensor is unknown."""
    if name in ctx.layouts or ctx.layouts:
        return ctx.layouts.get(name)
    if name in ctx.sharding.tensors:
        return ctx.sharding.layout(name, ctx.sharding.tensor_sharding(name))
    return None


def _value(tensor: gs.Constant, ctx: PassContext) -> str:
    if tensor.name in ctx.lowered.per_rank.constants:
        return f" = per rank, rank 0: {np.array2string(np.asarray(tensor.values), threshold=8)}"
    small = isinstance(tensor._values, np.ndarray) and tensor._values.size <= 4
    return f" = {tensor._values.tolist()}" if small else ""


def attributes_text(node: gs.Node, ctx: PassContext | None, rank: int | None = None) -> str:
    """Returns the attributes of a node in braces, `{axis=1}`; empty if it has none. With `ctx`,
    attributes that differ between ranks are marked `/rank`, or with `rank`, have the values of that
    rank."""
    shown: Mapping[str, Any] = node.attrs
    if is_reshard(node):
        shown = {"axes": reshard_of(node).axes}
    varying = {} if ctx is None else ctx.lowered.per_rank.attributes
    if rank is not None:
        of_rank = {k: varying[node.name, k](rank) for k in shown if (node.name, k) in varying}
        shown = {k: v for k, v in {**shown, **of_rank}.items() if v is not None}
        varying = {}
    parts = [
        f"{key}={_attribute(value, ctx)}" + ("/rank" if (node.name, key) in varying else "")
        for key, value in sorted(shown.items())
    ]
    return " {" + ", ".join(parts) + "}" if parts else ""


def _attribute(value: Any, ctx: PassContext | None) -> str:
    if ctx is not None and isinstance(value, tuple) and value and isinstance(value[0], Axis):
        return ".".join(ctx.sharding.mesh.text(a) for a in value)
    if isinstance(value, tuple) and value and isinstance(value[0], OpFactors):
        return "(" + ", ".join(op.node.name for op in value) + ")"
    if isinstance(value, (gs.Graph, gs.Tensor)):
        return f"<{value.name}>"
    return str(value)
