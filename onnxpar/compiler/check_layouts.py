"""Checks the layouts of a graph from the rules alone: the type checker of sharded programs.

It shares no code with the passes that choose layouts: an error would have to be in both to stay
unnoticed. A failure is our own bug, hence an AssertionError that names the node and its layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_graphsurgeon as gs

from onnxpar.compiler.pass_ import PassContext
from onnxpar.graph.collectives import DOMAIN, FUSED_ELEMENTWISE
from onnxpar.graph.reshards import is_reshard, operands_of, reshard_of
from onnxpar.graph.subgraphs import all_nodes, bodies
from onnxpar.layout.layout import Concat, Dim, Factor, Layout, leaves
from onnxpar.layout.mesh import Axis, Mesh, merge_axes, parts_over
from onnxpar.sharding.accumulators import accumulators
from onnxpar.sharding.factors import OpFactors

Fail = Callable[[str], None]


def check_layouts(graph: gs.Graph, ctx: PassContext) -> None:
    """Checks that the layouts of the operands and results of every node satisfy its rule. Does
    nothing before insert-collectives.

    After order-collectives, also checks that the token passes through every collective in graph
    order.
    """
    if not ctx.layouts:
        return
    if not ctx.lowered.localized:
        for op in ctx.sharding.factors.ops:
            _verify_op(op, ctx)
        for node in all_nodes(graph):
            if is_reshard(node):
                _verify_reshard(node, ctx)
    if ctx.lowered.ordered:
        _verify_order(graph, None)


def _verify_op(op: OpFactors, ctx: PassContext) -> None:
    """Raises AssertionError unless the layouts of a node's operands and results satisfy its
    rule."""
    layouts = {t.name: ctx.layouts[t.name] for t, _ in op.operands() if t.name in ctx.layouts}

    def fail(what: str) -> None:
        mesh = ctx.sharding.mesh
        shown = ", ".join(f"{name} {layout.text(mesh)}" for name, layout in layouts.items())
        raise AssertionError(f"{op.node.op} '{op.node.name}': {what}; {op.rule.text()}; {shown}")

    leaf_axes: dict[int, tuple[Axis, ...]] = {}
    for tensor, links in op.operands():
        if tensor.name not in layouts:
            continue
        axes = [
            merge_axes(f.axes) for d in layouts[tensor.name].dims for f in leaves(d) if f.size > 1
        ]
        if len(axes) != len(links):
            fail(f"{tensor.name} has {len(axes)} factors, the node sees {len(links)}")
        for over, link in zip(axes, links, strict=True):
            if link is None and over:
                fail(f"{tensor.name} is split where the node needs it whole")
            if link is not None and leaf_axes.setdefault(link, over) != over:
                fail(
                    f"{tensor.name} splits {op.leaves[link].factor} differently from its neighbours"
                )
    for group in op.co_sharded:
        if len({leaf_axes.get(i, ()) for i in group}) > 1:
            fail(f"{' and '.join(op.leaves[i].factor for i in group)} are split differently")
    for i, j in op.rings:
        first, second = ({*_pieces(leaf_axes.get(leaf, ()))} for leaf in (i, j))
        if first & second and first != second:
            fail(f"only some axes of the ring of {op.leaves[j].factor} split {op.leaves[i].factor}")

    def of(name: str) -> list[tuple[Axis, ...]]:
        return [leaf_axes.get(i, ()) for i, leaf in enumerate(op.leaves) if leaf.factor == name]

    for factor in op.rule.communicating:
        if not op.rule.may_overlap(factor, of) and not _every_segment(op, factor, leaf_axes):
            fail(f"only some segments of {factor} are split")
    carried = _carried(op, layouts, fail)
    for tensor in [t for body in op.bodies for t in (*body.graph.inputs, *body.graph.outputs)]:
        if tensor.name in layouts and layouts[tensor.name].partial and tensor.name not in carried:
            fail(f"{tensor.name} is partial where it enters or leaves a body")
    layouts = {name: layout for name, layout in layouts.items() if name not in carried}
    pending = _pending(op, leaf_axes, layouts, fail)
    for tensor in op.node.outputs:
        layout = layouts.get(tensor.name)
        if layout and {*_pieces(layout.partial)} != {*_pieces(pending[0])}:
            fail(f"{tensor.name} should be partial over {pending[0]}")
        if layout and pending[0] and layout.reduce != pending[1]:
            fail(f"{tensor.name} should be partial by {pending[1]}")


def _carried(op: OpFactors, layouts: dict[str, Layout], fail: Fail) -> set[str]:
    """Returns the names of tensors that hold partial sums which a loop passes from iteration to
    iteration, to be reduced after the loop."""
    carried: set[str] = set()
    for sum_ in accumulators(op.node) if op.bodies else ():
        names = [t.name for t in sum_.tensors(op.node)]
        over = {(frozenset(_pieces(x.partial)), x.reduce) for n in names if (x := layouts.get(n))}
        if any(axes for axes, _ in over):
            if len(over) > 1 or next(iter(over))[1] != "sum":
                fail(f"{names[-1]} is carried through the loop with sums over different axes")
            carried.update(names)
    return carried


_Piece = tuple[str, int]


def _pieces(axes: Sequence[Axis]) -> list[_Piece]:
    """Decomposes axes into sub-axes of prime size, as (name, position), so that tp=4 equals
    tp:(1)2, tp:(2)2."""
    out = []
    for axis in axes:
        at, rest, prime = axis.pre, axis.size, 2
        while rest > 1:
            while rest % prime == 0:
                out.append((axis.name, at * prime))
                at, rest = at * prime, rest // prime
            prime += 1
    return out


def _pending(
    op: OpFactors, leaf_axes: dict[int, tuple[Axis, ...]], layouts: dict[str, Layout], fail: Fail
) -> tuple[tuple[Axis, ...], str]:
    """Returns (axes, reduction) by which the rule leaves the results of a node partial, for
    operands with these layouts.

    leaf_axes  the axes that split each factor occurrence of the node, by number
    fail       reports an inconsistency
    """
    own_axes: tuple[Axis, ...] = ()
    reduce = "sum"
    for leaf, axes in leaf_axes.items():
        kind = op.reduction(leaf)
        if axes and kind:
            if not set(axes) <= set(own_axes):
                own_axes += axes
            reduce = kind
            if not _every_segment(op, op.leaves[leaf].factor, leaf_axes):
                fail(f"only some segments of {op.leaves[leaf].factor} are split")
    carried = {
        i: layouts[t.name]
        for i, t in enumerate(op.node.inputs)
        if t.name in layouts and layouts[t.name].partial
    }
    present = {i for i, t in enumerate(op.node.inputs) if t.name}
    once = {i for i in op.rule.additive if i in present} if own_axes else set()
    for i in once:
        if i not in carried:
            fail(f"operand {i} must count once")
    passed = {i: layout for i, layout in carried.items() if i not in once}
    if own_axes and (not passed or once or reduce != "sum"):
        if passed:
            fail(f"operand {min(passed)} must be reduced first")
        return own_axes, reduce
    if not passed:
        return (), "sum"
    kinds = {(frozenset(_pieces(x.partial)), x.reduce) for x in passed.values()}
    if len(kinds) > 1:
        fail("the operands are partial by different reductions")
    first = next(iter(passed.values()))
    if {*_pieces(own_axes)} & {*_pieces(first.partial)} or (own_axes and first.reduce != "sum"):
        fail("the operands are partial over the axes of the node's own sum, or not by a sum")
    groups = [g & present for g in op.rule.linear] if first.reduce == "sum" else []
    groups += [frozenset({i}) for i in op.rule.monotone] if first.reduce in ("max", "min") else []
    if set(passed) not in [set(g) for g in groups]:
        fail(f"a partial {first.reduce} does not pass through operands {sorted(passed)}")
    return own_axes + first.partial, first.reduce


def _every_segment(op: OpFactors, factor: str, leaf_axes: dict[int, tuple[Axis, ...]]) -> bool:
    """True if all segments of a factor (q, k and v of a fused dimension) are split over the same
    axes."""
    axes = iter([leaf_axes.get(i, ()) for i, leaf in enumerate(op.leaves) if leaf.factor == factor])

    def cover(dim: Dim) -> frozenset[Axis] | None:
        if isinstance(dim, Factor):
            return frozenset(next(axes, ())) if dim.size > 1 else frozenset()
        parts = [cover(c) for c in dim.children]
        if None in parts:
            return None
        if isinstance(dim, Concat) and len({f for f in parts if f is not None}) > 1:
            return None
        return frozenset(a for f in parts if f is not None for a in f)

    return cover(op.trees[factor]) is not None


_CHANGES: dict[str, tuple[set[int], int]] = {
    "AllReduce": (set(), -1),
    "ReduceScatter": ({1}, -1),
    "AllGather": ({-1}, 0),
    "LocalSlice": ({1}, 0),
    "AllToAll": ({1, -1}, 0),
    "CollectivePermute": ({1, -1}, 0),
    "Select": (set(), 1),
    "Broadcast": (set(), 0),
}
"""The changes that each kind of reshard may make: the axes that it adds to (1) or removes from (-1)
the dimensions of its tensor, and its effect on the partial axes (0: none).

