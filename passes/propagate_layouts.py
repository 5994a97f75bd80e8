"""propagate-layouts: what is annotated spreads along factors until nothing changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import onnx_graphsurgeon as gs

from onnxpar.factors import OpFactors
from onnxpar.passes.pass_ import Pass, PassContext
from onnxpar.sharding import Sharding


@dataclass(frozen=True)
class PropagateLayouts(Pass):
    """Spread annotated layouts over the graph, forwards and backwards.

    Requires annotations (annotate-strategy), as axes on leaves of tensors and nodes, in order of
    priority. Ensures that every leaf reached has axes that its neighbours share, unless the axes
    are taken there. The model is OpenXLA Shardy's propagation; there are no partial dimensions to
    merge, since leaves are atoms.
    """

    name: ClassVar[str] = "propagate-layouts"

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        changed = False
        for seeds in ctx.seeds or [[]]:
            for seed in seeds:
                changed |= seed.apply(ctx.sharding)
            changed |= propagate(ctx.sharding)
        return changed


def propagate(sharding: Sharding, start: Iterable[OpFactors] | None = None) -> bool:
    """Runs to the fixpoint; returns whether anything was decided."""
    readers = _ops_by_tensor(sharding)
    todo = deque(_annotated(sharding) if start is None else start)
    queued = {op.node.name for op in todo}
    changed = False
    while todo:
        op = todo.popleft()
        queued.discard(op.node.name)
        for name in _spread(sharding, op):
            changed = True
            for other in readers[name]:
                if other.node.name not in queued:
                    queued.add(other.node.name)
                    todo.append(other)
    return changed


def _annotated(sharding: Sharding) -> Iterable[OpFactors]:
    """Nodes next to something decided: breadth-first from there, the nearest annotation wins."""
    for op in sharding.factors.ops:
        near = [sharding.ops[op.node.name]]
        near += [sharding.tensors.get(t.name, []) for t, _ in op.operands()]
        if any(axes for leaves in near for axes in leaves):
            yield op


def _spread(sharding: Sharding, op: OpFactors) -> set[str]:
    """Takes axes from the operands into the node, and gives them on; returns the changed
    tensors."""
    for tensor, links in op.operands():
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


def _ops_by_tensor(sharding: Sharding) -> dict[str, list[OpFactors]]:
    readers: dict[str, list[OpFactors]] = {name: [] for name in sharding.tensors}
    for op in sharding.factors.ops:
        for tensor, _ in op.operands():
            if tensor.name in readers and op not in readers[tensor.name][-1:]:
                readers[tensor.name].append(op)
    return readers
