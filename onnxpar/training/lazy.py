"""Lazily trained tables: a step updates only the rows that it looks up, and their optimizer state.

The gradient of such a table is never built whole. It is a sum per distinct row: the indices of all
lookups are sorted, equal indices share a slot, and the gradients of the lookups are added up by
slot. The optimizer works on these rows. If a row is looked up several times, each of its copies has
the same new value, so the order in which they are written does not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.training.gradients.indexing import scatter_add, without_padding
from onnxpar.training.gradients.trained import Trained, matching
from onnxpar.training.gradients.value import Builder, Value
from onnxpar.training.sampled_classes import Sample

_CASTS = ("Cast", "Identity")


class Rows(Protocol):
    """The rows of a table that a step updates; a row may be there several times."""

    def values(self) -> Sequence[Value]:
        """Returns the tensors that identify these rows in the graph, such as their indices."""

    def read(self, table: Value) -> Value:
        """Returns the rows of `table` that the step updates. `table` is the parameter, or a state
        of the optimizer of the same shape."""

    def copies(self, gradient: Value) -> Value:
        """Returns the gradient of each row, from the gradient of the table as it is stored: by
        slot, for rows that are looked up."""

    def written(self, table: Value, rows: Value) -> Value:
        """Returns the table with these rows replaced by `rows`."""


@dataclass(frozen=True)
class LookedUp:
    """The rows of a table that a step looks up, in ascending order, repeated as often as looked up.

    indices  the index of each row, of shape [lookups]
    slots    the slot of each row in the gradient, of shape [lookups]; equal rows share a slot
    """

    indices: Value
    slots: Value

    def values(self) -> Sequence[Value]:
        """Returns the tensors `indices` and `slots`, which identify the rows in the graph."""
        return self.indices, self.slots

    def read(self, table: Value) -> Value:
        """Returns these rows of a table."""
        return table.op("Gather", self.indices, axis=0)

    def copies(self, gradient: Value) -> Value:
        """Returns the gradient of each row, from the gradients by slot."""
        return gradient.op("Gather", self.slots, axis=0)

    def written(self, table: Value, rows: Value) -> Value:
        """Returns the table with these rows replaced by `rows`."""
        return table.op("ScatterND", self.indices.reshape([-1, 1]), rows)


@dataclass(frozen=True)
class Drawn:
    """The rows of a classifier's weight that a step samples: one for each sampled class. Rows and
    gradients have the shape [groups, kept, width]."""

    sample: Sample

    def values(self) -> Sequence[Value]:
        """Returns the tensor that identifies the rows in the graph: their positions in their
        groups."""
        return (self.sample.chosen,)

    def read(self, table: Value) -> Value:
        """Returns these rows of a table."""
        return self.sample.rows(table)

    def copies(self, gradient: Value) -> Value:
        """Returns the gradient itself, because no row is drawn twice."""
        return gradient

    def written(self, table: Value, rows: Value) -> Value:
        """Returns the table with these rows replaced by `rows`."""
        return self.sample.written(table, rows)


def lazy_lookups(
    trained: Sequence[Trained],
    globs: Sequence[str],
    parameters: Sequence[gs.Variable],
    sample: Sample | None = None,
    apart: Collection[int] = (),
) -> dict[str, list[gs.Node]]:
    """Returns, for each trained table that a glob matches, by the table's name, the nodes that look
    up its rows.

    trained     the trained weights
    globs       names of tables that are trained lazily
    parameters  the trained weights as inputs of the graph
    sample      the sample of a head's classes, whose rows a step reads
    apart       nodes of the copy for evaluations, by id(): they do not train

    Errors: StrategyError for a glob that matches no trained weight, or if another node reads a
    table.
    """
    names = [t.name for t in trained]
    chosen = {name for glob in globs for name in matching(glob, names, "--lazy")}
    return {p.name: _lookups(p, p.name, sample, apart) for p in parameters if p.name in chosen}


def _lookups(
    tensor: gs.Tensor, table: str, sample: Sample | None, apart: Collection[int]
) -> list[gs.Node]:
    """Returns the nodes that look up rows of `tensor`, which is the table or a cast of it. The
    parameters are those of `lazy_lookups`. Errors: StrategyError if another node reads it."""
    lookups: list[gs.Node] = []
    for node in {id(n): n for n in tensor.outputs}.values():
        if id(node) in apart:
            continue
        if sample is not None and any(node is reader for reader in sample.readers):
            lookups.append(sample.readers[-1])
        elif node.op in _CASTS:
            lookups += _lookups(node.outputs[0], table, sample, apart)
        elif node.op == "Gather" and node.inputs[1] is not tensor and _axis(node) == 0:
            lookups.append(node)
        else:
            raise StrategyError(
                f"--lazy {table}: {node.op} '{node.name}' reads the whole table, so every step "
                "changes all its rows; leave this table out"
            )
    return lookups


def _axis(gather: gs.Node) -> int:
    """Returns the dimension along which a Gather looks up, from 0."""
    return int(gather.attrs.get("axis", 0)) % len(gather.inputs[0].shape)


def lookup_gradient(
    graph: gs.Graph,
    table: gs.Variable,
    lookups: Collection[gs.Node],
    gradients: Mapping[str, Value | None],
) -> tuple[Value, Rows] | None:
    """Returns the gradient of a table by slot (a slot for each distinct row that is looked up), and
    the rows that have gradients; None if the loss depends on no lookup. A slot without a row is
    zero.

    gradients  the gradient of each result of the nodes `lookups`, by name
    """
    builder = Builder(graph, f"lazy/{table.name}")
    height, *width = table.shape
    indices, rows = [], []
    for node in lookups:
        gradient = gradients[node.outputs[0].name]
        if gradient is not None:
            index = builder.value(node.inputs[1]).cast(np.int64)
            gradient = without_padding(node, index, builder.value(gradient.tensor))
            count = prod(index.shape)
            index = index.reshape([count])
            indices.append((index < 0).where(index + height, index))
            of_rows = gradient.reshape([count, *width])
            rows.append(of_rows.cast(table.dtype))
    if not rows:
        return None
    index, of_rows = _joined(indices), _joined(rows)
    count = index.size
    ordered, order = builder.add_each(
        "TopK", [index, np.array([count], np.int64)], 2, axis=0, largest=0, sorted=1
    )
    before = ordered.slice(0, count - 1, 0)
    is_next = ordered.slice(1, count, 0).op("Equal", before).op("Not").cast(np.int64)
    slots = is_next.op("CumSum", np.array(0, np.int64)).pad([1], [0])
    slot_of = builder.zeros([count], np.int64).op("ScatterElements", order, slots, axis=0)
    gradient = scatter_add(of_rows, slot_of, 0, [count, *width])
    return gradient, LookedUp(ordered, slots)


def sampled_gradient(
    sample: Sample, table: gs.Variable, gradients: Mapping[str, Value | None]
) -> tuple[Value | None, Drawn]:
    """Returns the gradient of the sampled rows of a classifier's weight (None if the loss does not
    depend on them), and these rows. `gradients` has the gradient of each result, by name."""
    gradient = gradients[sample.readers[-1].outputs[0].name]
    return None if gradient is None else gradient.cast(table.dtype), Drawn(sample)


def _joined(values: Sequence[Value]) -> Value:
    """Concatenates tensors along the first dimension."""
    first, *others = values
    return first.op("Concat", *others, axis=0) if others else first
