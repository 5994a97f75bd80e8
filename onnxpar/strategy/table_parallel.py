"""The preset table-parallel: each embedding table is whole on one rank, and the batch is split over
all ranks.

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems"
(2019): each rank looks up its own tables for the whole batch, and one all-to-all gives each rank
the rows of its samples. Gradients travel the same way back. TorchRec calls this table-wise
sharding.

A table on one rank is split by its columns over an axis with a coordinate (`at`): the rank at this
coordinate has all columns. The other ranks run the same nodes on tensors without columns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.graph.interchange import is_weight
from onnxpar.graph.subgraphs import constants
from onnxpar.graph.tensors import numpy_dtype, shape_bytes
from onnxpar.graph.training_spec import Step
from onnxpar.layout.mesh import Axes, Mesh
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.state import ShardingState
from onnxpar.strategy.contraction import is_contraction
from onnxpar.strategy.recurrences import MOVES
from onnxpar.strategy.region import Border, Region, border_after, border_before, is_constant

TABLES = "table-parallel"
_COPIES = ("Cast", "Identity")


@dataclass(frozen=True)
class Table:
    """An embedding table, from which nodes look up rows.

    leaf     the leaf (a part of a dimension) of its columns
    bytes    bytes of the table
    rows     number of rows that a run looks up
    lookups  the nodes that look up rows
    """

    name: str
    leaf: int
    bytes: int
    rows: int
    lookups: tuple[OpFactors, ...]


@dataclass(frozen=True)
class HoldTable:
    """The annotation that puts a table, and the tensors that nodes compute from its rows alone, on
    one rank (or on several ranks, if the mesh has other axes).

    leaf     the leaf (a part of a dimension) of the table's columns
    axes     axes with the coordinates (`at`) of the rank that holds the leaf
    borders  the tensors from which on the batch is split instead, each with its leaf of columns
    """

    table: str
    leaf: int
    axes: Axes
    borders: tuple[Border, ...]

    def apply(self, sharding: ShardingState) -> bool:
        """Puts the leaves (parts of dimensions) of columns of all nodes and tensors up to the
        borders on the rank. False if the table is split already."""
        for name, leaf in self.borders:
            if sharding.tensors[name][leaf] is None:
                sharding.tensors[name][leaf] = ()
        if not sharding.assign_tensor(self.table, self.leaf, self.axes):
            return False
        touching = Region.of(sharding.factors).touching
        todo = [(self.table, self.leaf)]
        while todo:
            name, leaf = todo.pop()
            for op, links in touching[name]:
                link = links[leaf]
                if link is not None and sharding.assign_op(op, link, self.axes):
                    todo += self._reached(op, link, sharding)
        return True

    def _reached(self, op: OpFactors, link: int, sharding: ShardingState) -> Iterator[Border]:
        """Puts the leaves (parts of dimensions) of a node's tensors that belong to its leaf `link`
        on the rank. Yields the tensors from which to go on. A constant that several nodes read
        stays whole, because nodes of other tables may be among them."""
        for tensor, links in op.operands():
            is_shared = is_constant(tensor) and len(tensor.outputs) > 1
            for leaf in (i for i, other in enumerate(links) if other == link):
                axes = () if is_shared else self.axes
                if sharding.assign_tensor(tensor.name, leaf, axes) and axes:
                    yield tensor.name, leaf


@dataclass(frozen=True)
class FeedWhole:
    """The annotation that gives every rank all elements of an input that only lookups read."""

    tensor: str

    def apply(self, sharding: ShardingState) -> bool:
        """Makes the undecided leaves (parts of dimensions) of the input whole."""
        sharding.close_tensor(self.tensor)
        return False


def table_annotations(
    graph: gs.Graph,
    sharding: ShardingState,
    axes: Axes,
    batch: Collection[int],
    step: Step | None = None,
) -> list[HoldTable | FeedWhole]:
    """Returns annotations that deal the tables out to the ranks along `axes`, balanced by bytes and
    by rows looked up. If there are more ranks than tables, some ranks have none.

    batch  the atoms (parts of dimensions) of samples
    step   the training step, if the model is one

    Errors: StrategyError if the model has no tables.
    """
    all_tables = list(tables(graph, sharding, batch))
    if not all_tables:
        raise StrategyError(
            f"{TABLES}: the model has no table whose rows are only looked up, by ids that each "
            "sample of the batch has; use data-parallel or tensor-parallel"
        )
    ranks = prod(axis.size for axis in axes)
    dealt = deal([(table.bytes, table.rows) for table in all_tables], ranks)
    region = Region.of(sharding.factors)
    annotations = [
        HoldTable(table.name, table.leaf, _at(axes, rank), _borders(table, region, step))
        for table, rank in zip(all_tables, dealt, strict=True)
    ]
    sketch = replace(sharding, tensors={n: [*a] for n, a in sharding.tensors.items()})
    sketch.ops = {name: [*a] for name, a in sharding.ops.items()}
    for annotation in annotations:
        annotation.apply(sketch)
    return [
        *annotations,
        *(FeedWhole(name) for name in _only_looked_up(graph, region, sketch, batch)),
    ]


def deal(shares: Sequence[tuple[float, float]], ranks: int) -> list[int]:
    """Returns a rank for each table, so that no rank has much more than the mean of either share:
    of bytes, or of rows looked up. The largest table comes first; each goes to the rank that has
    least after it. `shares` has (bytes, rows) of each table.

    >>> deal([(6, 1), (4, 1), (3, 1), (3, 1)], 2)
    [0, 1, 1, 0]
    """
    totals = [sum(column) or 1.0 for column in zip(*shares, strict=True)]
    parts = [tuple(s / t for s, t in zip(share, totals, strict=True)) for share in shares]
    loads = [(0.0, 0.0)] * ranks
    rank_of_table = [0] * len(shares)
    for i in sorted(range(len(parts)), key=lambda i: max(parts[i]), reverse=True):

        def after(rank: int, part: tuple[float, ...] = parts[i]) -> tuple[float, float]:
            added = (loads[rank][0] + part[0], loads[rank][1] + part[1])
            return max(added), sum(added)

        best = min(range(ranks), key=after)
        loads[best] = (loads[best][0] + parts[i][0], loads[best][1] + parts[i][1])
        rank_of_table[i] = best
    return rank_of_table


def tables(graph: gs.Graph, sharding: ShardingState, batch: Collection[int]) -> Iterator[Table]:
    """Yields the embedding tables of a graph: weights whose rows are looked up by ids that each
    sample of the batch has, and that no product reads. `batch` has the atoms (parts of dimensions)
    of samples."""
    region = Region.of(sharding.factors)
    for weight in [t for t in graph.inputs if is_weight(t)] + constants(graph):
        factors = sharding.factors.tensors.get(weight.name)
        if factors is None or len(factors.dims) < 2 or numpy_dtype(weight).kind != "f":
            continue
        lookups = list(_lookups(weight.name, region, batch))
        leaves = [
            (leaf.size, -i)
            for i, leaf in enumerate(factors.leaves)
            if factors.dim_of_leaf[i] and all(op.inputs[0][i] is not None for op in lookups)
        ]
        if lookups and leaves and not _is_multiplied(weight.name, region):
            rows = sum(prod(op.node.inputs[1].shape) for op in lookups)
            size = shape_bytes(weight, weight.shape)
            yield Table(weight.name, -max(leaves)[1], size, rows, tuple(lookups))


def _readers(name: str, region: Region, moves: Collection[str]) -> Iterator[OpFactors]:
    """Yields the nodes that read a tensor, directly or after ops of the types in `moves`."""
    for op, _ in region.touching[name]:
        if any(t.name == name for t in op.node.inputs):
            yield op
            if op.node.op in moves:
                yield from _readers(op.node.outputs[0].name, region, moves)


def _lookups(name: str, region: Region, batch: Collection[int]) -> Iterator[OpFactors]:
    """Yields the nodes that look up rows of the tensor `name` by ids that samples of the batch
    have."""
    for op in _readers(name, region, _COPIES):
        node = op.node
        if node.op == "Gather" and not node.attrs.get("axis", 0) and node.inputs[1].name != name:
            ids = region.tensors.get(node.inputs[1].name)
            if ids is not None and any(leaf.atom in batch for leaf in ids.leaves):
                yield op


def _is_multiplied(name: str, region: Region) -> bool:
    """True if a product reads the tensor `name`, directly or after nodes that copy or move it."""
    return any(is_contraction(op) for op in _readers(name, region, (*_COPIES, *MOVES)))


def _at(axes: Axes, rank: int) -> Axes:
    """Returns the axes with the coordinates (`at`) of a rank along them: rank 1 on (dp=2) gives
    dp@1."""
    mesh = Mesh(tuple((axis.name, axis.size) for axis in axes))
    return tuple(replace(axis, at=mesh.coordinate((axis,), rank)) for axis in axes)


def _borders(table: Table, region: Region, step: Step | None) -> tuple[Border, ...]:
    """Returns the smallest tensors between a table's lookups and the rest of the model, and between
    the rest of the model and the table's gradient, each with its leaf (a part of a dimension) of
    columns."""
    borders: list[Border] = []
    for op in table.lookups:
        link = op.inputs[0][table.leaf]
        assert link is not None
        leaf = op.outputs[0].index(link)
        borders.append(border_after((op.node.outputs[0].name, leaf), region))
    atom = region.tensors[table.name].leaves[table.leaf].atom
    gradients = () if step is None else (step.gradients, step.rows)
    for name in (g[table.name] for g in gradients if table.name in g):
        leaves = region.tensors[name].leaves if name in region.tensors else ()
        borders += [
            before
            for i, leaf in enumerate(leaves)
            if leaf.atom == atom
            for before in border_before((name, i), region)
        ]
    return tuple(dict.fromkeys(borders))


def _only_looked_up(
    graph: gs.Graph, region: Region, sketch: ShardingState, batch: Collection[int]
) -> Iterator[str]:
    """Yields the inputs with a batch, such as ids, that only nodes of tables read. `sketch` is a
    state in which the leaves (parts of dimensions) of tables are decided."""
    inside = {
        op.node.name
        for op in sketch.factors.ops
        if any(a.at is not None for axes in sketch.op_axes(op) for a in axes)
    }
    outputs = {t.name for t in graph.outputs}
    for tensor in graph.inputs:
        factors = region.tensors.get(tensor.name)
        if factors is None or is_weight(tensor):
            continue
        has_batch = any(leaf.atom in batch for leaf in factors.leaves)
        if has_batch and not _leaves_region(tensor.name, region, inside, outputs):
            yield tensor.name


def _leaves_region(
    name: str, region: Region, inside: Collection[str], outputs: Collection[str]
) -> bool:
    """True if an output of the graph depends on a tensor through a path of nodes that are not in
    `inside`."""
    seen: set[str] = set()
    todo = [name]
    while todo:
        at = todo.pop()
        if at in outputs:
            return True
        if at in seen:
            continue
        seen.add(at)
        for op, _ in region.touching[at]:
            if op.node.name not in inside and any(t.name == at for t in op.node.inputs):
                todo += [t.name for t in op.node.outputs]
    return False
