"""GatherND and ScatterND, whose indices are tuples.

Where a column of constant indices counts along one of their own dimensions, as in the masks that
torch exports, the dimension that it picks from is that dimension, and each rank's indices count in
its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.rules.indexing import Array, lookup
from onnxpar.rules.movement import PERMUTES
from onnxpar.rules.rule import (
    Local,
    Rule,
    Size,
    constant,
    dims_text,
    einsum,
    names,
    rule,
    tensor_shape,
)

_PICKED = "it is picked from by indices that do not count along it"
_MEETS = "its updates meet in the same elements"


@dataclass(frozen=True)
class Run:
    """A column that counts up by one from `start`, `count` times, along dimension `along`.

    A column of one and the same index counts once, along none.
    """

    start: int
    count: int
    along: int | None


def find_runs(indices: gs.Tensor, data: Sequence[Size]) -> list[Run | None]:
    """The run in each column of constant indices into `data`; None where there is none."""
    values = constant(indices)
    width = (tensor_shape(indices) or ())[-1] or 0
    if values is None or not values.size:
        return [None] * width
    runs: list[Run | None] = []
    for column, size in zip(range(width), data, strict=False):
        run = None if size is None else _find_run(values[..., column] % size)
        taken = {r.along for r in runs if r}
        runs.append(None if run and run.along is not None and run.along in taken else run)
    return runs


def _find_run(values: Array) -> Run | None:
    start = int(values.reshape(-1)[0])
    if (values == start).all():
        return Run(start, 1, None)
    for along, count in enumerate(values.shape):
        steps = np.arange(count).reshape([-1 if i == along else 1 for i in range(values.ndim)])
        if (values == start + steps).all():
            return Run(start, count, along)
    return None


class Columns:
    """The dimensions that the columns of indices over `at` pick from, as rule text."""

    def __init__(self, indices: gs.Tensor, data: Sequence[Size], at: Sequence[str]) -> None:
        self.runs = find_runs(indices, data)
        self.sizes: dict[str, Size] = {}
        self.whole: dict[str, str] = {}
        self.dims: list[str] = []
        self._at = at
        self._values = constant(indices)
        for i, (run, size) in enumerate(zip(self.runs, data, strict=False)):
            if run is None:
                self.dims.append(f"t{i}")
                self.sizes[f"t{i}"] = size
                self.whole[f"t{i}"] = _PICKED
                continue
            kept = self._kept(i, run)
            rest = (size or 0) - run.start - run.count
            self.dims.append(f"(p{i} + {kept} + q{i})" if run.count != size else kept)
            self.sizes |= {f"p{i}": run.start, kept: run.count, f"q{i}": rest}

    def _kept(self, column: int, run: Run) -> str:
        return f"k{column}" if run.along is None else self._at[run.along]

    @property
    def local(self) -> dict[str | int, Callable[[Local], Any]]:
        """The indices of a part, where some column is a run."""
        return {1: self._local_indices} if any(self.runs) else {}

    def _local_indices(self, local: Local) -> Array:
        assert self._values is not None
        part = self._values[np.ix_(*map(local.positions, self._at))].copy()
        for i, run in enumerate(self.runs):
            if run is not None:
                steps = np.arange(local.size(self._kept(i, run)))
                shape = [-1 if j == run.along else 1 for j in range(part.ndim - 1)]
                part[..., i] = steps.reshape(shape) + (local.size(f"p{i}") if run.start else 0)
        return np.asarray(part)


@rule("GatherND")
def gather_nd(node: gs.Node) -> Rule:
    """`b t u d, b i 2 -> b i d`, t and u whole unless constant indices count along them.

    Tuples of one index look rows up as Gather does.
    """
    data, indices = (tensor_shape(t) or () for t in node.inputs)
    batch = node.attrs.get("batch_dims", 0)
    shared = names("b", batch)
    at = [*shared, *names("i", len(indices) - batch - 1)]
    rest = names("d", len(data) - batch - (indices[-1] or 0))
    out = dims_text([*at, *rest])
    columns = Columns(node.inputs[1], data[batch:], at)
    if columns.runs == [None]:
        fields = lookup(node, batch, [*at, "1"], len(rest) - 1)
        return einsum(
            node, f"{dims_text([*shared, 'v', *rest])}, {dims_text([*at, '1'])} -> {out}", **fields
        )
    index = "_" if columns.local else dims_text([*at, "w"])
    return einsum(
        node,
        f"{dims_text([*shared, *columns.dims, *rest])}, {index} -> {out}",
        sizes=columns.sizes,
        reduce={},
        whole=columns.whole | ({} if columns.local else {"w": "a tuple of indices"}),
        local=columns.local,
        **PERMUTES,
    )


@rule("ScatterND")
def scatter_nd(node: gs.Node) -> Rule:
    """`t u d, i 2, i d -> t u d`, t, u and i whole unless constant indices count along them."""
    data, indices = (tensor_shape(t) or () for t in node.inputs[:2])
    at = names("i", len(indices) - 1)
    rest = names("d", len(data) - (indices[-1] or 0))
    columns = Columns(node.inputs[1], data, at)
    index = "_" if columns.local else dims_text([*at, "w"])
    text = dims_text([*columns.dims, *rest])
    counted = {run.along for run in columns.runs if run}
    meeting = {dim: _MEETS for i, dim in enumerate(at) if i not in counted}
    adds = node.attrs.get("reduction", "none") in ("none", "add")
    return einsum(
        node,
        f"{text}, {index}, {dims_text([*at, *rest])} -> {text}",
        sizes=columns.sizes,
        reduce={},
        whole=columns.whole | meeting | ({} if columns.local else {"w": "a tuple of indices"}),
        linear=(frozenset({0, 2}),) if adds else (),
        local=columns.local,
    )
