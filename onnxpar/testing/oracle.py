"""Tests sharding rules: runs one node unsplit and on simulated ranks, and compares the results.

The oracle splits every factor that the rule allows to split, over 2 and 3 ranks, into even and
uneven shards, and every pair of factors at once. It shards the operands by the layouts that the
rule implies, rewrites the node by `localize_node`, and runs each rank's node in onnxruntime. Each
shard of a result must equal the same shard of the unsplit result; partial results must reduce to
the unsplit result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, combinations, product
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.graph.attribute_weights import expose
from onnxpar.graph.collectives import DOMAIN
from onnxpar.graph.per_rank import PerRank
from onnxpar.graph.subgraphs import all_nodes
from onnxpar.layout.layout import Layout, dim_axes, nested_parts
from onnxpar.layout.mesh import Axes, Mesh
from onnxpar.lowering.localize import localize_node
from onnxpar.lowering.rank_view import NodeView
from onnxpar.rules.notation import Var
from onnxpar.sharding.analysis import analyse
from onnxpar.sharding.factors import OpFactors, TensorFactors, with_axes
from onnxpar.sharding.graph_factors import GraphFactors
from onnxpar.testing.case import Case, Cut, compiled, has_fixed_sizes
from onnxpar.testing.simulate import run_ranks

TOLERANCE = {"float16": 4e-3, "float32": 2e-5, "float64": 1e-12}
"""The largest error relative to the largest value, by dtype; values of other dtypes must be
equal."""


@dataclass(frozen=True)
class Split:
    """One way to split a node: for some of its leaves (parts of dimensions), by index, the mesh
    axes and the sizes of the shards (None: as equal as possible)."""

    mesh: Mesh
    leaves: Mapping[int, tuple[Axes, tuple[int, ...] | None]]


class Oracle:
    """Tests the sharding rule of a case.

    cut    another op that divides one of the dimensions, if given
    whole  the unsplit results
    op     the node's factors: its rule, over leaves (parts of dimensions) that can be split
    """

    def __init__(self, case: Case, cut: Cut | None = None) -> None:
        self.case = case
        self.cut = cut
        self.feeds = case.values
        self.program = compiled(case.graph())
        self.whole = self.program.run(case.values)
        self.graph, self.factors = self._analysed()
        self.op = self.factors.ops[0]

    def _analysed(self) -> tuple[gs.Graph, GraphFactors]:
        """Returns a new graph of the case, and its factors. The op of `cut` takes part in the
        analysis, and is then removed."""
        graph = self.case.graph(self.whole)
        expose(graph)
        if self.cut is None:
            return graph, analyse(graph)
        self.cut.apply(graph)
        factors = analyse(graph)
        graph.nodes.pop().inputs.clear()
        return graph, factors

    def splits(self) -> Iterator[Split]:
        """Yields the splits to test: each leaf (a part of a dimension) over 2 and 3 ranks, and each
        pair of leaves over 2 x 2 ranks.

        If another op divides a dimension (`cut`), only leaves of this dimension are split, over 2
        ranks; segments also all over the same axis.
        """
        tied = {i for group in self.op.co_sharded for i in group}
        leaves = [
            (i, leaf)
            for i, leaf in enumerate(self.op.leaves)
            if i not in tied and (self.cut is None or leaf.factor == self.cut.factor)
        ]
        yield from self._tied_splits() if self.cut is None else ()
        yield from self._ring_splits() if self.cut is None else ()
        for i, leaf in leaves:
            for n in range(2, 3 + (self.cut is None)):
                mesh = Mesh.of([("x", n)])
                by_hand = (leaf.size - n + 1, *[1] * (n - 1))
                default = nested_parts(leaf.size, (n,))
                one_empty = (0, *nested_parts(leaf.size, (n - 1,)))
                kinds = {default, by_hand, default[::-1]} if leaf.size >= n else {default}
                for parts in sorted(kinds | {one_empty, one_empty[::-1]}):
                    yield Split(mesh, {i: ((mesh.axis("x"),), None if parts == default else parts)})
        mesh = Mesh.parse("x=2,y=2")
        if self.cut and self.cut.kind == "concat":
            yield Split(mesh, {i: ((mesh.axis("y"),), None) for i, _ in leaves})
        for (i, _), (j, _) in combinations(leaves, 2):
            reductions = {self.op.reduction(i), self.op.reduction(j)} - {None}
            if len(reductions) < 2:
                yield from self._pairs(mesh, i, j)

    def _pairs(self, mesh: Mesh, i: int, j: int) -> Iterator[Split]:
        """Yields splits of the leaves (parts of dimensions) i and j over two axes: with elements on
        every rank, and with empty shards of one leaf on some ranks."""
        axes = {i: (mesh.axis("x"),), j: (mesh.axis("y"),)}
        yield Split(mesh, {k: (over, None) for k, over in axes.items()})
        for empty in (i, j):
            size = self.op.leaves[empty].size
            mesh = Mesh.of(("xy"[k == j], 3 if size == 2 and k == empty else 2) for k in (i, j))
            axes = {i: (mesh.axis("x"),), j: (mesh.axis("y"),)}
            none = None if size == 2 else (size, 0)
            yield Split(mesh, {k: (a, none if k == empty else None) for k, a in axes.items()})

    def _tied_splits(self) -> Iterator[Split]:
        """Yields splits of co-sharded leaves (parts of dimensions), which share axes but have
        different shard sizes; and, over 2 x 2 ranks, together with other leaves."""
        for group in self.op.co_sharded:
            for n in range(2, 5):
                mesh = Mesh.of([("x", n)])
                axes = (mesh.axis("x"),)
                yield Split(mesh, {i: (axes, None) for i in group})
                for j in group:
                    size = self.op.leaves[j].size
                    for by_hand in ((*[1] * (n - 1), size - n + 1), (0, *[size], *[0] * (n - 2))):
                        if min(by_hand) >= 0:
                            parts = {i: by_hand if i == j else None for i in group}
                            yield Split(mesh, {i: (axes, p) for i, p in parts.items()})
        mesh = Mesh.parse("x=2,y=2")
        tied = {i for group in self.op.co_sharded for i in group}
        others = [(i,) for i in range(len(self.op.leaves)) if i not in tied]
        for a, b in [*combinations(self.op.co_sharded, 2), *product(self.op.co_sharded, others)]:
            x, y = ((mesh.axis(name),) for name in "xy")
            yield Split(mesh, {i: (x if i in a else y, None) for i in (*a, *b)})

    def _ring_splits(self) -> Iterator[Split]:
        """Yields splits of both leaves (parts of dimensions) of a ring over one axis: evenly, by
        hand, and with empty shards; and together with other leaves."""
        for pair in self.op.rings:
            for n in range(2, 5):
                mesh = Mesh.of([("x", n)])
                axes = (mesh.axis("x"),)
                yield Split(mesh, dict.fromkeys(pair, (axes, None)))
                for one in pair:
                    size = self.op.leaves[one].size
                    for by_hand in ((*[1] * (n - 1), size - n + 1), (0, *[size], *[0] * (n - 2))):
                        if min(by_hand) >= 0:
                            parts = {i: by_hand if i == one else None for i in pair}
                            yield Split(mesh, {i: (axes, p) for i, p in parts.items()})
            mesh = Mesh.parse("x=2,y=2")
            x, y = ((mesh.axis(name),) for name in "xy")
            for other in {*range(len(self.op.leaves))} - {*pair}:
                yield Split(mesh, {**dict.fromkeys(pair, (x, None)), other: (y, None)})

    def cuts(self) -> Iterator[Cut]:
        """Yields cuts to test, into two segments and into a product, of each dimension that is a
        single factor which may be split."""
        node, rule = self.op.node, self.op.rule
        operands = zip(node.inputs, rule.inputs, strict=False)
        for tensor, spec in chain(operands, zip(node.outputs, rule.outputs, strict=False)):
            for dim, expr in enumerate(spec or ()):
                size = tensor.shape[dim]
                if isinstance(expr, Var) and expr.name not in self.op.whole and size >= 4:
                    segments = (size // 2, size - size // 2)
                    yield Cut(expr.name, tensor.name, dim, segments, "concat")
                    if size % 2 == 0:
                        yield Cut(expr.name, tensor.name, dim, (2, size // 2), "product")

    def wrong_while_open(self, split: Split) -> str | None:
        """Like `wrong`, with the node lowered as if the sizes of all its leaves (parts of
        dimensions) were open (unknown until a run)."""
        return self.wrong(split, frozenset(leaf.atom for leaf in self.op.leaves))

    def wrong(self, split: Split, open_atoms: frozenset[int] = frozenset()) -> str | None:
        """Tests a split on simulated ranks. Returns the first error; None if every rank's shards
        are right, or if the node could not be split like this. `open_atoms` are atoms (parts of
        dimensions) whose size counts as open."""
        graph, factors = self._analysed()
        op = factors.ops[0]
        layouts = self._layouts(op, split)
        for name, layout in layouts.items():
            over = [axis for dim in layout.dims for axis in dim_axes(dim)]
            if len(set(over)) < len(over):
                return f"{self.case.op} [{op.rule.text()}] splits {name} over one axis twice"
        if NodeView.of(op, layouts, split.mesh).breach(op.rule):
            return None
        per_rank = PerRank()
        localize_node(graph, op, layouts, split.mesh, per_rank, open_atoms)
        parts = self._run_ranks(graph, layouts, split.mesh, per_rank)
        for i, expected in enumerate(self.whole):
            layout = layouts.get(f"y{i}") or Layout.whole(expected.shape)
            problem = compare_parts(layout, expected, [p[i] for p in parts], split.mesh)
            if problem:
                where = ", ".join(
                    f"{op.leaves[k].factor}: {v[1] or 'even'}" for k, v in split.leaves.items()
                )
                cut = f", {self.cut}" if self.cut else ""
                return (
                    f"{self.case.op} [{op.rule.text()}] over {split.mesh}, {where}{cut}: {problem}"
                )
        return None

    def _layouts(self, op: OpFactors, split: Split) -> dict[str, Layout]:
        """Returns the layouts of operands and results, by name, if the node's leaves (parts of
        dimensions) are split like this."""
        own: Axes = ()
        reduce: Any = "sum"
        for leaf, (axes, _) in split.leaves.items():
            if op.reduction(leaf):
                own = tuple(dict.fromkeys(own + axes))
                reduce = op.reduction(leaf)
        layouts = {}
        count = len(op.node.inputs)
        for i, (tensor, links) in enumerate(op.operands()):
            if tensor.name not in self.factors.tensors:
                continue
            given = iter([split.leaves.get(-1 if k is None else k, ((), None)) for k in links])
            tree: TensorFactors = self.factors.tensors[tensor.name]
            dims = tuple(with_axes(dim, given) for dim in tree.dims)
            partial = own if i >= count or i in op.rule.additive else ()
            layouts[tensor.name] = Layout(dims, partial, reduce)
        return layouts

    def _run_ranks(
        self, graph: gs.Graph, layouts: Mapping[str, Layout], mesh: Mesh, per_rank: PerRank
    ) -> list[list[Array]]:
        """Runs the localized node on every rank; returns each rank's shards of the results."""
        feeds = [
            {
                name: layouts[name].take(value, mesh, rank) if name in layouts else value
                for name, value in self.feeds.items()
            }
            for rank in range(mesh.size)
        ]
        if any(
            node.domain == DOMAIN or "seed" in node.attrs or has_fixed_sizes(node)
            for node in all_nodes(graph)
        ):
            return run_ranks(graph, feeds, per_rank)
        results = []
        program = compiled(graph)
        for rank, own in enumerate(feeds):
            own |= {name: value(rank) for name, value in per_rank.constants.items()}
            for node in graph.nodes:
                for (name, key), value in per_rank.attributes.items():
                    if name == node.name:
                        node.attrs[key] = value(rank)
            if per_rank.attributes:
                program = compiled(graph)
            results.append(program.run({k: v for k, v in own.items() if k in program.operands}))
        return results


