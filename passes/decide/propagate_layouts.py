"""propagate-layouts: spread annotations to neighbouring tensors and nodes until nothing changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import ClassVar

import onnx_graphsurgeon as gs

from onnxpar.compiler.pass_ import ANNOTATIONS, PROPAGATED, Pass, PassContext, Stage
from onnxpar.layout.mesh import Axes
from onnxpar.rules.notation import Cat, expr_vars
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.state import ShardingState


@dataclass(frozen=True)
class PropagateLayouts(Pass):
    """Spread annotated layouts over the graph, forwards and backwards.

    Requires annotations (annotate-strategy): axes for dimensions of tensors and of nodes, in order
    of priority. Ensures that a dimension and its neighbours are split over the same axes, unless
    a neighbour's tensor already uses the axes. This follows OpenXLA Shardy's propagation. Shardy
    can also split a part of a dimension; here each such part is a separate dimension, an atom.
    Where a node broadcasts an operand, its larger operands decide first, because they cost more to
    reshard.

    Example: shard(mesh="tp=2", strategy={"tensors": {"w": ["tp", None]}})

        product (float[4,6] x, float[6,8] w) => (float[4,8] y) { y = MatMul(x, w) }

    Before:

        mesh tp=2
        annotate w: [tp, -] {round=1}
        input  x: float32 4x6 [-, -]
        const  w: float32 6x8 [-, -]
        y: float32 4x8 [-, -] = MatMul(x, w)
        output y: float32 4x8 [-, -]

    After:

        mesh tp=2
        input  x: float32 4x6 [-, tp]
        const  w: float32 6x8 [tp, -]
        y: float32 4x8 [-, -] = MatMul(x, w)
        output y: float32 4x8 [-, -]
    """

    name: ClassVar[str] = "propagate-layouts"
    stage = Stage.DECIDE
    requires = (ANNOTATIONS,)
    ensures = (PROPAGATED,)

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        sharding = ctx.sharding
        readers = _ops_by_tensor(sharding)
        seen: dict[str, Decided] = {}
        changed = False
        for batch in ctx.annotations or [[]]:
            for annotation in batch:
                changed |= annotation.apply(sharding)
            changed |= propagate(sharding, _near(sharding, seen), readers)
            seen = _decided(sharding)
        return changed


Decided = tuple[Axes | None, ...]
"""The axes of each leaf of a tensor or node; None for a leaf that is open."""
Readers = dict[str, list[OpFactors]]
"""The nodes that read or compute a tensor, by its name."""


def propagate(sharding: ShardingState, start: Iterable[OpFactors], readers: Readers) -> bool:
    """Propagates axes from the nodes in `start` until nothing changes. True if a tensor got axes.

    If a node broadcasts small operands to the size of a large operand, propagation reads the small
    operands last: the labels of a loss follow its scores, because labels cost less to reshard.
    """
    small = {op.node.name: _small_operands(op) for op in sharding.factors.ops}
    todo, later = deque(start), deque[OpFactors]()
    queued = {op.node.name for op in todo}
    waiting: set[str] = set()
    changed = False
    while todo or later:
        is_last = not todo
        op = (todo or later).popleft()
        (waiting if is_last else queued).discard(op.node.name)
        if not is_last and small[op.node.name] and op.node.name not in waiting:
            waiting.add(op.node.name)
            later.append(op)
        for name in _spread(sharding, op, () if is_last else small[op.node.name]):
            changed = True
            for other in readers[name]:
                if other.node.name not in queued:
                    queued.add(other.node.name)
                    todo.append(other)
    return changed


def _decided(sharding: ShardingState) -> dict[str, Decided]:
    """Returns the axes of all leaves as decided so far, by name of the tensor, and by `NAME()` for
    nodes."""
    tensors = {name: tuple(axes) for name, axes in sharding.tensors.items()}
    return tensors | {f"{name}()": tuple(axes) for name, axes in sharding.ops.items()}


def _near(sharding: ShardingState, seen: dict[str, Decided]) -> Iterable[OpFactors]:
    """Yields the nodes that have, or whose tensors have, leaves (parts of dimensions) decided since
    `seen` (an earlier result of `_decided`). Propagation is breadth-first from these nodes, so the
    nearest annotation wins."""
    now = _decided(sharding)
    fresh = {name for name, axes in now.items() if any(axes) and seen.get(name) != axes}
    for op in sharding.factors.ops:
        names = [f"{op.node.name}()", *(t.name for t, _ in op.operands())]
        if not fresh.isdisjoint(names):
            yield op


def _spread(sharding: ShardingState, op: OpFactors, small: Collection[int]) -> set[str]:
    """Copies axes from operands to the node, and from the node to operands and results. Returns the
    names of the tensors that got axes. `small` has numbers of operands and results that give no
    axes."""
    for number, (tensor, links) in enumerate(op.operands()):
        if number in small:
            continue
        for axes, link in zip(sharding.tensors.get(tensor.name, ()), links, strict=True):
            if axes and link is not None:
                sharding.assign_op(op, link, axes)
    changed = set()
    for tensor, links in op.operands():
        for leaf, link in enumerate(links):
            axes = None if link is None else sharding.ops[op.node.name][link]
            if axes and sharding.assign_tensor(tensor.name, leaf, axes):
                changed.add(tensor.name)
    return changed


def _small_operands(op: OpFactors) -> frozenset[int]:
    """Returns the numbers of operands and results that lack a factor of the node, if another
    operand or result has all its factors; else none. In Add(x [4, 6], b [6]), this is operand 1."""
    absent = [None] * (len(op.node.inputs) - len(op.rule.inputs))
    specs = [*op.rule.inputs, *absent, *op.rule.outputs]
    if op.bodies or op.rule.reduce or any(isinstance(e, Cat) for spec in specs for e in spec or ()):
        return frozenset()
    factors = [{f for expr in spec or () for f in expr_vars(expr)} for spec in specs]
    most = max(map(len, factors), default=0)
    if most < len(op.rule.sizes):
        return frozenset()
    return frozenset(i for i, names in enumerate(factors) if 0 < len(names) < most)


def _ops_by_tensor(sharding: ShardingState) -> Readers:
    """Returns the nodes that read or compute each tensor, by its name."""
    readers: Readers = {name: [] for name in sharding.tensors}
    for op in sharding.factors.ops:
        for tensor, _ in op.operands():
            if tensor.name in readers and op not in readers[tensor.name][-1:]:
                readers[tensor.name].append(op)
    return readers
