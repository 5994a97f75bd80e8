"""Decides where to reduce partial results (terms on several ranks, of which the sum is the value):
at once, or after the linear ops that pass them on.

A partial sum may pass an op if exactly one of the op's jointly linear groups of operands has the
partial sum. Passing is cheaper where two sums meet (attention and MLP joined by an Add need one
all-reduce, not two) or where the tensor gets smaller. Tensors with a single reader form trees; on a
tree, the cheapest set of reductions is found exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_graphsurgeon as gs

from onnxpar.graph.subgraphs import scopes
from onnxpar.layout.layout import ReduceOp
from onnxpar.layout.mesh import Axes
from onnxpar.sharding.accumulators import Accumulator, accumulators
from onnxpar.sharding.factors import Links, OpFactors
from onnxpar.sharding.shard_bytes import mean_bytes
from onnxpar.sharding.state import FactorSharding, ShardingState, overlaps


@dataclass
class _Candidate:
    """A result that can stay partial over `axes`, with the cost of both choices.

    graph    the graph or body of its node: partial values (each rank holds one term) do not enter
             or leave a body
    op       the reduction that gives the value
    keep     seconds of all reductions up to this result, if the result stays partial
    reduce   seconds of all reductions up to this result, if the result is reduced
    through  True if it is cheaper to reduce this result than the operands
    group    operands that are partial if the result stays partial; an operand that is not partial
             already is masked, so that one rank alone has it and the sum counts it once
    carried  operands in `group` that are partial already
    passed   the axes over which `carried` are partial; the node itself adds the other axes
    """

    graph: gs.Graph
    axes: Axes
    op: ReduceOp
    keep: float
    reduce: float
    through: bool
    group: frozenset[int] = frozenset()
    carried: frozenset[int] = frozenset()
    passed: Axes = ()


@dataclass
class PartialSums:
    """The tensors that stay partial (each rank holds one term), each with its axes and reduction.

    results   by name of the tensor, without the axes over which the node itself sums; by
              `node::tensor` for inputs and outputs of the bodies of a node
    operands  by node and operand index
    """

    sharding: ShardingState
    results: dict[str, tuple[Axes, ReduceOp]] = field(default_factory=dict)
    operands: dict[tuple[str, int], tuple[Axes, ReduceOp]] = field(default_factory=dict)

    def required(self, op: OpFactors, index: int) -> FactorSharding:
        """Returns the sharding in which a node reads the operand `index`, with partial axes (along
        which ranks hold terms)."""
        base = self.sharding.operand_sharding(op, op.inputs[index])
        axes, reduce = self.operands.get((op.node.name, index), ((), "sum"))
        own, own_reduce = self.sharding.own_partial(op)
        if own and index in op.rule.additive:
            axes, reduce = own, own_reduce
        return FactorSharding(base.leaves, axes, reduce)

    def at_body(self, op: OpFactors, tensor: gs.Tensor, links: Links) -> FactorSharding:
        """Returns the sharding of an input or output of one of the node's bodies, with partial
        axes (along which ranks hold terms)."""
        base = self.sharding.operand_sharding(op, links)
        axes, reduce = self.results.get(f"{op.node.name}::{tensor.name}", ((), "sum"))
        return FactorSharding(base.leaves, axes, reduce)

    def produced(self, op: OpFactors, index: int) -> FactorSharding:
        """Returns the sharding in which a node produces the result `index`, with partial axes
        (along which ranks hold terms)."""
        base = self.sharding.operand_sharding(op, op.outputs[index])
        own, reduce = self.sharding.own_partial(op)
        passed = self.results.get(op.node.outputs[index].name)
        if passed:
            own, reduce = own + passed[0], passed[1]
        return FactorSharding(base.leaves, own, reduce)


def choose_partial(graph: gs.Graph, sharding: ShardingState) -> PartialSums:
    """Decides for each partial result (each rank holds one term) whether its only reader reads it
    partial or reduced. Returns the tensors that stay partial. `sharding` has the axes of all leaves
    (parts of dimensions)."""
    return _Chooser(graph, sharding).run()


class _Chooser:
    """Computes candidates in graph order, from the costs of their operands, then keeps partial
    (each rank holds one term), from the last node on, each result that is cheaper to reduce
    later."""

    def __init__(self, graph: gs.Graph, sharding: ShardingState) -> None:
        self.sharding = sharding
        self.outputs = {t.name for scope in scopes(graph) for t in scope.outputs}
        self.candidates: dict[str, _Candidate] = {}
        self.decided = PartialSums(sharding)

    def run(self) -> PartialSums:
        ops = self.sharding.factors.ops
        for op in ops:
            self._consider(op)
        for op in reversed(ops):
            for tensor in op.node.outputs:
                candidate = self.candidates.get(tensor.name)
                if candidate and tensor.name not in self.decided.results and candidate.through:
                    self._keep(op, candidate)
        return self.decided

    def _consider(self, op: OpFactors) -> None:
        """Adds the candidate of a node's result, if the result can be partial (each rank holds one
        term)."""
        for sum_ in accumulators(op.node) if op.bodies else ():
            self._carry(op, sum_)
        if op.bodies or len([t for t in op.node.outputs if t.name in self.sharding.tensors]) != 1:
            return
        result = op.node.outputs[0]
        own, reduce = self.sharding.own_partial(op)
        best = self._passing(op, own, reduce)
        if best is None:
            if own:
                seconds = self._reduction(op, own, reduce)
                candidate = _Candidate(op.graph, own, reduce, 0.0, seconds, through=False)
                self.candidates[result.name] = candidate
            return
        before = sum(c.reduce for i in range(len(op.node.inputs)) if (c := self._operand(op, i)))
        reduced_first = before + (self._reduction(op, own, reduce) if own else 0.0)
        best.axes = own + best.passed
        reduced_here = best.keep + self._reduction(op, best.axes, best.op)
        best.through = reduced_here < reduced_first * 0.999
        best.reduce = min(reduced_here, reduced_first)
        if own and not best.through:
            best = _Candidate(op.graph, own, reduce, before, reduced_first, through=False)
        self.candidates[result.name] = best

    def _passing(self, op: OpFactors, own: Axes, reduce: ReduceOp) -> _Candidate | None:
        """Returns the cheapest candidate for a result whose operands pass the node as partial
        values (each rank holds one term); None if no operand may pass. If the node produces a
        partial sum itself (over the axes `own`), only sums may pass, and only if the rule has no
        additive operand (a bias, which one rank alone adds)."""
        once = any(i < len(op.node.inputs) and op.node.inputs[i].name for i in op.rule.additive)
        if own and (reduce != "sum" or once):
            return None
        offers = [self._through(op, group) for group in self._groups(op)]
        fitting = [o for o in offers if o and (not own or o.op == "sum")]
        return min(fitting, key=lambda c: c.keep, default=None)

    def _carry(self, op: OpFactors, carried: Accumulator) -> None:
        """Lets a loop carry a sum as a partial value (each rank holds one term): one reduction
        after the loop replaces a reduction in each iteration."""
        add = self.sharding.factors.op(carried.add.name)
        term = self._operand(add, carried.term)
        used = [a for over in self.sharding.op_axes(add) for a in over]
        factor_sharding = self.sharding.operand_sharding(op, op.outputs[carried.result])
        used += [a for over in factor_sharding.leaves for a in over]
        if term is None or term.op != "sum" or overlaps(term.axes, used):
            return
        if any(t.name not in self.sharding.tensors for t in carried.tensors(op.node)):
            return
        partial = (term.axes, term.op)
        result = op.node.outputs[carried.result]
        self._keep(self.sharding.factors.op(carried.add.inputs[carried.term].inputs[0].name), term)
        for i in (0, 1):
            self.decided.operands[add.node.name, i] = partial
        self.decided.operands[op.node.name, carried.operand] = partial
        self.decided.results[carried.back.name] = partial
        for tensor in (carried.given, carried.back):
            self.decided.results[f"{op.node.name}::{tensor.name}"] = partial
        self.decided.results[result.name] = partial
        size = mean_bytes(result, factor_sharding, self.sharding)
        seconds = self.sharding.costs.collective("AllReduce", term.axes, size)
        candidate = _Candidate(op.graph, term.axes, term.op, 0.0, seconds, through=False)
        self.candidates[result.name] = candidate

    def _groups(self, op: OpFactors) -> list[tuple[frozenset[int], bool]]:
        """Returns the groups of operands that may stay partial (each rank holds one term) together,
        each with True if sums pass the node, False if maxima and minima do."""
        linear = [(group, True) for group in op.rule.linear]
        return linear + [(frozenset({i}), False) for i in op.rule.monotone]

    def _through(self, op: OpFactors, entry: tuple[frozenset[int], bool]) -> _Candidate | None:
        """Returns the candidate for a result if those operands of a group stay partial (each rank
        holds one term) for which this is cheaper. The group's other operands are reduced, or masked
        so that one rank alone has them. None if no operand stays partial. `entry` is one of
        `_groups`."""
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
            operand = self._operand(op, i)
            select = self._select(op, i) if i in group else 0.0
            if i in offered and offered[i].keep <= offered[i].reduce + select:
                seconds += offered[i].keep
                carried.add(i)
            else:
                seconds += select + (operand.reduce if operand else 0.0)
        if not carried:
            return None
        return _Candidate(
            op.graph, axes, reduce, seconds, 0.0, False, group, frozenset(carried), axes
        )

    def _operand(self, op: OpFactors, index: int) -> _Candidate | None:
        """Returns the candidate of an operand; None if the operand cannot be partial (each rank
        holds one term), or must be reduced because it is a graph output, its layout is requested,
        or several nodes or a body read it."""
        tensor = op.node.inputs[index]
        candidate = self.candidates.get(tensor.name)
        if candidate is None or tensor.name in self.outputs or tensor.name in self.sharding.pinned:
            return None
        if candidate.graph is not op.graph or len(tensor.outputs) != 1:
            return None
        if sum(t is tensor for t in op.node.inputs) != 1:
            return None
        return candidate

    def _select(self, op: OpFactors, index: int) -> float:
        """Returns the seconds of masking an operand: ranks other than the first replace it by
        zeros."""
        tensor = op.node.inputs[index]
        if isinstance(tensor, gs.Constant) or not tensor.name:
            return 0.0
        factor_sharding = self.sharding.operand_sharding(op, op.inputs[index])
        size = mean_bytes(tensor, factor_sharding, self.sharding)
        return self.sharding.costs.local("Select", size)

    def _reduction(self, op: OpFactors, axes: Axes, reduce: ReduceOp) -> float:
        """Returns the seconds of an all-reduce of a node's result over `axes`."""
        tensor = op.node.outputs[0]
        factor_sharding = self.sharding.operand_sharding(op, op.outputs[0])
        size = mean_bytes(tensor, factor_sharding, self.sharding)
        return self.sharding.costs.collective("AllReduce", axes, size)

    def _keep(self, op: OpFactors, candidate: _Candidate) -> None:
        """Records that a node's result stays partial (each rank holds one term); also, recursively,
        the operands that then must stay partial."""
        if not candidate.group:
            return
        self.decided.results[op.node.outputs[0].name] = (candidate.passed, candidate.op)
        for i in candidate.group:
            if op.node.inputs[i].name:
                self.decided.operands[op.node.name, i] = (candidate.passed, candidate.op)
            if i not in candidate.carried:
                continue
            producer = op.node.inputs[i].inputs[0]
            inner = self.candidates[op.node.inputs[i].name]
            self._keep(self.sharding.factors.op(producer.name), inner)
