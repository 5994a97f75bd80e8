"""place-tables: for a table in files of the host, return the changed rows instead of the table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.compiler.pass_ import LOCAL, ORDER, Pass, PassContext, Stage
from onnxpar.graph.clone import needed
from onnxpar.graph.collectives import DOMAIN
from onnxpar.graph.subgraphs import all_nodes

_AROUND = ("Identity", "Slice")
"""Ops between the ScatterND of changed rows and the output: a rank writes rows of other ranks to an
extra row, and a Slice removes this row."""


@dataclass(frozen=True)
class PlaceTables(Pass):
    """Replace each output that is a table on the host by two: the indices of the rows that change,
    and these rows. The session writes them to the table's file.

    Requires a localized graph whose collectives are not ordered yet. Ensures that no node reads
    such a table whole, and that `ctx.lowered.row_outputs` has the names of the new outputs.

    Example: grad(loss="y", optimizer="sgd", params=["w"], lazy=["w"]),
    shard(mesh="dp=1", place=["w=host"])

        total (int64[1] i) => (float y) <float[3,1] w = {1, 2, 3}>
        { r = Gather(w, i)  y = ReduceSum<keepdims = 0>(r) }

    Before:

        mesh dp=1
        input  i: int64 1 [-]
        input  w: float32 3x1 [-, -]
        input  learning_rate: float32 scalar []
        const  lazy/w/constant.1: int64 scalar []
        const  lazy/w/constant.3: int64 scalar []
        const  lazy/w/constant.6: int64 1 [-] = [1]
        const  lazy/w/constant.8: int64 1 [-] = [0]
        const  lazy/w/constant.9: int64 1 [-] = [0]
        const  lazy/w/constant.10: int64 1 [-] = [0]
        const  lazy/w/constant.12: int64 1 [-] = [1]
        const  lazy/w/constant.13: int64 1 [-] = [1]
        const  lazy/w/constant.14: int64 1 [-] = [0]
        const  lazy/w/constant.19: int64 scalar [] = 0
        const  lazy/w/constant.21: int64 2 [-] = [1, 0]
        const  lazy/w/ConstantOfShape.24: int64 1 [-]
        const  lazy/w/constant.26: int64 2 [-]
        const  lazy/w/ConstantOfShape.29: float32 1x1 [-, -]
        const  ReduceSum_y.grad/Reshape.2: float32 1x1 [-, -]
        const  lazy/w/constant.31: int64 2 [-]
        const  update/w/constant.6: int64 2 [-] = [0, 1]
        const  update/w/constant.8: int64 1 [-]
        r: float32 1x1 [-, -] = Gather(w, i)
        y: float32 scalar [] = ReduceSum(r) {keepdims=0}
        lazy/w/Less.2: bool 1 [-] = Less(i, lazy/w/constant.1)
        lazy/w/Add.4: int64 1 [-] = Add(i, lazy/w/constant.3)
        lazy/w/Where.5: int64 1 [-] = Where(lazy/w/Less.2, lazy/w/Add.4, i)
        lazy/w/TopK.7:0: int64 1 [-], lazy/w/TopK.7:1: int64 1 [-] = TopK(lazy/w/Where.5,
                lazy/w/constant.6) {axis=0, largest=0, sorted=1}
        lazy/w/Slice.11: int64 0 [-] = Slice(lazy/w/TopK.7:0, lazy/w/constant.8, lazy/w/constant.9,
                lazy/w/constant.10)
        lazy/w/Slice.15: int64 0 [-] = Slice(lazy/w/TopK.7:0, lazy/w/constant.12,
                lazy/w/constant.13, lazy/w/constant.14)
        lazy/w/Equal.16: bool 0 [-] = Equal(lazy/w/Slice.15, lazy/w/Slice.11)
        lazy/w/Not.17: bool 0 [-] = Not(lazy/w/Equal.16)
        lazy/w/Cast.18: int64 0 [-] = Cast(lazy/w/Not.17) {to=7}
        lazy/w/CumSum.20: int64 0 [-] = CumSum(lazy/w/Cast.18, lazy/w/constant.19)
        lazy/w/Pad.22: int64 1 [-] = Pad(lazy/w/CumSum.20, lazy/w/constant.21)
        lazy/w/ScatterElements.25: int64 1 [-] = ScatterElements(lazy/w/ConstantOfShape.24,
                lazy/w/TopK.7:1, lazy/w/Pad.22) {axis=0}
        lazy/w/Reshape.27: int64 1x1 [-, -] = Reshape(lazy/w/ScatterElements.25, lazy/w/constant.26)
                {allowzero=1}
        lazy/w/ScatterElements.30: float32 1x1 [-, -] = ScatterElements(lazy/w/ConstantOfShape.29,
                lazy/w/Reshape.27, ReduceSum_y.grad/Reshape.2) {axis=0, reduction=add}
        loss: float32 scalar [] = Identity(y)
        update/w/Gather.1: float32 1x1 [-, -] = Gather(w, lazy/w/TopK.7:0) {axis=0}
        update/w/Gather.2: float32 1x1 [-, -] = Gather(lazy/w/ScatterElements.30, lazy/w/Pad.22)
                {axis=0}
        update/w/Mul.3: float32 1x1 [-, -] = Mul(update/w/Gather.2, learning_rate)
        update/w/Sub.4: float32 1x1 [-, -] = Sub(update/w/Gather.1, update/w/Mul.3)
        lazy/w/Reshape.32: int64 1x1 [-, -] = Reshape(lazy/w/TopK.7:0, lazy/w/constant.31)
                {allowzero=1}
        update/w/ScatterND.5: float32 3x1 [-, -] = ScatterND(w, lazy/w/Reshape.32, update/w/Sub.4)
        w.next: float32 3x1 [-, -] = Identity(update/w/ScatterND.5)
        update/w/ReduceL1.7: float32 scalar [] = ReduceL1(update/w/Sub.4, update/w/constant.6)
                {keepdims=0}
        update/w/Reshape.9: float32 1 [-] = Reshape(update/w/ReduceL1.7, update/w/constant.8)
                {allowzero=1}
        update/Concat.1: float32 1 [-] = Concat(update/w/Reshape.9) {axis=0}
        magnitudes: float32 1 [-] = Identity(update/Concat.1)
        output loss: float32 scalar []
        output w.next: float32 3x1 [-, -]
        output magnitudes: float32 1 [-]

    After:

        mesh dp=1
        input  i: int64 1 [-]
        input  w: float32 3x1 [-, -]
        input  learning_rate: float32 scalar []
        const  lazy/w/constant.1: int64 scalar []
        const  lazy/w/constant.3: int64 scalar []
        const  lazy/w/constant.6: int64 1 [-] = [1]
        const  lazy/w/constant.8: int64 1 [-] = [0]
        const  lazy/w/constant.9: int64 1 [-] = [0]
        const  lazy/w/constant.10: int64 1 [-] = [0]
        const  lazy/w/constant.12: int64 1 [-] = [1]
        const  lazy/w/constant.13: int64 1 [-] = [1]
        const  lazy/w/constant.14: int64 1 [-] = [0]
        const  lazy/w/constant.19: int64 scalar [] = 0
        const  lazy/w/constant.21: int64 2 [-] = [1, 0]
        const  lazy/w/ConstantOfShape.24: int64 1 [-]
        const  lazy/w/constant.26: int64 2 [-]
        const  lazy/w/ConstantOfShape.29: float32 1x1 [-, -]
        const  ReduceSum_y.grad/Reshape.2: float32 1x1 [-, -]
        const  lazy/w/constant.31: int64 2 [-]
        const  update/w/constant.6: int64 2 [-] = [0, 1]
        const  update/w/constant.8: int64 1 [-]
        r: float32 1x1 [-, -] = Gather(w, i)
        y: float32 scalar [] = ReduceSum(r) {keepdims=0}
        lazy/w/Less.2: bool 1 [-] = Less(i, lazy/w/constant.1)
        lazy/w/Add.4: int64 1 [-] = Add(i, lazy/w/constant.3)
        lazy/w/Where.5: int64 1 [-] = Where(lazy/w/Less.2, lazy/w/Add.4, i)
        lazy/w/TopK.7:0: int64 1 [-], lazy/w/TopK.7:1: int64 1 [-] = TopK(lazy/w/Where.5,
                lazy/w/constant.6) {axis=0, largest=0, sorted=1}
        lazy/w/Slice.11: int64 0 [-] = Slice(lazy/w/TopK.7:0, lazy/w/constant.8, lazy/w/constant.9,
                lazy/w/constant.10)
        lazy/w/Slice.15: int64 0 [-] = Slice(lazy/w/TopK.7:0, lazy/w/constant.12,
                lazy/w/constant.13, lazy/w/constant.14)
        lazy/w/Equal.16: bool 0 [-] = Equal(lazy/w/Slice.15, lazy/w/Slice.11)
        lazy/w/Not.17: bool 0 [-] = Not(lazy/w/Equal.16)
        lazy/w/Cast.18: int64 0 [-] = Cast(lazy/w/Not.17) {to=7}
        lazy/w/CumSum.20: int64 0 [-] = CumSum(lazy/w/Cast.18, lazy/w/constant.19)
        lazy/w/Pad.22: int64 1 [-] = Pad(lazy/w/CumSum.20, lazy/w/constant.21)
        lazy/w/ScatterElements.25: int64 1 [-] = ScatterElements(lazy/w/ConstantOfShape.24,
                lazy/w/TopK.7:1, lazy/w/Pad.22) {axis=0}
        lazy/w/Reshape.27: int64 1x1 [-, -] = Reshape(lazy/w/ScatterElements.25, lazy/w/constant.26)
                {allowzero=1}
        lazy/w/ScatterElements.30: float32 1x1 [-, -] = ScatterElements(lazy/w/ConstantOfShape.29,
                lazy/w/Reshape.27, ReduceSum_y.grad/Reshape.2) {axis=0, reduction=add}
        loss: float32 scalar [] = Identity(y)
        update/w/Gather.1: float32 1x1 [-, -] = Gather(w, lazy/w/TopK.7:0) {axis=0}
        update/w/Gather.2: float32 1x1 [-, -] = Gather(lazy/w/ScatterElements.30, lazy/w/Pad.22)
                {axis=0}
        update/w/Mul.3: float32 1x1 [-, -] = Mul(update/w/Gather.2, learning_rate)
        update/w/Sub.4: float32 1x1 [-, -] = Sub(update/w/Gather.1, update/w/Mul.3)
        lazy/w/Reshape.32: int64 1x1 [-, -] = Reshape(lazy/w/TopK.7:0, lazy/w/constant.31)
                {allowzero=1}
        update/w/ReduceL1.7: float32 scalar [] = ReduceL1(update/w/Sub.4, update/w/constant.6)
                {keepdims=0}
        update/w/Reshape.9: float32 1 [-] = Reshape(update/w/ReduceL1.7, update/w/constant.8)
                {allowzero=1}
        update/Concat.1: float32 1 [-] = Concat(update/w/Reshape.9) {axis=0}
        magnitudes: float32 1 [-] = Identity(update/Concat.1)
        w.next.indices: int64 ? whole = Identity(lazy/w/Reshape.32)
        w.next.rows: float32 ? whole = Identity(update/w/Sub.4)
        output loss: float32 scalar []
        output w.next.indices: int64 ? whole
        output w.next.rows: float32 ? whole
        output magnitudes: float32 1 [-]
    """

    name: ClassVar[str] = "place-tables"
    stage = Stage.LOWER
    requires = (LOCAL,)
    excludes = (ORDER,)

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        states = dict(ctx.model.states)
        tables = [name for name in ctx.model.on_host if name in states]
        for name in tables:
            output = next(t for t in graph.outputs if t.name == states[name])
            scatter = _scatter(output, name)
            row_outputs = [
                _add_output(graph, f"{output.name}.{part}", tensor, dtype)
                for part, tensor, dtype in (
                    ("indices", scatter.inputs[1], np.int64),
                    ("rows", scatter.inputs[2], output.dtype),
                )
            ]
            ctx.lowered.row_outputs[name] = (row_outputs[0].name, row_outputs[1].name)
            at = next(i for i, t in enumerate(graph.outputs) if t is output)
            graph.outputs[at : at + 1] = row_outputs
        if tables:
            graph.nodes = needed(graph, [t.name for t in graph.outputs])
            named = {n.name for n in all_nodes(graph) if n.domain == DOMAIN}
            ctx.lowered.collectives = [c for c in ctx.lowered.collectives if c.name in named]
        return bool(tables)


def _scatter(output: gs.Variable, table: str) -> gs.Node:
    """Returns the ScatterND that writes the changed rows of a table before its output. Errors:
    StrategyError if ranks exchange the whole table afterwards."""
    node = output.inputs[0]
    while node.op in _AROUND:
        node = node.inputs[0].inputs[0]
    if node.op != "ScatterND":
        raise StrategyError(
            f"--place {table}=host: {node.op} '{node.name}' exchanges the whole table after each "
            "step; split the table and its optimizer state alike, by rows or columns, or give "
            "--preset table-parallel"
        )
    return node


def _add_output(graph: gs.Graph, name: str, tensor: gs.Tensor, dtype: object) -> gs.Variable:
    """Adds an output of the graph with this name, and returns it. Its shape is open."""
    result = gs.Variable(name, dtype)
    graph.nodes.append(gs.Node("Identity", f"output/{name}", {}, [tensor], [result]))
    return result
