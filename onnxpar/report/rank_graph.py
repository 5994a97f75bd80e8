"""The graph of each rank beside the model's, for the plan's page: which nodes ranks run for each
node of the model, with the shapes and ranges of the tensors that they hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.compiler.graph_text import attributes_text
from onnxpar.compiler.pass_ import PassContext
from onnxpar.compiler.plan import open_shape
from onnxpar.graph.origin import lowered_from
from onnxpar.graph.subgraphs import nodes_within
from onnxpar.layout.dims import Dim, runs
from onnxpar.layout.layout import Layout
from onnxpar.layout.mesh import Mesh
from onnxpar.report.plan_text import shape_text

MOST = 64
"""At most so many ranks are shown."""
SPANS = 4
"""At most so many ranges of a dimension are shown."""
Texts = tuple[str, ...]
"""A text for each rank, or a single one if it is equal for all."""


@dataclass(frozen=True)
class Part:
    """The part of a tensor that each rank holds.

    shapes  the shape of its shard
    spans   for an input or a stored tensor, the ranges of elements in each dimension: `[0:4, :]`
    layout  the tensor's layout, if it is split
    """

    name: str
    shapes: Texts
    spans: Texts
    layout: str


@dataclass(frozen=True)
class RankNode:
    """A node that every rank runs; `attributes` are in braces, and may differ between ranks."""

    name: str
    op: str
    operands: tuple[Part, ...]
    results: tuple[Part, ...]
    attributes: Texts


@dataclass(frozen=True)
class RankGraph:
    """The nodes that ranks run, in order, by the name of the model's node that they implement.
    `ranks` is the number of ranks shown."""

    ranks: int
    nodes: dict[str, list[RankNode]]


def rank_graph(ctx: PassContext) -> RankGraph:
    """Returns the lowered nodes of at most MOST ranks, by the model's node."""
    ranks = range(min(ctx.sharding.mesh.size, MOST))
    parts = _Parts(ctx, ranks)
    nodes: dict[str, list[RankNode]] = {}
    for graph in (ctx.model.graph, *ctx.lowered.programs.values()):
        for node in nodes_within(graph.nodes):
            varies = any((node.name, key) in ctx.lowered.per_rank.attributes for key in node.attrs)
            own = ranks if varies else ranks[:1]
            attributes = _alike(attributes_text(node, ctx, rank) for rank in own)
            operands, results = map(parts.of, (node.inputs, node.outputs))
            rank_node = RankNode(node.name, node.op, operands, results, attributes)
            nodes.setdefault(lowered_from(node)[0], []).append(rank_node)
    return RankGraph(len(ranks), nodes)


class _Parts:
    """Computes which parts of tensors ranks hold; once for each layout."""

    def __init__(self, ctx: PassContext, ranks: Iterable[int]) -> None:
        self._ctx, self._mesh, self._ranks = ctx, ctx.sharding.mesh, list(ranks)
        self._shapes: dict[Layout, Texts] = {}
        self._spans: dict[Dim, Texts] = {}
        self._fed = {t.name for t in ctx.model.graph.inputs}

    def of(self, tensors: Iterable[gs.Tensor]) -> tuple[Part, ...]:
        """Returns the parts of these tensors; tensors with open sizes have no shapes."""
        return tuple(self._part(tensor) for tensor in tensors if tensor.name)

    def _part(self, tensor: gs.Tensor) -> Part:
        """Returns what each rank holds of one tensor."""
        layout = self._ctx.layouts.get(tensor.name)
        is_stored = isinstance(tensor, gs.Constant)
        if self._ctx.model.sizes is not None and not is_stored:
            text = "" if layout is None else layout.text(self._mesh)
            return Part(tensor.name, ("",), ("",), text)
        if layout is None:
            return Part(tensor.name, (shape_text(tensor.shape),), ("",), "")
        if layout not in self._shapes:
            shapes = (layout.local_shape(self._mesh, rank) for rank in self._ranks)
            self._shapes[layout] = _alike(shape_text(open_shape(shape)) for shape in shapes)
        is_held = (is_stored or tensor.name in self._fed) and not layout.is_whole
        spans = self._held(layout) if is_held else ("",)
        return Part(tensor.name, self._shapes[layout], spans, layout.text(self._mesh))

    def _held(self, layout: Layout) -> Texts:
        """Returns which elements each rank holds, as Python slices: `[0:4, :]`."""
        for dim in layout.dims:
            if dim not in self._spans:
                self._spans[dim] = tuple(_span(dim, self._mesh, rank) for rank in self._ranks)
        dims = [self._spans[dim] for dim in layout.dims]
        return _alike(f"[{', '.join(each)}]" for each in zip(*dims, strict=True))


def _span(dim: Dim, mesh: Mesh, rank: int) -> str:
    spans = runs(dim, mesh, rank)
    if spans == [(0, dim.size)]:
        return ":"
    told = "+".join(f"{start}:{start + length}" for start, length in spans[:SPANS])
    return f"{told}+..." if len(spans) > SPANS else told or "0:0"


def _alike(texts: Iterable[str]) -> Texts:
    """Returns the texts; if all are equal, only one."""
    each = tuple(texts)
    return each[:1] if len(set(each)) == 1 else each
