"""Rules of GatherND and ScatterND, whose indices are tuples.

If a column of constant indices counts up along one dimension of the indices (as in the masks that
torch exports), that dimension shares a factor with the dimension that the column indexes; each
rank's indices then refer to its own shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.graph.tensors import Size, constant, tensor_shape
from onnxpar.rules.indexing import finish_held, is_summable, joined_by, lookup
from onnxpar.rules.movement import PERMUTES, int64
from onnxpar.rules.notation import dims_text
from onnxpar.rules.rule import Local, Lowering, Rule, einsum, invalid, names, rule
from onnxpar.rules.scattering import can_pad, meeting_updates, scatter_padded

_PICKED = "the indices into it are not consecutive"


@dataclass(frozen=True)
class Run:
    """A column of indices that counts up by one along a dimension of the indices: `count` values
    from `start` on, e.g. 3, 4, 5.

    along  the dimension of the indices; None, with a count of 1, for a column that repeats one
           index
    """

    start: int
    count: int
    along: int | None


def find_runs(indices: gs.Tensor, data: Sequence[Size]) -> list[Run | None]:
    """Returns a Run for each column of constant indices into a tensor of shape `data`; None for a
    column that does not count up, or that is computed."""
    values = constant(indices)
    width = (tensor_shape(indices) or ())[-1] or 0
    if values is None or not values.size:
        return [None] * width
    runs: list[Run | None] = []
    for column, size in zip(range(width), data, strict=False):
        run = None if size is None else _find_run(values[..., column] % size)
        used = {r.along for r in runs if r}
        runs.append(None if run and run.along is not None and run.along in used else run)
    return runs


def _find_run(values: Array) -> Run | None:
    """Returns the Run of one column of indices; None if it does not count up."""
    start = int(values.reshape(-1)[0])
    if (values == start).all():
        return Run(start, 1, None)
    for along, count in enumerate(values.shape):
        steps = np.arange(count).reshape([-1 if i == along else 1 for i in range(values.ndim)])
        if (values == start + steps).all():
            return Run(start, count, along)
    return None


class Columns:
    """The factors of the dimensions of the data that columns of indices select from.

    indices  the indices, whose last dimension has a column for each such dimension
    data     the sizes of these dimensions
    at       the factors of the other dimensions of the indices

    `dims` has the dimensions as texts of a rule, `(p0 + i0 + q0)` where a column counts up along
    i0; `picked` has the reasons why others stay whole.
    """

    def __init__(self, indices: gs.Tensor, data: Sequence[Size], at: Sequence[str]) -> None:
        self.runs = find_runs(indices, data)
        self.sizes: dict[str, Size] = {}
        self.picked: dict[str, str] = {}
        self.dims: list[str] = []
        self._at = at
        self._values = constant(indices)
        for i, (run, size) in enumerate(zip(self.runs, data, strict=False)):
            if run is None:
                self.dims.append(f"t{i}")
                self.sizes[f"t{i}"] = size
                self.picked[f"t{i}"] = _PICKED
                continue
            selected = self._selected(i, run)
            rest = (size or 0) - run.start - run.count
            self.dims.append(f"(p{i} + {selected} + q{i})" if run.count != size else selected)
            self.sizes |= {f"p{i}": run.start, selected: run.count, f"q{i}": rest}

    def _selected(self, column: int, run: Run) -> str:
        """Returns the factor of the segment that a column selects."""
        return f"k{column}" if run.along is None else self._at[run.along]

    @property
    def local(self) -> dict[str | int, Callable[[Local], Any]]:
        """The field `local` of a rule, by which a rank gets constant indices into its own shard;
        empty if no column counts up."""
        return {1: self._local_indices} if any(self.runs) else {}

    def _local_indices(self, local: Local) -> Array:
        """Returns the constant indices of the rank's shard, as positions in the rank's shard of the
        data."""
        assert self._values is not None
        part = self._values[np.ix_(*map(local.positions, self._at))].copy()
        for i, run in enumerate(self.runs):
            if run is not None:
                steps = np.arange(local.size(self._selected(i, run)))
                shape = [-1 if j == run.along else 1 for j in range(part.ndim - 1)]
                part[..., i] = steps.reshape(shape) + (local.size(f"p{i}") if run.start else 0)
        return np.asarray(part)


@rule("GatherND")
def gather_nd(node: gs.Node) -> Rule:
    """Sharding rule of GatherND: `b t u d, b i 2 -> b i d`. If t or u is split, each rank looks up
    the elements in its shard, with zeros for all others: a partial sum; unless constant indices
    count up along t and u. Tuples of one index are handled as in Gather."""
    data, indices = (tensor_shape(t) or () for t in node.inputs)
    batch, width = node.attrs.get("batch_dims", 0), indices[-1] or 0
    if not 0 <= batch < len(indices) or batch + width > len(data):
        raise invalid(
            node,
            f"batch_dims={batch} and tuples of {width} indices, for data of {len(data)} and "
            f"indices of {len(indices)} dimensions",
        )
    shared = names("b", batch)
    at = [*shared, *names("i", len(indices) - batch - 1)]
    rest = names("d", len(data) - batch - width)
    out = dims_text([*at, *rest])
    columns = Columns(node.inputs[1], data[batch:], at)
    if columns.runs == [None]:
        fields = lookup(node, batch, [*at, "1"], len(rest) - 1)
        return einsum(
            node, f"{dims_text([*shared, 'v', *rest])}, {dims_text([*at, '1'])} -> {out}", **fields
        )
    if not columns.local and None not in data and is_summable(node.inputs[0]):
        return einsum(
            node,
            f"{dims_text([*shared, *columns.dims, *rest])}, {dims_text([*at, 'w'])} -> {out}",
            sizes=columns.sizes,
            whole={"w": "it holds tuples of indices"},
            contiguous=frozenset(columns.dims),
            lowered=frozenset(columns.dims),
            lower=_lower_gather(columns.dims, batch, len(rest)),
            **joined_by(node, columns.dims),
            **PERMUTES,
        )
    index = "_" if columns.local else dims_text([*at, "w"])
    return einsum(
        node,
        f"{dims_text([*shared, *columns.dims, *rest])}, {index} -> {out}",
        sizes=columns.sizes,
        reduce={},
        whole=columns.picked | ({} if columns.local else {"w": "it holds tuples of indices"}),
        local=columns.local,
        **PERMUTES,
    )


def _lower_gather(dims: Sequence[str], first: int, trailing: int) -> Callable[[Lowering], None]:
    """Returns a lowering that gathers the elements in the rank's shard, with zeros for all others.

    dims      the factors of the dimensions that tuples index
    first     the first of these dimensions in the data
    trailing  the number of dimensions behind them
    """

    def lower(build: Lowering) -> None:
        node = build.local.node
        tuples, held = local_tuples(build, dims, lambda _: np.zeros(len(dims)))
        whole = build.add("Cast", [held], to=onnx.TensorProto.INT32)
        whole = build.add("ReduceMin", [whole], axes=[-1], keepdims=0)
        held = build.add("Cast", [whole], to=onnx.TensorProto.BOOL)
        if trailing:
            held = build.add("Unsqueeze", [held], axes=[-1 - i for i in range(trailing)])
        table = build.input(0)
        for axis, dim in enumerate(dims, first):
            table = build.filled(table, dim, axis)
        finish_held(build, held, build.add(node.op, [table, tuples], **node.attrs))

    return lower


def local_tuples(
    build: Lowering, dims: Sequence[str], elsewhere: Callable[[Local], Any]
) -> tuple[gs.Tensor, gs.Tensor]:
    """Turns tuples of global indices into tuples of positions in the rank's shard. Returns (tuples,
    a mask that is True for each index of a tuple in the shard).

    dims       the factors of the dimensions that tuples index
    elsewhere  from the rank's view to the tuple that takes the place of one in another shard

    An index beyond the global dimension stays beyond the shard, so that the kernel refuses it.
    """

    def starts(local: Local) -> Array:
        return int64([local.interval(d)[0] if local.is_split(d) else 0 for d in dims])

    def counts(local: Local) -> Array:
        return int64([local.size(d) for d in dims])

    index, minus, zero = build.input(1), np.array(-1, np.int64), np.array(0, np.int64)
    first = build.local.node.attrs.get("batch_dims", 0)
    sizes = int64(build.local.node.inputs[0].shape[first : first + len(dims)])
    from_end = build.add("Add", [index, sizes])
    row = build.add("Where", [build.add("Less", [index, zero]), from_end, index])
    exists = build.add("And", [build.add("Greater", [row, minus]), build.add("Less", [row, sizes])])
    local_index = build.add("Sub", [row, build.per_rank(starts)])
    inside = build.add("Less", [local_index, build.per_rank(counts)])
    held = build.add("And", [build.add("Greater", [local_index, minus]), inside])
    other = build.per_rank(lambda local: int64(elsewhere(local)))
    other = build.add("Where", [exists, other, sizes + 1])
    return build.add("Where", [held, local_index, other]), held


@rule("ScatterND")
def scatter_nd(node: gs.Node) -> Rule:
    """Sharding rule of ScatterND: `t u d, i 2, i d -> t u d`. If t or u is split, each rank skips
    the updates of other shards, unless constant indices count up along t and u. If i is split and
    the op reduces updates by sum, max or min, the result is partial."""
    data, indices = (tensor_shape(t) or () for t in node.inputs[:2])
    at = names("i", len(indices) - 1)
    rest = names("d", len(data) - (indices[-1] or 0))
    columns = Columns(node.inputs[1], data, at)
    index = "_" if columns.local else dims_text([*at, "w"])
    text = dims_text([*columns.dims, *rest])
    counted = {run.along for run in columns.runs if run}
    fields = meeting_updates(node, [dim for i, dim in enumerate(at) if i not in counted])
    whole = fields.pop("whole", {})
    adds = node.attrs.get("reduction", "none") in ("none", "add")
    if columns.local:
        fields |= {"whole": whole | columns.picked, "local": columns.local}
    elif None in data or not can_pad(node.inputs[0]):
        picked = dict.fromkeys(columns.dims, "there is no room for the updates of other shards")
        fields["whole"] = whole | picked | {"w": "it holds tuples of indices"}
    else:
        fields |= {
            "whole": whole | {"w": "it holds tuples of indices"},
            "contiguous": frozenset(columns.dims),
            "lowered": frozenset(columns.dims),
            "lower": _lower_scatter(columns.dims),
        }
    return einsum(
        node,
        f"{text}, {index}, {dims_text([*at, *rest])} -> {text}",
        sizes=columns.sizes,
        linear=(frozenset({0, 2}),) if adds else (),
        **fields,
    )


def _lower_scatter(dims: Sequence[str]) -> Callable[[Lowering], None]:
    """Returns a lowering that writes only the updates in the rank's shard. `dims` are the factors
    of the dimensions that tuples index."""

    def lower(build: Lowering) -> None:
        split = [i for i, dim in enumerate(dims) if build.local.is_split(dim)]
        tuples, _ = local_tuples(build, dims, lambda local: [local.size(d) for d in dims])
        scatter_padded(build, tuples, split, lambda local: [local.size(dims[i]) for i in split])

    return lower