def compare_parts(layout: Layout, expected: Array, parts: list[Array], mesh: Mesh) -> str | None:
    """Compares the ranks' shards `parts` of a result with the same shards of the unsplit result
    `expected`. Returns the first error; None if there is none."""
    for rank, part in enumerate(parts):
        if part.shape != layout.local_shape(mesh, rank):
            return f"rank {rank} computes {part.shape}, not {layout.local_shape(mesh, rank)}"
        if not layout.partial and not close(part, layout.take(expected, mesh, rank), expected):
            return f"rank {rank} computes values that differ from {layout.text(mesh)} of the whole"
    if layout.partial and not close(layout.assemble(parts, mesh), expected):
        return f"{layout.text(mesh)} does not reduce to the whole"
    return None


def close(
    have: Array, want: Array, scale: Array | None = None, tolerance: float | None = None
) -> bool:
    """True if two arrays agree up to rounding. `tolerance` (by default, that of the dtype) is
    relative to the largest value of `scale`, by default of `want`."""
    if have.shape != want.shape or have.dtype != want.dtype:
        return False
    if tolerance is None:
        tolerance = TOLERANCE.get(str(want.dtype), 0.0)
    if not np.issubdtype(want.dtype, np.floating) or not want.size:
        return bool((have == want).all())
    scale = want if scale is None else scale
    finite = np.isfinite(want)
    largest = float(np.abs(scale[np.isfinite(scale)]).max(initial=1e-3))
    same = np.array_equal(have[~finite], want[~finite], equal_nan=True)
    return same and bool(np.allclose(have[finite], want[finite], rtol=0, atol=tolerance * largest))
