"""Where pending reductions are carried out: at once, or behind the linear ops that they pass.

A partial sum may pass an op if exactly one of its jointly linear groups carries it. Passing pays
where two sums meet (attention and MLP joined by an Add need one all-reduce, not two) or where the
tensor gets smaller. Chains of single readers form trees, on which the cheapest set of reductions
is found exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_graphsurgeon as gs

from onnxpar.ir.subgraphs import scopes
from onnxpar.layout.layout import ReduceOp
from onnxpar.layout.mesh import Axes
from onnxpar.sharding.accumulators import Accumulator, accumulators
from onnxpar.sharding.factors import Links, OpFactors
from onnxpar.sharding.shard_bytes import mean_bytes
from onnxpar.sharding.state import FactorSharding, ShardingState, overlaps


@dataclass
class _Choice:
    """A result that can be pending over `axes`; costs in seconds, counted up to here.

    keep    to leave it pending; `group` are the operands that stay pending or count once
    reduce  to have it whole; `through` says whether that is by reducing the pending result
    graph   where it is made: nothing pending goes into a body or comes out
    """

    graph: gs.Graph
    axes: Axes
    op: ReduceOp
    keep: float
    reduce: float
    through: bool
    group: frozenset[int] = frozenset()
    carried: frozenset[int] = frozenset()


@dataclass
class PartialSums:
    """The decision: results that stay pending, what bodies are handed and hand back so, and
    operands that are read pending."""

    sharding: ShardingState
    results: dict[str, tuple[Axes, ReduceOp]] = field(default_factory=dict)
    operands: dict[tuple[str, int], tuple[Axes, ReduceOp]] = field(default_factory=dict)

    def need(self, op: OpFactors, index: int) -> FactorSharding:
        """How a node reads an operand."""
        base = self.sharding.operand_sharding(op, op.inputs[index])
        axes, reduce = self.operands.get((op.node.name, index), ((), "sum"))
        own, own_reduce = self.sharding.pending(op)
        if own and index in op.rule.additive:
            axes, reduce = own, own_reduce
        return FactorSharding(base.leaves, axes, reduce)

    def handed(self, op: OpFactors, tensor: gs.Tensor, links: Links) -> FactorSharding:
        """How a body is handed a tensor, or hands it back."""
        base = self.sharding.operand_sharding(op, links)
        axes, reduce = self.results.get(f"{op.node.name}::{tensor.name}", ((), "sum"))
        return FactorSharding(base.leaves, axes, reduce)

    def result(self, op: OpFactors, index: int) -> FactorSharding:
        """How a node makes a result."""
        base = self.sharding.operand_sharding(op, op.outputs[index])
        own, reduce = self.sharding.pending(op)
        passed = self.results.get(op.node.outputs[index].name)
        if passed and not own:
            own, reduce = passed
        return FactorSharding(base.leaves, own, reduce)


def choose_pending(graph: gs.Graph, sharding: ShardingState) -> PartialSums:
    """Decides for every pending result whether its only reader takes it pending."""
    return _Chooser(graph, sharding).run()


class _Chooser:
    def __init__(self, graph: gs.Graph, sharding: ShardingState) -> None:
        self.sharding = sharding
        self.outputs = {t.name for scope in scopes(graph) for t in scope.outputs}
        self.choices: dict[str, _Choice] = {}
        self.decided = PartialSums(sharding)

    def run(self) -> PartialSums:
        ops = self.sharding.factors.ops
        for op in ops:
            self._consider(op)
        for op in reversed(ops):
            for tensor in op.node.outputs:
                choice = self.choices.get(tensor.name)
                if choice and tensor.name not in self.decided.results and choice.through:
                    self._keep(op, choice)
        return self.decided

    def _consider(self, op: OpFactors) -> None:
        for sum_ in accumulators(op.node) if op.bodies else ():
            self._carry(op, sum_)
        if op.bodies or len([t for t in op.node.outputs if t.name in self.sharding.tensors]) != 1:
            return
        result = op.node.outputs[0]
        own, reduce = self.sharding.pending(op)
        if own:
            seconds = self._reduction(op, own, reduce)
            self.choices[result.name] = _Choice(op.graph, own, reduce, 0.0, seconds, through=False)
            return
        offers = [self._through(op, group) for group in self._groups(op)]
        best = min((o for o in offers if o), key=lambda c: c.keep, default=None)
        if best is None:
            return
        reduced_first = sum(
            c.reduce for i in range(len(op.node.inputs)) if (c := self._operand(op, i))
        )
        reduced_here = best.keep + self._reduction(op, best.axes, best.op)
        best.through = reduced_here < reduced_first * 0.999
        best.reduce = min(reduced_here, reduced_first)
        self.choices[result.name] = best

    def _carry(self, op: OpFactors, carried: Accumulator) -> None:
        """Lets a loop carry a sum whose terms are pending: it is reduced once, behind the loop."""
        add = self.sharding.factors.op(carried.add.name)
        term = self._operand(add, carried.term)
        used = [a for over in self.sharding.op_axes(add) for a in over]
        factor_sharding = self.sharding.operand_sharding(op, op.outputs[carried.result])
        used += [a for over in factor_sharding.leaves for a in over]
        if term is None or term.op != "sum" or overlaps(term.axes, used):
            return
        if any(t.name not in self.sharding.tensors for t in carried.tensors(op.node)):
            return
        pending = (term.axes, term.op)
        result = op.node.outputs[carried.result]
        self._keep(self.sharding.factors.op(carried.add.inputs[carried.term].inputs[0].name), term)
        for i in (0, 1):
            self.decided.operands[add.node.name, i] = pending
        self.decided.operands[op.node.name, carried.operand] = pending
        self.decided.results[carried.back.name] = pending
        for tensor in (carried.given, carried.back):
            self.decided.results[f"{op.node.name}::{tensor.name}"] = pending
        self.decided.results[result.name] = pending
        size = mean_bytes(result, factor_sharding, self.sharding)
        seconds = self.sharding.costs.collective("AllReduce", term.axes, size)
        choice = _Choice(op.graph, term.axes, term.op, 0.0, seconds, through=False)
        self.choices[result.name] = choice

    def _groups(self, op: OpFactors) -> list[tuple[frozenset[int], bool]]:
        linear = [(group, True) for group in op.rule.linear]
        return linear + [(frozenset({i}), False) for i in op.rule.monotone]

    def _through(self, op: OpFactors, entry: tuple[frozenset[int], bool]) -> _Choice | None:
        """What it costs to let the group's pending operands pass; None where they may not."""
        group, is_sum = entry
        offered = {i: c for i in group if (c := self._operand(op, i))}
        fitting = ("sum",) if is_sum else ("max", "min")
        offered = {i: c for i, c in offered.items() if c.op in fitting}
        if not offered:
            return None
        axes, reduce = next((c.axes, c.op) for c in offered.values())
        offered = {i: c for i, c in offered.items() if c.axes == axes and c.op == reduce}
        used = [a for over in self.sharding.op_axes(op) for a in over]
        if overlaps(axes, used):
            return None
        seconds = 0.0
        carried = set()
        for i in range(len(op.node.inputs)):
            choice = self._operand(op, i)
            select = self._select(op, i) if i in group else 0.0
            if i in offered and offered[i].keep <= offered[i].reduce + select:
                seconds += offered[i].keep
                carried.add(i)
            else:
                seconds += select + (choice.reduce if choice else 0.0)
        if not carried:
            return None
        return _Choice(op.graph, axes, reduce, seconds, 0.0, False, group, frozenset(carried))

    def _operand(self, op: OpFactors, index: int) -> _Choice | None:
        """The choice behind an operand that this node alone reads, in the layout it is made in."""
        tensor = op.node.inputs[index]
        choice = self.choices.get(tensor.name)
        if choice is None or tensor.name in self.outputs or tensor.name in self.sharding.pinned:
            return None
        if choice.graph is not op.graph or len(tensor.outputs) != 1:
            return None
        if sum(t is tensor for t in op.node.inputs) != 1:
            return None
        return choice

    def _select(self, op: OpFactors, index: int) -> float:
        tensor = op.node.inputs[index]
        if isinstance(tensor, gs.Constant) or not tensor.name:
            return 0.0
        factor_sharding = self.sharding.operand_sharding(op, op.inputs[index])
        size = mean_bytes(tensor, factor_sharding, self.sharding)
        return self.sharding.costs.local("Select", size)

    def _reduction(self, op: OpFactors, axes: Axes, reduce: ReduceOp) -> float:
        tensor = op.node.outputs[0]
        factor_sharding = self.sharding.operand_sharding(op, op.outputs[0])
        size = mean_bytes(tensor, factor_sharding, self.sharding)
        return self.sharding.costs.collective("AllReduce", axes, size)

    def _keep(self, op: OpFactors, choice: _Choice) -> None:
        """Records that a result stays pending, and with it what its operands must be."""
        if not choice.group:
            return
        self.decided.results[op.node.outputs[0].name] = (choice.axes, choice.op)
        for i in choice.group:
            if op.node.inputs[i].name:
                self.decided.operands[op.node.name, i] = (choice.axes, choice.op)
            if i not in choice.carried:
                continue
            below = op.node.inputs[i].inputs[0]
            inner = self.choices[op.node.inputs[i].name]
            self._keep(self.sharding.factors.op(below.name), inner)
