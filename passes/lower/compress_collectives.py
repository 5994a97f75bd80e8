"""compress-collectives: ranks send gradients in fewer bits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto, helper

from onnxpar.base.errors import StrategyError
from onnxpar.compiler.pass_ import LAYOUTS, LOCAL, Pass, PassContext, Stage
from onnxpar.graph.reshards import Reshard, reshard_node, reshard_of
from onnxpar.graph.subgraphs import all_nodes, bodies
from onnxpar.graph.tensors import numpy_dtype
from onnxpar.graph.training_spec import RESIDUAL, SCALE, Slot, Step
from onnxpar.layout.layout import Layout
from onnxpar.lowering.buckets import BUCKET_BYTES, Kind, independent_groups
from onnxpar.lowering.compression import (
    LEAST_BYTES,
    TWO_BIT,
    Compression,
    gradient_reductions,
)
from onnxpar.lowering.order_nodes import schedule
from onnxpar.lowering.threshold_codes import Sum, ThresholdBuilder, other_axes
from onnxpar.sharding.shard_bytes import largest_shard_bytes

_WIRE: dict[str, Any] = {"float16": np.dtype(np.float16), "bfloat16": TensorProto.BFLOAT16}


@dataclass(frozen=True)
class CompressCollectives(Pass):
    """Send sums of gradients between ranks in fewer bits.

    Requires a training step with reshard nodes (insert-collectives). Ensures that all layouts still
    agree. For float16 and bfloat16, the pass puts casts around the reductions. The plugin adds up
    in float32 and rounds once, so only a result that is too large for the type overflows. For 2bit,
    the pass replaces reductions by all-gathers of codes, and adds a state to the model for each
    gradient: the remainder that ranks have not sent yet, a partial sum
    (`lowering/threshold_codes.py`). Gradients of 16 bits stay as they are; 2bit refuses them.

    to            none, float16, bfloat16, 2bit or 2bit:THRESHOLD
    least_bytes   gradients of fewer bytes per rank stay as they are: for them, latency dominates
    bucket_bytes  most bytes per rank of the gradients whose 2bit codes one collective sends

    Example: grad(loss="y", optimizer="none"),
            shard(mesh="dp=2", preset="data-parallel", compression="float16")

        total (float[4,256] x, float[256,1] w) => (float y)
        { h = MatMul(x, w)  y = ReduceSum<keepdims = 0>(h) }

    Before:

        mesh dp=2
        input  x: float32 4x256 [dp, -]
        input  w: float32 256x1 [-, -]
        const  ReduceSum_y.grad/Expand.4: float32 4x1 [dp, -]
        h: float32 4x1 [dp, -] = MatMul(x, w)
        y: float32 scalar [] sum(dp) = ReduceSum(h) {keepdims=0}
        y@1: float32 scalar [] = onnxpar.reshard.AllReduce(y) {axes=dp}
        MatMul_h.grad/Transpose.3: float32 256x4 [-, dp] = Transpose(x) {perm=[1, 0]}
        MatMul_h.grad/MatMul.4: float32 256x1 [-, -] sum(dp) = MatMul(MatMul_h.grad/Transpose.3,
                ReduceSum_y.grad/Expand.4)
        MatMul_h.grad/MatMul.4@1: float32 256x1 [-, -] =
                onnxpar.reshard.AllReduce(MatMul_h.grad/MatMul.4) {axes=dp}
        loss: float32 scalar [] = Identity(y@1)
        w.grad: float32 256x1 [-, -] = Identity(MatMul_h.grad/MatMul.4@1)
        evaluation.loss: float32 scalar [] = Identity(y@1)
        output loss: float32 scalar []
        output w.grad: float32 256x1 [-, -]
        output evaluation.loss: float32 scalar []

    After:

        mesh dp=2
        input  x: float32 4x256 [dp, -]
        input  w: float32 256x1 [-, -]
        const  ReduceSum_y.grad/Expand.4: float32 4x1 [dp, -]
        h: float32 4x1 [dp, -] = MatMul(x, w)
        y: float32 scalar [] sum(dp) = ReduceSum(h) {keepdims=0}
        y@1: float32 scalar [] = onnxpar.reshard.AllReduce(y) {axes=dp}
        MatMul_h.grad/Transpose.3: float32 256x4 [-, dp] = Transpose(x) {perm=[1, 0]}
        MatMul_h.grad/MatMul.4: float32 256x1 [-, -] sum(dp) = MatMul(MatMul_h.grad/Transpose.3,
                ReduceSum_y.grad/Expand.4)
        MatMul_h.grad/MatMul.4@2: float16 256x1 [-, -] sum(dp) = Cast(MatMul_h.grad/MatMul.4)
                {to=10}
        MatMul_h.grad/MatMul.4@3: float16 256x1 [-, -] =
                onnxpar.reshard.AllReduce(MatMul_h.grad/MatMul.4@2) {axes=dp}
        loss: float32 scalar [] = Identity(y@1)
        evaluation.loss: float32 scalar [] = Identity(y@1)
        MatMul_h.grad/MatMul.4@1: float32 256x1 [-, -] = Cast(MatMul_h.grad/MatMul.4@3) {to=1}
        w.grad: float32 256x1 [-, -] = Identity(MatMul_h.grad/MatMul.4@1)
        output loss: float32 scalar []
        output w.grad: float32 256x1 [-, -]
        output evaluation.loss: float32 scalar []
    """

    name: ClassVar[str] = "compress-collectives"
    stage = Stage.LOWER
    requires = (LAYOUTS,)
    excludes = (LOCAL,)
    plan_after = True
    to: str = "none"
    least_bytes: int = LEAST_BYTES
    bucket_bytes: int = BUCKET_BYTES

    def __post_init__(self) -> None:
        """Checks the option `to`. Errors: StrategyError for an unknown kind."""
        Compression.parse(self.to)

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        compression = Compression.parse(self.to)
        if compression is None:
            return False
        step = ctx.model.step
        if step is None or ctx.model.sizes is not None:
            raise StrategyError(
                f"compression {self.to!r} applies only to a training step; write one with `onnxpar "
                "grad`"
            )
        if not step.gradients:
            raise StrategyError(
                "the training step does not name its gradients, which compression needs; write it "
                "again with `onnxpar grad`"
            )
        if compression.kind == TWO_BIT:
            _check_steps(step)
        of = gradient_reductions(graph, step.gradients)
        large = [n for n in all_nodes(graph) if n.name in of and self._is_large(n, ctx)]
        chosen = {n.name for n in large if numpy_dtype(n.inputs[0]) in (np.float32, np.float64)}
        if len(chosen) < len(large) and compression.kind == TWO_BIT:
            raise StrategyError(
                f"compression {TWO_BIT}: the step's gradients have 16 bits already, because it was "
                "written with --precision; write it without --precision, or leave --compression "
                "out"
            )
        if not chosen:
            return False
        if compression.kind == TWO_BIT:
            _check_not_in_loops(graph, chosen, of)
            _Thresholds(graph, ctx, compression.threshold, of).run(chosen, self.bucket_bytes)
        else:
            _cast(graph, ctx, chosen, compression.kind)
        step.compression = self.to
        schedule(graph)
        return True

    def _is_large(self, node: gs.Node, ctx: PassContext) -> bool:
        """True if a reduction is a sum of enough bytes to be worth compressing."""
        return reshard_of(node).before.reduce == "sum" and _size(node, ctx) >= self.least_bytes


def _check_steps(step: Step) -> None:
    """Checks that the scale of gradients is fixed: else the remainder of one step would not fit the
    gradient of the next. Errors: StrategyError."""
    if any(slot.kind == SCALE for slot in step.slots):
        raise StrategyError(
            f"compression {TWO_BIT}: the step changes the scale of its gradients from step to "
            "step; write it with a fixed --loss-scale or none, or give --compression float16"
        )


def _check_not_in_loops(graph: gs.Graph, chosen: set[str], of: Mapping[str, str]) -> None:
    """Checks that no reduction is in the body of a loop, where each iteration would need a
    remainder. Errors: StrategyError.

    chosen  names of reductions to compress
    of      the parameter of each reduction
    """
    inside = chosen - {node.name for node in graph.nodes}
    if inside:
        first = of[min(inside)]
        raise StrategyError(
            f"compression {TWO_BIT}: ranks add up the gradient of {first!r} in each iteration of "
            "the loop over micro-batches; give another preset (zero presets cause this) or "
            "--compression float16, or write the step without --accumulate"
        )


def _cast(graph: gs.Graph, ctx: PassContext, chosen: Collection[str], kind: str) -> None:
    """Casts the operands of the `chosen` reductions (names) to 16 bits (`kind`), and the results
    back, also in bodies."""
    placed: list[gs.Node] = []
    after: list[gs.Node] = []
    for node in graph.nodes:
        for body in bodies(node):
            _cast(body, ctx, chosen, kind)
        if node.name in chosen:
            source, result = node.inputs[0], node.outputs[0]
            narrow, reduced = (_like(ctx, t, source.name, _WIRE[kind]) for t in (source, result))
            node.inputs[0], node.outputs[0] = narrow, reduced
            placed.append(_cast_node(source, narrow))
            after.append(_cast_node(reduced, result))
        placed.append(node)
    graph.nodes = [*placed, *after]


def _cast_node(source: gs.Tensor, result: gs.Variable) -> gs.Node:
    """Returns a Cast from `source` to the dtype of `result`."""
    attrs = {"to": helper.np_dtype_to_tensor_dtype(numpy_dtype(result))}
    return gs.Node("Cast", f"Cast_{result.name}", attrs, [source], [result])


@dataclass(frozen=True)
class _Thresholds:
    """Replaces reductions by all-gathers of 2bit codes.

    threshold  an element is sent as +threshold, -threshold or 0
    of         the parameter of each reduction, by name
    """

    graph: gs.Graph
    ctx: PassContext
    threshold: float
    of: Mapping[str, str]

    def run(self, chosen: Collection[str], bucket_bytes: int) -> None:
        """Replaces the `chosen` reductions, given by name."""
        groups = independent_groups(
            self.graph,
            lambda node: self._kind(node) if node.name in chosen else None,
            lambda node: _size(node, self.ctx),
            bucket_bytes,
        )
        instead: dict[int, list[gs.Node]] = {}
        for number, nodes in enumerate(groups, 1):
            instead |= {id(node): [] for node in nodes}
            instead[id(nodes[-1])] = self._replacement(f"compressed.{number}", nodes)
        self.graph.nodes = [
            new for node in self.graph.nodes for new in instead.get(id(node), [node])
        ]

    def _kind(self, node: gs.Node) -> Kind:
        """Returns the key of a reduction: reductions with equal keys may share one collective of
        codes."""
        reshard = reshard_of(node)
        others = other_axes(reshard.before, _reduced(reshard))
        return reshard.axes, others, str(node.inputs[0].dtype)

    def _replacement(self, name: str, nodes: Sequence[gs.Node]) -> list[gs.Node]:
        """Returns the nodes that replace several reductions: one all-gather of their codes, and
        what belongs to it. `name` begins the new nodes' names."""
        sums, cuts = [], []
        for node in nodes:
            addend, result = node.inputs[0], node.outputs[0]
            reshard = reshard_of(node)
            before, after, rest = reshard.before, reshard.after, _reduced(reshard)
            if rest != after:
                whole = _like(self.ctx, result, addend.name, addend.dtype, rest)
                cut = Reshard("LocalSlice", reshard.axes, ((rest, after),))
                cuts.append((cut, whole, result))
                result = whole
            kept, keeps = self._add_state(node, before)
            node.inputs.clear()
            node.outputs.clear()
            sums.append(Sum(addend, kept, result, keeps, before, rest))
        ctx, axes = self.ctx, reshard_of(nodes[0]).axes
        mesh, threshold = ctx.sharding.mesh, self.threshold
        builder = ThresholdBuilder(
            name, sums, axes, threshold, mesh, ctx.lowered.per_rank, ctx.layouts
        )
        built = builder.build()
        for cut, whole, result in cuts:
            built.append(reshard_node(f"LocalSlice_{result.name}", cut, [whole], [result]))
        return built

    def _add_state(self, node: gs.Node, layout: Layout) -> tuple[gs.Variable, gs.Variable]:
        """Adds a state to the model: the remainder of a reduction that ranks have not sent yet,
        with this layout. Returns (its input, its output)."""
        model, addend, parameter = self.ctx.model, node.inputs[0], self.of[node.name]
        assert model.step is not None
        name, i = f"{parameter}.{RESIDUAL}", 1
        while name in self.ctx.layouts:
            name, i = f"{parameter}.{RESIDUAL}.{i + 1}", i + 1
        kept, keeps = (
            gs.Variable(port, addend.dtype, list(addend.shape)) for port in (name, f"{name}.next")
        )
        for tensor in (kept, keeps):
            _note(self.ctx, tensor, addend.name, layout)
        self.graph.inputs.append(kept)
        self.graph.outputs.append(keeps)
        model.states.append((kept.name, keeps.name))
        model.step.slots.append(Slot(kept.name, keeps.name, RESIDUAL, parameter))
        return kept, keeps


