"""Constants of a rank that depend on open sizes, as polynomials of what a run knows.

The lowered graph is compared with those of the other bindings. What differs is made of the
symbols and of where the rank's parts of them start and end, or the layout needs sizes by hand.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.errors import OpenSizesError
from onnxpar.ir.collectives import DOMAIN, PerRank
from onnxpar.ir.subgraphs import captured
from onnxpar.layout.layout import Factor, Layout, leaves, nested_parts
from onnxpar.layout.mesh import Axes, Mesh
from onnxpar.open_sizes.lockstep import MOST
from onnxpar.open_sizes.open_sizes import OpenSizes
from onnxpar.symbols.fits import fit, fits
from onnxpar.symbols.symbols import Binding, Polynomial, Variable

_PROBES = 64


@dataclass(frozen=True)
class Extent:
    """Where the part of a size that is split in nested parts starts, or how long it is, at the
    coordinates of a rank. A `filled` one is an element of the whole where it would be empty."""

    size: Polynomial
    counts: tuple[int, ...]
    at: tuple[int, ...]
    is_start: bool
    is_filled: bool = False

    def value(self, size: int) -> int:
        """Its value where the whole is of that size."""
        sizes = nested_parts(size, self.counts)
        at = int(np.ravel_multi_index(self.at, self.counts))
        start, own = sum(sizes[:at]), sizes[at]
        if self.is_filled and size and not own:
            start, own = min(start, size - 1), 1
        return start if self.is_start else own


@dataclass(frozen=True)
class OpenArray:
    """A tensor of whole numbers, each a polynomial of symbols and parts."""

    elements: tuple[Polynomial, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass
class Lowered:
    """The graph of all ranks at one binding, with its side tables."""

    graph: gs.Graph
    per_rank: PerRank
    layouts: Mapping[str, Layout]

    @cached_property
    def constants(self) -> dict[str, gs.Constant]:
        """By name."""
        found = [*self.graph.tensors().values()]
        found += [t for node in self.graph.nodes for t, _, _ in captured(node)]
        return {t.name: t for t in found if isinstance(t, gs.Constant)}

    @cached_property
    def nodes(self) -> dict[str, gs.Node]:
        """By name."""
        return {n.name: n for n in self.graph.nodes}

    def value(self, name: str, rank: int, mesh: Mesh) -> Array:
        """What a constant is on a rank."""
        by_rank = self.per_rank.constants.get(name)
        if by_rank is not None:
            return np.asarray(by_rank(rank))
        whole = np.asarray(self.constants[name].values)
        layout = self.layouts.get(name)
        return whole if layout is None else np.asarray(layout.take(whole, mesh, rank))

    def attribute(self, node: str, key: str, rank: int) -> Any:
        """What an attribute is on a rank."""
        by_rank = self.per_rank.attributes.get((node, key))
        return self.nodes[node].attrs.get(key) if by_rank is None else by_rank(rank)


class OpenConstants:
    """Compares the lowered graphs of all bindings; `base` is that of the first."""

    def __init__(
        self, base: Lowered, others: Sequence[Lowered], sizes: OpenSizes, mesh: Mesh
    ) -> None:
        self.all = [base, *others]
        self.base = base
        self.sizes = sizes
        self.mesh = mesh
        names = [[(n.name, n.op) for n in each.graph.nodes] for each in self.all]
        for other in names[1:]:
            if other != names[0]:
                odd = [a for a, b in zip(names[0], other, strict=False) if a != b][:1]
                raise self.needs_sizes(odd[0][0] if odd else names[0][-1][0])
        self.varying = sorted(self._find_varying())
        self._known = cache(self._values)

    def needs_sizes(self, what: str) -> OpenSizesError:
        """The error for what has no closed form."""
        node = what.split("::")[0]
        return OpenSizesError(
            f"'{node}': a rank's part of it cannot be told while sizes are open; give "
            f"{self.sizes.flags}, or split another dimension",
            {node: frozenset()},
        )

    def check(self) -> None:
        """Errors: OpenSizesError, naming all nodes of which the parts of some rank cannot be told
        before a run."""
        found: dict[str, OpenSizesError] = {}
        for rank in _ranks_to_check(self.mesh.size):
            for name in self.varying:
                with _noted(found):
                    self._array(rank, name)
            for node in self.base.graph.nodes:
                with _noted(found):
                    self._attributes(rank, node)
        if found:
            raise OpenSizesError(str(next(iter(found.values()))), dict.fromkeys(found, frozenset()))

    def _find_varying(self) -> Iterator[str]:
        for name, tensor in self.base.constants.items():
            by_rank = name in self.base.per_rank.constants
            is_lazy = isinstance(tensor._values, gs.ir.tensor.LazyValues) and not by_rank
            if is_lazy and tensor.shape and np.prod(tensor.shape) > MOST:
                if name in self.base.layouts:  # bodies read it whole otherwise
                    self._check_stored(name)
                continue  # a weight
            whole = tensor.values
            if by_rank or any(not _equal(whole, o.constants[name].values) for o in self.all[1:]):
                yield name

    def _check_stored(self, name: str) -> None:
        """A weight is cut once. Errors: OpenSizesError where open sizes decide its parts."""
        for dims in zip(*(each.layouts[name].dims for each in self.all), strict=True):
            found = [[(f.size, f.axes) for f in leaves(dim)] for dim in dims]
            if any(axes for _, axes in found[0]) and any(f != found[0] for f in found):
                raise self.needs_sizes(name)

    def arrays(self, rank: int) -> dict[str, OpenArray]:
        """The constants of a rank that open sizes decide."""
        found = {name: self._array(rank, name) for name in self.varying}
        return {name: array for name, array in found.items() if array is not None}

    def _array(self, rank: int, name: str) -> OpenArray | None:
        """A constant of a rank, None where open sizes do not decide it there."""
        values = [each.value(name, rank, self.mesh) for each in self.all]
        if all(_equal(values[0], v) for v in values[1:]):
            return None
        variables, probes = self._known(rank, self._filled(name))
        return self._fitted(name, values, variables, probes)

    def _filled(self, name: str) -> frozenset[int]:
        """The split sizes, by index, of which a constant counts a stand-in in an empty part."""
        stand_ins = self.base.per_rank.stand_ins.get(name, frozenset())
        keys = [(sizes[0], axes) for sizes, _, axes in self._split_sizes]
        return frozenset(i for i, key in enumerate(keys) if key in stand_ins)

    def _values(
        self, rank: int, filled: frozenset[int]
    ) -> tuple[dict[Variable, Sequence[int]], list[dict[str, int]]]:
        """The values of what a constant may consist of, at the bindings and at the probes."""
        own = self._parts(rank, filled)
        variables: dict[Variable, Sequence[int]] = {}
        variables.update(self.sizes.variables())
        variables.update(_part_values(own, self.sizes.bindings))
        parts = _part_values(own, self._probes)
        probes = [
            {**probe, **{name: column[i] for name, column in parts.items()}}
            for i, probe in enumerate(self._probes)
        ]
        return variables, probes

    def _fitted(
        self,
        name: str,
        values: list[Array],
        variables: Mapping[Variable, Sequence[int]],
        probes: Sequence[Mapping[str, int]],
    ) -> OpenArray:
        """The polynomials with these values; no two that fit may differ at any of the probes."""
        first = values[0]
        same = all(v.shape == first.shape and v.dtype == first.dtype for v in values)
        if not same or not np.issubdtype(first.dtype, np.integer):
            raise self.needs_sizes(name)
        columns = np.stack([v.reshape(-1) for v in values], 1).tolist()
        elements = []
        for column in columns:
            fitting = fits(column, variables)
            if len({tuple(f.at(probe) for probe in probes) for f in fitting}) != 1:
                raise self.needs_sizes(name)
            elements.append(fitting[0])
        return OpenArray(tuple(elements), first.shape, first.dtype)

    def parts(self, rank: int) -> dict[str, Extent]:
        """The parts of open sizes that a rank holds, with and without stand-ins, by variable
        name."""
        every = frozenset(range(len(self._split_sizes)))
        return {**self._parts(rank, every), **self._parts(rank, frozenset())}

    def _parts(self, rank: int, filled: frozenset[int]) -> dict[str, Extent]:
        found = {}
        for i, (_, size, axes) in enumerate(self._split_sizes):
            counts = tuple(a.size for a in axes)
            at = tuple(self.mesh.coordinate((a,), rank) for a in axes)
            kind = "filled_" if i in filled else ""
            found[f"{kind}start{i}"] = Extent(size, counts, at, True, i in filled)
            found[f"{kind}part{i}"] = Extent(size, counts, at, False, i in filled)
        return found

    @cached_property
    def _probes(self) -> list[Binding]:
        """Sizes of all kinds, to tell polynomials apart that agree at the samples."""
        source = random.Random(0)
        columns = {}
        for symbol in self.sizes.symbols:
            least = min(binding[symbol] for binding in self.sizes.bindings)
            columns[symbol] = [least + source.randint(0, 999) for _ in range(_PROBES)]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    @cached_property
    def _split_sizes(self) -> list[tuple[tuple[int, ...], Polynomial, Axes]]:
        """Open sizes that are split, at each binding and in general, and over which axes."""
        found: dict[tuple[tuple[int, ...], Axes], Polynomial] = {}
        for name in self.base.layouts:
            trees = zip(*(each.layouts[name].dims for each in self.all), strict=True)
            for dims in trees:
                for column in zip(*map(leaves, dims), strict=True):
                    key = (tuple(f.size for f in column), column[0].axes)
                    if len(set(key[0])) > 1 and key[1] and key not in found:
                        found[key] = self._split_size(name, column)
        return [(sizes, size, axes) for (sizes, axes), size in found.items()]

    def _split_size(self, name: str, column: Sequence[Factor]) -> Polynomial:
        size = fit([f.size for f in column], self.sizes.variables())
        if size is None or any(f.parts for f in column):
            raise self.needs_sizes(name)
        return size

    def is_open(self, name: str, axis: int) -> bool:
        """Whether a dimension of a port differs between the bindings."""
        found = [each.layouts.get(name) for each in self.all]
        return len({layout.shape[axis] for layout in found if layout is not None}) > 1

    def attributes(self, rank: int) -> Iterator[tuple[str, str]]:
        """(node, attribute) of collectives that must be left out, as their sizes are known when
        they run. Errors: OpenSizesError for any other attribute that open sizes decide."""
        for node in self.base.graph.nodes:
            yield from self._attributes(rank, node)

    def _attributes(self, rank: int, node: gs.Node) -> list[tuple[str, str]]:
        if self._reaches_over(node):
            raise self.needs_sizes(node.name)
        found = []
        keys = {k for each in self.all for k in each.nodes[node.name].attrs}
        for key in sorted(k for k in keys if not k.startswith("onnxpar.")):
            values = [each.attribute(node.name, key, rank) for each in self.all]
            if all(_equal(values[0], v) for v in values[1:]):
                continue
            if node.domain != DOMAIN or not _is_told_in_a_run(node, key, values):
                raise self.needs_sizes(node.name)
            found.append((node.name, key))
        return found

    def _reaches_over(self, node: gs.Node) -> bool:
        """Whether lowering made the node to move the bounds between parts of an open size: amounts
        that are equal at all samples are wrong where a part is smaller than what its neighbours
        want of it, and any run may have such parts."""
        axis = _moved_axis(node)
        if axis is None or vars(node).get("onnx_source") is None:  # by hand: its author's amounts
            return False
        results = [each.nodes[node.name].outputs[0] for each in self.all]
        return len({tuple(y.shape)[axis] for y in results}) > 1


def _moved_axis(node: gs.Node) -> int | None:
    """The axis along which a collective moves the bounds between parts, if it does."""
    if node.domain != DOMAIN:
        return None
    if node.op == "NeighborExchange":
        return int(node.attrs["axis"])
    same = node.op == "AllToAll" and node.attrs["split_axis"] == node.attrs["concat_axis"]
    return int(node.attrs["split_axis"]) if same else None


def _ranks_to_check(count: int) -> list[int]:
    """All ranks of a small mesh; of a large one those at its ends, in the middle and some more,
    which stand for the others until ranks are written."""
    some = {0, 1, 2, count // 3, count // 2, count - 3, count - 2, count - 1}
    return list(range(count)) if count <= _FEW else sorted(some)


_FEW = 16


@contextmanager
def _noted(found: dict[str, OpenSizesError]) -> Iterator[None]:
    """Keeps the first error of each node."""
    try:
        yield
    except OpenSizesError as error:
        for node in error.nodes:
            found.setdefault(node, error)


def _part_values(parts: Mapping[str, Extent], bindings: Sequence[Binding]) -> dict[str, list[int]]:
    return {
        name: [part.value(part.size.at(binding)) for binding in bindings]
        for name, part in parts.items()
    }


def _is_told_in_a_run(node: gs.Node, key: str, values: Sequence[Any]) -> bool:
    """Whether a collective finds these sizes by itself: what members have, or parts as equal as
    can be."""
    if _moved_axis(node) is not None:
        return False
    if (node.op, key) in (("AllGather", "sizes"), ("AllToAll", "concat_sizes")):
        return True
    if (node.op, key) in (("ReduceScatter", "sizes"), ("AllToAll", "split_sizes")):
        return all(tuple(v) == nested_parts(sum(v), (len(v),)) for v in values)
    return False


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, gs.Graph) or isinstance(b, gs.Graph):
        return True
    return np.array_equal(np.asarray(a), np.asarray(b))