The table of kinds (`graph/collectives.py`) says this too, for the passes. The check does not read
it: an error in the table would then be in the check as well, which would prove nothing.
"""


def _verify_reshard(node: gs.Node, ctx: PassContext) -> None:
    for (source, before, after), result in zip(operands_of(node), node.outputs, strict=True):
        assert ctx.layouts[source.name] == before, node.name
        assert ctx.layouts[result.name] == after, node.name
        _verify_step(node, before, after, ctx.sharding.mesh)


def _verify_step(node: gs.Node, before: Layout, after: Layout, mesh: Mesh) -> None:
    """Raises AssertionError unless a reshard step of this kind may turn the layout `before` into
    `after`."""
    over = set(_pieces(reshard_of(node).axes))
    if node.op == "CollectivePermute":
        return _verify_permute(node, before, after, mesh)
    factors, pending = _CHANGES[node.op]
    pairs = [
        ({*_pieces(f.axes)}, {*_pieces(g.axes)})
        for d, e in zip(before.dims, after.dims, strict=True)
        for f, g in zip(leaves(d), leaves(e), strict=True)
    ]
    changes = {_change(old, new, over) for old, new in pairs if old != new}
    partial = ({*_pieces(before.partial)}, {*_pieces(after.partial)})
    is_right = changes == factors and (_change(*partial, over) if pending else 0) == pending
    assert is_right and (pending or partial[0] == partial[1]), (
        f"{node.op} '{node.name}': {before} -> {after} over {over}"
    )


def _verify_permute(node: gs.Node, before: Layout, after: Layout, mesh: Mesh) -> None:
    """Checks that each group of ranks holds the same shards before and after a CollectivePermute,
    maybe on other ranks."""

    def shards(layout: Layout, group: Sequence[int]) -> list[tuple[object, ...]]:
        all_leaves = [leaf for dim in layout.dims for leaf in leaves(dim)]
        return sorted(
            (*(leaf.part(mesh, rank) for leaf in all_leaves), mesh.coordinate(layout.partial, rank))
            for rank in group
        )

    groups = {mesh.group(reshard_of(node).axes, rank) for rank in range(mesh.size)}
    terms = [(parts_over(layout.partial), layout.reduce) for layout in (before, after)]
    assert terms[0] == terms[1] and all(
        shards(before, group) == shards(after, group) for group in groups
    ), f"{node.op} '{node.name}': {before} -> {after} over {reshard_of(node).axes}"


def _change(old: set[_Piece], new: set[_Piece], over: set[_Piece]) -> int | None:
    """Returns 1 if the step adds all axes `over` to `old`, -1 if it removes all of them, None for
    any other change."""
    if old.isdisjoint(over) and new == old | over:
        return 1
    return -1 if over <= old and new == old - over else None


def _verify_order(graph: gs.Graph, token: gs.Tensor | None) -> gs.Tensor | None:
    """Checks that the token (an empty tensor that fixes the order) passes through all collectives
    in graph order; returns the last one. `token` is the last one so far; None before the first
    collective."""
    for node in graph.nodes:
        if node.op == "Gate" and (token is None or node.inputs[-1] is not token):
            continue  # the gate waits for another gate
        if _has_token(node) and node.inputs:
            assert token is None or node.inputs[-1] is token, f"'{node.name}' is out of order"
            token = node.outputs[-1]
        elif any(_has_token(n) for body in bodies(node) for n in all_nodes(body)):
            token = _verify_bodies(node, token)
    return token


def _has_token(node: gs.Node) -> bool:
    """True for the plugin's ops that communicate, and so take and return a token; fused elementwise
    ops do not."""
    return bool(node.domain == DOMAIN and node.op != FUSED_ELEMENTWISE)


def _verify_bodies(node: gs.Node, token: gs.Tensor | None) -> gs.Tensor:
    """Checks that each body of a loop or branch begins with the token that the node reads, and ends
    with the one that the node returns; returns the latter."""
    if node.op == "If":
        for branch in bodies(node):
            last, result = _verify_order(branch, token), branch.outputs[-1]
            maker = result.inputs[0]
            is_copy = maker.op == "Identity" and (token is None or maker.inputs[0] is token)
            assert result is last or is_copy, (
                f"a branch of '{node.name}' does not pass the token on"
            )
        return node.outputs[-1]
    (body,) = bodies(node)
    first, back = (2, 1) if node.op == "Loop" else (0, 0)
    at = len(body.inputs) - first - node.attrs.get("num_scan_inputs", 0) - 1
    begins = token is None or node.inputs[first + at] is token
    last = _verify_order(body, body.inputs[first + at])
    ends = body.outputs[back + at] is last
    assert begins and ends, f"'{node.name}' does not carry the token"
    return node.outputs[at]