def _reduced(reshard: Reshard) -> Layout:
    """Returns the layout between a reduction and the slice in which a rank takes its shard of the
    result."""
    after = reshard.after
    return replace(reshard.before, partial=after.partial, reduce=after.reduce)


def _size(node: gs.Node, ctx: PassContext) -> int:
    """Returns the bytes of a reduction's operand on the rank with the largest shard."""
    return largest_shard_bytes(node.inputs[0], reshard_of(node).before)


def _like(
    ctx: PassContext, tensor: gs.Tensor, origin: str, dtype: Any, layout: Layout | None = None
) -> gs.Variable:
    """Returns a new tensor with the shape of `tensor` and the dtype `dtype`, in a layout (default:
    that of `tensor`). The name and the factors come from the tensor `origin`."""
    new = gs.Variable(ctx.fresh(origin), dtype, list(tensor.shape))
    _note(ctx, new, origin, layout or ctx.layouts[tensor.name])
    return new


def _note(ctx: PassContext, tensor: gs.Variable, origin: str, layout: Layout) -> None:
    """Records the layout of a new tensor, and that it has the factors of the tensor `origin`."""
    ctx.sharding.factors.tensors[tensor.name] = ctx.sharding.factors.tensors[origin]
    ctx.layouts[tensor.name] = layout
