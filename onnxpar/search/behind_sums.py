"""Splits the nodes behind sums over ranks where that is faster than to repeat them on every rank.

A preset splits products over mesh axes, whose ranks then add up a result. It leaves open what
follows: a residual, a normalization, casts, up to the next product. If each rank computes these for
tokens of its own, a reduce-scatter before them and an all-gather behind them replace the all-reduce
(Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022;
TokenWeave, 2025). The cost model says where that pays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import onnx_graphsurgeon as gs

from onnxpar.search.objective import LATENCY, Objective
from onnxpar.search.op_strategies import OpStrategy
from onnxpar.search.problem import Problem
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.state import ShardingState


@dataclass(frozen=True)
class SplitBehindSums:
    """Splits nodes that are not decided yet and lie behind or before sums over ranks, where the
    cost model says that it pays.

    states  the state pairs of the model, (input, output)
    goal    the objective of the search, e.g. "latency"
    """

    states: tuple[tuple[str, str], ...] = ()
    goal: str = LATENCY

    def apply(self, sharding: ShardingState) -> bool:
        """Decides by which axes these nodes split the indices of the sums' results: tokens and
        features. Returns True if a node is split. Activations stay whole where no such node reads
        them."""
        sketch = _settled(sharding)
        atoms = _summed_atoms(sketch)
        free = _undecided(sketch, atoms) if atoms else []
        if not free:
            return False
        chosen = self._solved(sketch, atoms, free)
        if not chosen:
            return False
        for op in free:
            for leaf, axes in enumerate(chosen[op.node.name].axes):
                sharding.fix(op, leaf, axes)
        return any(axes for op in free for axes in chosen[op.node.name].axes)

    def _solved(
        self, sketch: ShardingState, atoms: Collection[int], free: Sequence[OpFactors]
    ) -> dict[str, OpStrategy]:
        """Returns the fastest strategies of the nodes, by name. The nodes in `free` may be split
        along the `atoms` (indices such as tokens, which many tensors share); all other nodes keep
        their strategies. Empty if there is no solution. `sketch` is a copy of the sharding state,
        which this changes."""
        names = {op.node.name for op in free}
        others = [op for op in sketch.factors.ops if op.node.name not in names]
        decided = {op.node.name: OpStrategy(tuple(sketch.op_axes(op))) for op in others}
        for op in free:
            have = sketch.ops[op.node.name]
            for leaf, axes in enumerate(have):
                have[leaf] = None if axes is None and op.leaves[leaf].atom in atoms else axes or ()
        graph = _main_graph(sketch)
        kept = {result for _, result in self.states}  # these follow the inputs of their states
        for tensor in (*graph.inputs, *graph.outputs):
            if tensor.name not in kept and None not in sketch.tensors.get(tensor.name, [None]):
                sketch.pinned.add(tensor.name)
        problem = Problem(
            graph, sketch, self.states, objective=Objective(self.goal), decided=decided
        )
        return problem.solve().chosen


def _settled(sharding: ShardingState) -> ShardingState:
    """Returns a copy of the sharding state in which decided nodes have axes that ranks can have."""
    copy = replace(
        sharding,
        tensors={name: list(axes) for name, axes in sharding.tensors.items()},
        ops={name: list(axes) for name, axes in sharding.ops.items()},
        pinned=set(sharding.pinned),
    )
    copy.settle()
    return copy


def _summed_atoms(sharding: ShardingState) -> set[int]:
    """Returns the atoms (indices such as tokens, which many tensors share) of all results that
    ranks add up."""
    known = sharding.factors.tensors
    return {
        leaf.atom
        for op in sharding.factors.ops
        if sharding.own_partial(op)[0]
        for tensor in op.node.outputs
        if tensor.name in known
        for leaf in known[tensor.name].leaves
    }


def _undecided(sharding: ShardingState, atoms: Collection[int]) -> list[OpFactors]:
    """Returns the nodes of the main graph that no axis splits, that have one of the `atoms`
    (indices such as tokens), and that a chain of activations through such nodes connects with a sum
    over ranks."""
    graph = _main_graph(sharding)
    readers: dict[str, list[OpFactors]] = defaultdict(list)
    todo: list[str] = []
    for op in sharding.factors.ops:
        if sharding.own_partial(op)[0]:
            todo += [t.name for t in op.node.outputs]
        is_open = op.graph is graph and not op.bodies and not any(sharding.op_axes(op))
        if is_open and any(leaf.atom in atoms for leaf in op.leaves):
            for name in _activations(op):
                readers[name].append(op)
    reached: dict[str, OpFactors] = {}
    while todo:
        for op in readers.pop(todo.pop(), ()):
            if op.node.name not in reached:
                reached[op.node.name] = op
                todo += _activations(op)
    return list(reached.values())


def _activations(op: OpFactors) -> list[str]:
    """The names of a node's operands and results that other nodes compute."""
    tensors = (*op.node.inputs, *op.node.outputs)
    return [t.name for t in tensors if isinstance(t, gs.Variable) and t.name]


def _main_graph(sharding: ShardingState) -> gs.Graph:
    """The graph of the model, not the graph of a body of an If, Loop or Scan."""
    bodies = {id(body.graph) for op in sharding.factors.ops for body in op.bodies}
    return next(op.graph for op in sharding.factors.ops if id(op.graph) not in bodies)
