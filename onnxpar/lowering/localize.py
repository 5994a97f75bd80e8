"""Rewrites a node of the global graph into the nodes that each rank runs.

The node gets the attributes and constants of a shard; its rule may replace the node by other nodes,
also by collectives. Values that differ by rank stay functions of the rank (`PerRank`) until the
pass split-ranks; values that all ranks share become ordinary constants and attributes at once. The
shapes of shards are those of `Layout.local_shape`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_graphsurgeon as gs

from onnxpar.graph.attribute_weights import conceal
from onnxpar.graph.per_rank import PerRank
from onnxpar.layout.layout import Layout
from onnxpar.layout.mesh import Mesh
from onnxpar.lowering.empty_shards import StandIns, factors_to_fill
from onnxpar.lowering.lowering_builder import (
    LoweringBuilder,
    note_stand_ins,
    rank_constant,
    set_attribute,
)
from onnxpar.lowering.rank_view import NodeView
from onnxpar.lowering.zero_sizes import expanded_zeros, keep_zeros
from onnxpar.sharding.factors import OpFactors


def localize_node(
    graph: gs.Graph,
    op: OpFactors,
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    per_rank: PerRank,
    open_atoms: Collection[int] = (),
) -> None:
    """Rewrites a node of the graph, in place, so that each rank runs it on its shards. A node
    without a split factor (index variable of its rule) stays as it is, if its op has a kernel.

    op          the node, with the factors of its rule
    layouts     the layouts of the node's operands and results, by tensor name
    per_rank    gets the constants and attributes that differ by rank
    open_atoms  numbers of the factors of the whole graph (atoms) whose sizes differ between runs
    """
    view = NodeView.of(op, layouts, mesh, open_atoms)
    if op.rule.ranks.has_kernel and not any(map(view.is_split, view.factors)):
        conceal([op.node])
        return
    breach = view.breach(op.rule)
    assert breach is None, f"{op.node.op} '{op.node.name}': {breach}"
    names = factors_to_fill(op.rule, view) | expanded_zeros(op, view)
    if names:
        view = _surround(graph, op, view, names, layouts, per_rank)
    if op.rule.ranks.lower and (
        not op.rule.ranks.has_kernel or any(map(view.is_split, op.rule.ranks.lowered))
    ):
        builder = LoweringBuilder(graph, view, per_rank)
        op.rule.ranks.lower(builder)
        builder.replace()
        return
    for key, function in op.rule.ranks.local.items():
        value, by_rank = view.value(function)
        if isinstance(key, str):
            set_attribute(op.node, key, value, by_rank, per_rank)
        elif value is not None:
            name = f"{op.node.name}::input{key}"
            while len(op.node.inputs) <= key:
                op.node.inputs.append(gs.Variable.empty())
            op.node.inputs[key] = rank_constant(name, value, by_rank, per_rank)
            note_stand_ins(name, view, per_rank)
    conceal([op.node])
    if op.node.op == "Reshape":
        keep_zeros(op, view)


def _surround(
    graph: gs.Graph,
    op: OpFactors,
    view: NodeView,
    names: Collection[str],
    layouts: Mapping[str, Layout],
    per_rank: PerRank,
) -> NodeView:
    """Adds nodes before a node that put an element, a stand-in, into empty shards of the factors
    `names`, and nodes after it that drop the results of stand-ins. Returns the node's view that
    counts stand-ins as elements."""
    filled = view.filled(op.rule, names)
    before, after = (
        LoweringBuilder(graph, seen, per_rank, prefix)
        for seen, prefix in ((filled, "fill"), (view, "drop"))
    )
    StandIns(op, names, before, after, layouts).surround()
    before.insert_before(op.node)
    after.insert_after(op.node)
    return filled
