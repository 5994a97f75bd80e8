"""insert-collectives: turn every mismatch of layouts into explicit nodes, by the cheapest path
of steps (`sharding/reshard_steps.py`): a reduce-scatter takes the place of an all-reduce and a
slice."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.compiler.pass_ import LAYOUTS, PROPAGATED, Pass, PassContext, Stage
from onnxpar.graph.reshards import Reshard, reshard_node
from onnxpar.graph.subgraphs import captured, constants, is_random
from onnxpar.graph.tensors import element_bytes
from onnxpar.lowering.order_nodes import schedule
from onnxpar.sharding.expert_rows import MEETINGS
from onnxpar.sharding.factors import BodyFactors, OpFactors
from onnxpar.sharding.partial_sums import PartialSums, choose_partial
from onnxpar.sharding.reshard_planner import Bytes, ReshardedTensor, cost, exchanges, plan_tree
from onnxpar.sharding.reshard_steps import ReshardStep
from onnxpar.sharding.shard_bytes import mean_bytes
from onnxpar.sharding.state import FactorSharding
from onnxpar.strategy.requests import check_requested
from onnxpar.strategy.strategy import TensorAnnotation


@dataclass(frozen=True)
class InsertCollectives(Pass):
    """Turn every layout mismatch into explicit collectives and local slices.

    Requires the propagated layouts (propagate-layouts). Ensures that `ctx.layouts` holds the
    layout of each tensor, and that each node's operands have the layout that its rule needs. Shapes
    stay global: a reshard node is an identity in the global program.

    Example: shard(mesh="tp=2", strategy={"tensors": {"w": ["tp", None]}})

        product (float[4,6] x, float[6,8] w) => (float[4,8] y) { y = MatMul(x, w) }

    Before:

        mesh tp=2
        input  x: float32 4x6 [-, tp]
        const  w: float32 6x8 [tp, -]
        y: float32 4x8 [-, -] = MatMul(x, w)
        output y: float32 4x8 [-, -]

    After:

        mesh tp=2
        input  x: float32 4x6 [-, tp]
        const  w: float32 6x8 [tp, -]
        y@1: float32 4x8 [-, -] sum(tp) = MatMul(x, w)
        y: float32 4x8 [-, -] = onnxpar.reshard.AllReduce(y@1) {axes=tp}
        output y: float32 4x8 [-, -]
    """

    name: ClassVar[str] = "insert-collectives"
    stage = Stage.LOWER
    requires = (PROPAGATED,)
    ensures = (LAYOUTS,)
    excludes = (LAYOUTS,)
    plan_after = True

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        return _Insertion(graph, ctx).run()


@dataclass
class _Read:
    """A reader of a tensor: operand `index` of a node, or output `index` of a graph. `need` is the
    sharding in which it reads the tensor."""

    node: gs.Node | gs.Graph
    index: int
    need: FactorSharding

    def take(self, tensor: gs.Tensor) -> None:
        """Makes the reader read another tensor instead."""
        tensors = self.node.inputs if isinstance(self.node, gs.Node) else self.node.outputs
        tensors[self.index] = tensor


class _Insertion:
    """Inserts reshard nodes into one graph and its bodies.

    produced  the sharding in which each tensor is computed, by name
    reads     the readers of each tensor, by name
    scopes    the graph or body that contains a tensor's node, by name
    moved     tensors of rows that ranks exchange with ranks of experts
    """

    def __init__(self, graph: gs.Graph, ctx: PassContext) -> None:
        self.graph = graph
        self.ctx = ctx
        self.sharding = ctx.sharding
        self.produced: dict[str, FactorSharding] = {}
        self.reads: dict[str, list[_Read]] = defaultdict(list)
        self.scopes: dict[str, gs.Graph] = {}
        self.changed = False
        self.moved = {t.name for m in self.sharding.factors.mixtures for t in m.moved}

    def run(self) -> bool:
        """Inserts the reshard nodes. True if there are any."""
        self.sharding.settle()
        self._pin_states()
        check_requested(self.ctx.asked, self.sharding, self.ctx.model.states)
        pending = self._pending()
        for op in self.sharding.factors.ops:
            if not op.bodies:
                self._read_captured(op.node)
            self._check_random(op.node)
            for i, tensor in enumerate(op.node.inputs):
                if tensor.name in self.sharding.factors.tensors:
                    self.reads[tensor.name].append(_Read(op.node, i, pending.required(op, i)))
            for i, tensor in enumerate(op.node.outputs):
                if tensor.name in self.sharding.factors.tensors:
                    self.produced[tensor.name] = pending.produced(op, i)
                    self.scopes[tensor.name] = op.graph
            for body in op.bodies:
                self._note_body(op, body, pending)
        for tensor in list(self.graph.inputs):
            self._place_input(tensor)
        for tensor in constants(self.graph):
            self._place_weight(tensor)
        for op in list(self.sharding.factors.ops):
            for tensor in list(op.node.outputs):
                if tensor.name in self.produced:
                    self._place_result(op, tensor)
            for tensor in [t for body in op.bodies for t in body.graph.inputs]:
                if tensor.name in self.produced:
                    self._place_body_input(tensor)
        schedule(self.graph)
        return self.changed

    def _pending(self) -> PartialSums:
        """Returns which partial sums (each rank holds one term) stay partial for their readers. A
        run of the pass at other sizes keeps the choice of the first run."""
        choices = self.ctx.choices
        if choices.results is None:
            chosen = choose_partial(self.graph, self.sharding)
            choices.results, choices.operands = chosen.results, chosen.operands
        return PartialSums(self.sharding, choices.results, choices.operands)

    def _check_random(self, node: gs.Node) -> None:
        """Checks that ranks will not draw different random values, which happens if a node draws a
        tensor of unknown rank: a collective cannot broadcast it. Errors: StrategyError."""
        unknown = [t.name for t in node.outputs if t.name and t.name not in self.sharding.tensors]
        if unknown and self.sharding.mesh.size > 1 and is_random(node):
            raise StrategyError(
                f"{node.op} '{node.name}' draws {unknown[0]!r}, but the number of its dimensions "
                "is unknown, so each rank would draw other numbers; declare the shapes of the "
                "model's inputs"
            )

    def _note_body(self, op: OpFactors, body: BodyFactors, pending: PartialSums) -> None:
        """Records the shardings of a body's inputs and outputs, which follow from the node that has
        the body."""
        for tensor, links in zip(body.graph.inputs, body.inputs, strict=True):
            if tensor.name in self.sharding.factors.tensors:
                self.produced[tensor.name] = pending.at_body(op, tensor, links)
                self.scopes[tensor.name] = body.graph
        for i, (tensor, links) in enumerate(zip(body.graph.outputs, body.outputs, strict=True)):
            if tensor.name in self.sharding.factors.tensors:
                need = pending.at_body(op, tensor, links)
                self.reads[tensor.name].append(_Read(body.graph, i, need))

    def _read_captured(self, node: gs.Node) -> None:
        """Records that the bodies of a node read tensors of outer graphs whole."""
        for tensor, reader, index in captured(node):
            leaves = self.sharding.tensors.get(tensor.name)
            if leaves is not None:
                whole = FactorSharding(tuple(() for _ in leaves))
                self.reads[tensor.name].append(_Read(reader, index, whole))

    def _pin_states(self) -> None:
        """Gives the output of each state pair the layout of the input; growing dimensions stay
        whole."""
        tensors = self.sharding.factors.tensors
        for source, result in self.ctx.model.states:
            if source not in tensors or result not in tensors:
                continue
            axes = self.sharding.tensor_sharding(source).leaves
            for name in (source, result):
                leaves = self.sharding.state_leaves(axes, source, result, name)
                self.sharding.tensors[name] = list(leaves)
                self.sharding.pinned.add(name)

    def _place_input(self, tensor: gs.Variable) -> None:
        """Chooses the layout in which an input is fed, and serves its readers. It is the layout
        that they need; if they need several, it is the start of the cheapest reshards to all of
        them, usually whole."""
        name = tensor.name
        if name not in self.sharding.factors.tensors:
            return
        if name in self.sharding.pinned:
            factor_sharding = self.sharding.tensor_sharding(name)
        else:
            factor_sharding = self._fed(tensor)
        self._serve(tensor, factor_sharding, self.reads[name])

    def _fed(self, tensor: gs.Variable) -> FactorSharding:
        """Returns the sharding in which an input without an annotation is fed. A run of the pass at
        other sizes keeps the choice of the first run."""
        fed = self.ctx.choices.fed
        if tensor.name not in fed:
            needs = [read.need for read in self.reads[tensor.name]]
            whole = FactorSharding(tuple(() for _ in self.sharding.tensors[tensor.name]))
            starts = dict.fromkeys([whole, *(need for need in needs if not need.partial)])
            size = self._bytes(tensor)

            def seconds(start: FactorSharding) -> float:
                return cost(self._steps(tensor, start, needs), size, self.sharding.costs)

            fed[tensor.name] = min(starts, key=seconds)
        return fed[tensor.name]

    def _place_weight(self, weight: gs.Constant) -> None:
        """Stores a weight once for each layout that its readers need. If an annotation gives the
        weight a layout, it is stored in this one, and collectives serve its readers, except readers
        that need the weight stored."""
        name, asked = weight.name, self.ctx.asked
        if name not in self.sharding.factors.tensors:
            return
        stored = self.reads[name]
        served = [read for read in stored if not self._needs_stored(read)]
        is_pinned = name in self.sharding.pinned and (bool(served) or not stored)
        if is_pinned:
            self._serve(weight, self.sharding.tensor_sharding(name), served)
            stored = [read for read in stored if self._needs_stored(read)]
        by_need: dict[FactorSharding, list[_Read]] = defaultdict(list)
        for read in stored:
            by_need[read.need].append(read)
            if not is_pinned and any(
                isinstance(s, TensorAnnotation) and s.tensor == name for s in asked
            ):
                self._check_stored(weight, read)
        for i, (need, reads) in enumerate(by_need.items(), int(is_pinned)):
            copy = weight
            if i:
                copy_name = self.ctx.fresh(name)
                copy = gs.Constant(copy_name, weight._values, export_dtype=weight.export_dtype)
                self.sharding.factors.tensors[copy.name] = self.sharding.factors.tensors[name]
                self.ctx.copies[copy.name] = name
                self.changed = True
                for read in reads:
                    read.take(copy)
            self.ctx.layouts[copy.name] = self.sharding.layout(copy, need)

    def _check_stored(self, weight: gs.Constant, read: _Read) -> None:
        """Checks that a reader which needs a weight stored needs it in the layout that an
        annotation gives the weight. Errors: StrategyError."""
        mesh, factor_sharding = self.sharding.mesh, self.sharding.tensor_sharding(weight.name)
        if read.need != factor_sharding:
            asked, need = (
                self.sharding.layout(weight, p).text(mesh) for p in (factor_sharding, read.need)
            )
            raise StrategyError(
                f"tensor '{weight.name}': the strategy requests {asked}, but {read.node.op} "
                f"'{read.node.name}' needs it stored as {need}; split the node by an entry under "
                "shard instead"
            )

    def _needs_stored(self, read: _Read) -> bool:
        """True if a node must read a weight as stored, not as the result of a collective."""
        if not isinstance(read.node, gs.Node):
            return False
        op = self.sharding.factors.find(read.node.name)
        if op is None or op.node is not read.node:  # in a body that runs whole
            return False
        return read.index in op.rule.ranks.constants

    def _place_result(self, op: OpFactors, tensor: gs.Variable) -> None:
        """Serves the readers of a node's result. If the result is an output of the graph, or has a
        requested layout, it gets that layout first."""
        if is_random(op.node) and self.sharding.mesh.size > 1:
            tensor = self._broadcast(tensor)
        produced = self.produced[tensor.name]
        reads = self.reads[tensor.name]
        is_output = any(t is tensor for t in self.graph.outputs)
        if tensor.name in self.sharding.pinned:
            asked = self.sharding.tensor_sharding(tensor.name)
        elif is_output:
            asked = produced.reduced()
        else:
            asked = produced
        if is_output and asked != produced:
            self._serve_output(tensor, produced, asked, reads)
        else:
            self._serve(tensor, produced, reads, via=asked)

    def _place_body_input(self, tensor: gs.Variable) -> None:
        """Serves the readers of an input of a body, from the sharding that the node with the body
        determines."""
        name = tensor.name
        produced = asked = self.produced[name]
        if name in self.sharding.pinned:
            asked = self.sharding.tensor_sharding(name)
        self._serve(tensor, produced, self.reads[name], via=asked)

    def _broadcast(self, tensor: gs.Variable) -> gs.Variable:
        """Broadcasts one rank's random values to all ranks. The broadcast result keeps the tensor's
        name; the node's result gets a new name."""
        drawn = gs.Variable(self.ctx.fresh(tensor.name), tensor.dtype, tensor.shape)
        factors = self.sharding.factors.tensors
        factors[drawn.name] = factors[tensor.name]
        producer = tensor.inputs[0]
        producer.outputs[_position(producer.outputs, tensor)] = drawn
        layout = self.sharding.layout(tensor, self.produced[tensor.name])
        assert layout.is_whole, tensor.name
        axes = tuple(map(self.sharding.mesh.axis, self.sharding.mesh.sizes))
        reshard = Reshard("Broadcast", axes, ((layout, layout),))
        name = self.ctx.model.names.free(f"Broadcast_{tensor.name}")
        node = reshard_node(name, reshard, [drawn], [tensor])
        self.scopes[tensor.name].nodes.append(node)
        self.ctx.layouts[drawn.name] = layout
        self.changed = True
        return tensor

    def _serve_output(
        self,
        tensor: gs.Variable,
        produced: FactorSharding,
        asked: FactorSharding,
        reads: list[_Read],
    ) -> None:
        """Serves the readers of a result that is an output of the graph in another layout. The
        node's result gets a new name, and a reshard computes the output."""
        inner = gs.Variable(self.ctx.fresh(tensor.name), tensor.dtype, tensor.shape)
        producer = tensor.inputs[0]
        producer.outputs[_position(producer.outputs, tensor)] = inner
        self.sharding.factors.tensors[inner.name] = self.sharding.factors.tensors[tensor.name]
        for read in reads:
            read.take(inner)
        self._serve(inner, produced, reads, via=asked, output=tensor)

    def _serve(
        self,
        tensor: gs.Tensor,
        produced: FactorSharding,
        reads: list[_Read],
        via: FactorSharding | None = None,
        output: gs.Variable | None = None,
    ) -> None:
        """Adds reshards from the sharding `produced` (first to `via`, if given) to the shardings in
        which all readers read a tensor, planned together, and makes them read the results. With
        `output`, the reshard to `via` computes this graph output."""
        self.ctx.layouts[tensor.name] = self.sharding.layout(tensor, produced)
        have: dict[FactorSharding, gs.Tensor] = {produced: tensor}
        goals = [r.need for r in reads]

        if via is not None and via != produced:
            self._add_reshards(self._steps(tensor, produced, [via]), tensor, have, output, via)
            produced = via
        self._add_reshards(self._steps(tensor, produced, goals), tensor, have)
        for read in reads:
            if read.need not in have:
                raise AssertionError(f"{tensor.name}: {read.need} not among {list(have)}")
            read.take(have[read.need])

    def _steps(
        self, tensor: gs.Tensor, produced: FactorSharding, goals: list[FactorSharding]
    ) -> list[ReshardStep]:
        """Returns the cheapest steps from the sharding `produced` to all goals. A run of the pass
        at other sizes keeps the choice of the first run."""
        key = (tensor.name, (produced, *goals))
        chosen = self.ctx.choices.steps
        if key not in chosen:
            factors = self.sharding.factors.tensors[tensor.name]
            parts = partial(self.sharding.parts_of_leaf, tensor.name)
            costs, size = self.sharding.costs, element_bytes(tensor)
            resharded = ReshardedTensor(factors, costs, size, parts)
            direct = exchanges(produced, goals, resharded) if tensor.name in self.moved else None
            chosen[key] = direct or plan_tree(produced, goals, self._bytes(tensor), resharded)
        return chosen[key]

    def _bytes(self, tensor: gs.Tensor) -> Bytes:
        """Returns a function from a sharding of the tensor to the bytes of a rank's shard."""
        sharding = self.sharding
        return lambda at: mean_bytes(tensor, at, sharding)

    def _add_reshards(
        self,
        tree: list[ReshardStep],
        tensor: gs.Tensor,
        have: dict[FactorSharding, gs.Tensor],
        output: gs.Variable | None = None,
        at: FactorSharding | None = None,
    ) -> None:
        """Adds a reshard node for each step, and its result to `have`, the tensor in each sharding
        so far. The step to the sharding `at` computes `output`, if given."""
        for step in tree:
            if step.after in have:
                continue
            result = output if output is not None and step.after == at else None
            if result is None:
                name = self.ctx.fresh(tensor.name)
                result = gs.Variable(name, tensor.dtype, tensor.shape)
                self.sharding.factors.tensors[name] = self.sharding.factors.tensors[tensor.name]
            before = self.sharding.layout(tensor, step.before)
            after = self.sharding.layout(tensor, step.after)
            reshard = Reshard(step.kind, step.axes, ((before, after),))
            if step.kind in MEETINGS:
                share = self.sharding.factors.share
                most = max(share(tensor.name, layout) for layout in (before, after))
                reshard = replace(reshard, share=most)
            name = self.ctx.model.names.free(f"{step.kind}_{result.name}")
            node = reshard_node(name, reshard, [have[step.before]], [result])
            self.scopes.get(tensor.name, self.graph).nodes.append(node)
            self.ctx.layouts[result.name] = after
            have[step.after] = result
            self.changed = True


def _position(tensors: list[gs.Tensor], tensor: gs.Tensor) -> int:
    """Returns the index of a tensor in a list, by identity."""
    return next(i for i, t in enumerate(tensors) if t is tensor)
