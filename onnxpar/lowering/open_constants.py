"""Expresses a rank's constants that depend on open sizes as polynomials of symbols.

The model is lowered at several bindings, that is, with several values of all symbols, and the
lowered graphs are compared. A constant that differs between bindings must be a polynomial of the
symbols and of the starts and sizes of the rank's shards; otherwise the user has to fix sizes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from operator import add, mul
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.base.errors import OpenSizesError
from onnxpar.graph.closed_forms import MOST
from onnxpar.graph.collectives import DOMAIN, KINDS, START, kind_of
from onnxpar.graph.open_sizes import OpenSizes
from onnxpar.graph.per_rank import PerRank
from onnxpar.graph.size_arithmetic import Forms
from onnxpar.graph.subgraphs import captured
from onnxpar.layout.layout import Concat, Dim, Factor, Layout, dim_axes, leaves, nested_parts
from onnxpar.layout.mesh import Axes, Mesh
from onnxpar.layout.symbols import Binding, Polynomial, Variable
from onnxpar.lowering.extents import Extent, OpenArray, SplitSize, part_values

_PROBES = 32


@dataclass
class Lowered:
    """The lowered graph of all ranks for one binding (values of all symbols).

    graph     the graph
    per_rank  its constants and attributes that differ by rank
    layouts   the layouts of tensors, by name
    """

    graph: gs.Graph
    per_rank: PerRank
    layouts: Mapping[str, Layout]

    @cached_property
    def constants(self) -> dict[str, gs.Constant]:
        """The constants, by name."""
        tensors = [*self.graph.tensors().values()]
        tensors += [t for node in self.graph.nodes for t, _, _ in captured(node)]
        return {t.name: t for t in tensors if isinstance(t, gs.Constant)}

    @cached_property
    def nodes(self) -> dict[str, gs.Node]:
        """The nodes, by name."""
        return {n.name: n for n in self.graph.nodes}

    def value(self, name: str, rank: int, mesh: Mesh) -> Array:
        """Returns the value of the constant `name` on a rank."""
        by_rank = self.per_rank.constants.get(name)
        if by_rank is not None:
            return np.asarray(by_rank(rank))
        whole = np.asarray(self.constants[name].values)
        layout = self.layouts.get(name)
        return whole if layout is None else np.asarray(layout.take(whole, mesh, rank))

    def attribute(self, node: str, key: str, rank: int) -> Any:
        """Returns the value of attribute `key` of the node called `node` on a rank; None if it has
        none."""
        by_rank = self.per_rank.attributes.get((node, key))
        return self.nodes[node].attrs.get(key) if by_rank is None else by_rank(rank)


class OpenConstants:
    """Finds the constants that differ between the lowered graphs of all bindings, and their
    polynomials.

    base    the graph of the first binding
    others  the graphs of the others
    sizes   the open sizes of the model, with the bindings
    mesh    the ranks

    Errors: OpenSizesError if the graphs have different nodes.
    """

    def __init__(
        self, base: Lowered, others: Sequence[Lowered], sizes: OpenSizes, mesh: Mesh
    ) -> None:
        self.all = [base, *others]
        self.base = base
        self.sizes = sizes
        self.mesh = mesh
        names = [[(n.name, n.op) for n in lowered.graph.nodes] for lowered in self.all]
        for other in names[1:]:
            if other != names[0]:
                odd = [a for a, b in zip(names[0], other, strict=False) if a != b][:1]
                raise self.needs_sizes(odd[0][0] if odd else names[0][-1][0])
        for name in base.constants:
            if any(name not in other.constants for other in others):
                raise self.needs_sizes(name)
        self.varying = sorted(self._find_varying())
        self._variables = cache(self._variable_values)
        self._shard_forms = cache(self._sizes_of_shards)

    def needs_sizes(self, what: str) -> OpenSizesError:
        """Returns the error for `what`, the name of a node, tensor or constant that has no formula
        in the open sizes."""
        # "::" also occurs in names of TorchScript's exporter (onnx::Slice_48), not only after a
        # node's name, where passes put it
        node = what if what in self.base.layouts else what.split("::")[0]
        return OpenSizesError(
            f"'{node}': the shard of a rank has no formula in the open sizes; fix them with "
            f"{self.sizes.flags}, or split another dimension",
            {node: frozenset()},
        )

    def check(self) -> None:
        """Checks that the constants and attributes of all nodes have formulas. Errors:
        OpenSizesError, with all nodes that have none on some rank."""
        errors: dict[str, OpenSizesError] = {}
        for rank in _ranks_to_check(self.mesh.size):
            for name in self.varying:
                with _collect_error(errors):
                    self._array(rank, name)
            for node in self.base.graph.nodes:
                with _collect_error(errors):
                    self._attributes(rank, node)
        if errors:
            first = next(iter(errors.values()))
            raise OpenSizesError(str(first), dict.fromkeys(errors, frozenset()))

    def _find_varying(self) -> Iterator[str]:
        """Yields the names of the constants that differ between bindings (values of the open sizes)
        or ranks."""
        for name, tensor in self.base.constants.items():
            by_rank = self._is_per_rank(name)
            is_lazy = isinstance(tensor._values, gs.ir.tensor.LazyValues) and not by_rank
            if is_lazy and tensor.shape and np.prod(tensor.shape) > MOST:
                if name in self.base.layouts:  # otherwise only bodies read the weight, whole
                    self._check_stored(name)
                continue  # checked as a weight
            whole = tensor.values
            others = (other.constants[name].values for other in self.all[1:])
            if by_rank or self._cut_varies(name) or any(not _equal(whole, o) for o in others):
                yield name

    def _is_per_rank(self, name: str) -> bool:
        """True if ranks have different constants of this name, at any binding (values of the open
        sizes)."""
        return any(name in lowered.per_rank.constants for lowered in self.all)

    def _check_stored(self, name: str) -> None:
        """Checks the weight `name`, which is split once, for all runs. Errors: OpenSizesError if
        its shards depend on open sizes."""
        if self._cut_varies(name):
            raise self.needs_sizes(name)

    def _cut_varies(self, name: str) -> bool:
        """True if the shards of the stored tensor `name` depend on open sizes: `table[:N]` divides
        a table into N rows and the others, and each of the two segments is split by itself."""
        has_layout = [name in lowered.layouts for lowered in self.all]
        if not all(has_layout):
            return any(has_layout)
        for dims in zip(*(lowered.layouts[name].dims for lowered in self.all), strict=True):
            splits = [[(f.size, f.axes) for f in leaves(dim)] for dim in dims]
            if any(axes for _, axes in splits[0]) and any(s != splits[0] for s in splits):
                return True
        return False

    def arrays(self, rank: int) -> dict[str, OpenArray]:
        """Returns the constants of a rank that depend on open sizes, as polynomials, by name."""
        all_arrays = {name: self._array(rank, name) for name in self.varying}
        return {name: array for name, array in all_arrays.items() if array is not None}

    def _array(self, rank: int, name: str) -> OpenArray | None:
        """Returns a constant of a rank as polynomials of the open sizes; None if it is equal on all
        ranks, and for all values of the open sizes."""
        values = [lowered.value(name, rank, self.mesh) for lowered in self.all]
        if all(_equal(values[0], v) for v in values[1:]) and name not in self.base.layouts:
            return None
        return self._fitted(name, values, rank, self._filled(name))

    def _filled(self, name: str) -> frozenset[int]:
        """Returns the indices, in `_split_sizes`, of the sizes for which the constant `name` counts
        an empty shard as one element, a stand-in."""
        stand_ins = self.base.per_rank.stand_ins.get(name, frozenset())
        keys = [(split.sizes[0], split.axes) for split in self._split_sizes]
        return frozenset(i for i, key in enumerate(keys) if key in stand_ins)

    def _variable_values(
        self, rank: int, filled: frozenset[int]
    ) -> tuple[dict[Variable, Sequence[int]], list[dict[str, int]]]:
        """Returns the values of the variables of a rank's polynomials: symbols, and starts and
        sizes of shards. First, by variable, those at all bindings (values of the symbols at which
        the model was lowered); then one mapping for each probe (random sizes). `filled` is as
        `_filled` returns it."""
        extents = self._parts(rank, filled)
        variables: dict[Variable, Sequence[int]] = {}
        variables.update(self.sizes.variables())
        variables.update(part_values(extents, self.sizes.bindings))
        parts = part_values(extents, self._probes)
        probes = [
            {**probe, **{name: column[i] for name, column in parts.items()}}
            for i, probe in enumerate(self._probes)
        ]
        return variables, probes

    def _sizes_of_shards(
        self, rank: int, filled: frozenset[int]
    ) -> dict[tuple[int, ...], list[Polynomial]]:
        """Returns polynomials for the sizes of a rank's shards, by the values that such a size has
        at all bindings (values of the symbols at which the model was lowered). Several polynomials
        may agree there. `filled` is as `_filled` returns it."""
        names = {
            (split.sizes, split.axes, split.parts): self._extent_name("part", i, filled)
            for i, split in enumerate(self._split_sizes)
        }

        def size(dims: Sequence[Dim]) -> Polynomial | None:
            """Returns the polynomial for the size of a rank's shard of a dimension, from its
            layouts at all bindings; None if they divide the dimension differently."""
            first = dims[0]
            if isinstance(first, Factor):
                key = (tuple(d.size for d in dims), first.axes, first.parts)
                if key in names:
                    return Polynomial.variable(names[key])
                constants = {d.part(self.mesh, rank)[1] for d in dims if isinstance(d, Factor)}
                return (
                    Polynomial.constant(*constants)
                    if len(constants) == 1
                    else self.sizes.formula(key[0])
                )
            children = [() if isinstance(d, Factor) else d.children for d in dims]
            if len({(type(d), len(c)) for d, c in zip(dims, children, strict=True)}) > 1:
                return None
            parts = [size(child_dims) for child_dims in zip(*children, strict=True)]
            polynomials = [part for part in parts if part is not None]
            if len(polynomials) < len(parts):
                return None
            return reduce(add if isinstance(first, Concat) else mul, polynomials)

        variables, _ = self._variables(rank, filled)
        texts = [v for v in variables if isinstance(v, str)]
        at = [{v: variables[v][i] for v in texts} for i, _ in enumerate(self.all)]
        forms: dict[tuple[int, ...], list[Polynomial]] = {}
        for dims in self._split_dims:
            form = size(dims)
            if form is not None:
                forms.setdefault(tuple(form.at(values) for values in at), []).append(form)
        return forms

    @cached_property
    def _split_dims(self) -> list[tuple[Dim, ...]]:
        """The distinct dimensions of open size that mesh axes split, each as its layouts at all
        bindings (values of the open sizes)."""
        split_dims: dict[tuple[Dim, ...], None] = {}
        for name in self.base.layouts:
            for dims in zip(*(lowered.layouts[name].dims for lowered in self.all), strict=True):
                if len({dim.size for dim in dims}) > 1 and dim_axes(dims[0]):
                    split_dims[dims] = None
        return list(split_dims)

    def _fitted(
        self,
        name: str,
        values: list[Array],
        rank: int,
        filled: frozenset[int],
    ) -> OpenArray:
        """Returns the constant `name` of a rank as polynomials, from its `values` at all bindings
        (values of the open sizes). Errors: OpenSizesError if no polynomial has these values, or if
        two have them, but differ at other, random sizes. `filled` is as `_filled` returns it."""
        variables, probes = self._variables(rank, filled)
        shards = self._shard_forms(rank, filled)
        first = values[0]
        same = all(v.shape == first.shape and v.dtype == first.dtype for v in values)
        if not same or not np.issubdtype(first.dtype, np.integer):
            raise self.needs_sizes(name)
        columns = np.stack([v.reshape(-1) for v in values], 1).tolist()
        forms = self.sizes.values.get(name)
        if forms is not None and forms.shape == first.shape and self._has(forms, columns):
            return OpenArray(tuple(forms.reshape(-1)), first.shape, first.dtype)
        elements = []
        for column in columns:
            fitting = [*self.sizes.known(column), *self.sizes.fitting(column, variables)]
            fitting += [*_ends(column, variables), *shards.get(tuple(column), ())]
            if name in self.varying and not self._is_per_rank(name):
                fitting = self.sizes.known(column) or fitting  # a size of the whole model
            if len({tuple(f.at(probe) for probe in probes) for f in fitting}) != 1:
                raise self.needs_sizes(name)
            elements.append(fitting[0])
        return OpenArray(tuple(elements), first.shape, first.dtype)

    def _has(self, forms: Forms, columns: Sequence[Sequence[int]]) -> bool:
        """True if the polynomials `forms` have the values `columns`: for each element, its values
        at all bindings (values of the open sizes)."""
        pairs = zip(forms.reshape(-1), columns, strict=True)
        return all([form.at(b) for b in self.sizes.bindings] == column for form, column in pairs)

    def parts(self, rank: int) -> dict[str, Extent]:
        """Returns the extents (starts and sizes) of a rank's shards of open sizes, by the names of
        variables: each twice, with an empty shard counted as no element, and as one."""
        every = frozenset(range(len(self._split_sizes)))
        return {**self._parts(rank, every), **self._parts(rank, frozenset())}

    @cached_property
    def _prefix(self) -> str:
        """The prefix of the names of variables for starts and sizes of shards: more colons than any
        symbol of the model begins with."""
        return ":" * (1 + max((len(s) - len(s.lstrip(":")) for s in self.sizes.symbols), default=0))

    def _parts(self, rank: int, filled: frozenset[int]) -> dict[str, Extent]:
        """Returns the extents (starts and sizes) of a rank's shards of open sizes, by the names of
        variables. `filled` has the indices of the sizes whose empty shards count as one element."""
        extents = {}
        for i, split in enumerate(self._split_sizes):
            at = tuple(self.mesh.coordinate((a,), rank) for a in split.axes)
            for what in ("start", "part"):
                extents[self._extent_name(what, i, filled)] = Extent(
                    split.size, split.axes, at, what == "start", i in filled, split.parts
                )
        return extents

    def _extent_name(self, what: str, i: int, filled: frozenset[int]) -> str:
        return f"{self._prefix}{'filled_' if i in filled else ''}{what}{i}"

    @cached_property
    def _probes(self) -> list[Binding]:
        """Random values of the open sizes within the limits of runs, at which polynomials are
        compared that agree at the bindings: small sizes, at which ranks have empty shards, and
        larger sizes."""
        source = random.Random(0)
        bindings = self.sizes.bindings
        least = {symbol: min(b[symbol] for b in bindings) for symbol in self.sizes.symbols}
        starts = [(dict.fromkeys(least, 1), 4), (least, 3), (least, 30), (least, 999)]
        candidates = [
            {symbol: low + source.randint(0, most) for symbol, low in start.items()}
            for start, most in starts
            for _ in range(_PROBES)
        ]
        return [
            probe
            for probe in candidates
            if all(a.at(probe) <= b.at(probe) for a, b in self.sizes.limits)
        ]

    @cached_property
    def _split_sizes(self) -> list[SplitSize]:
        """The distinct open sizes that mesh axes split."""
        split_sizes: dict[tuple[tuple[int, ...], Axes, object], SplitSize] = {}
        for name in self.base.layouts:
            trees = zip(*(lowered.layouts[name].dims for lowered in self.all), strict=True)
            for dims in trees:
                split = [[f for f in leaves(dim) if f.axes] for dim in dims]
                if len({len(factors) for factors in split}) > 1:
                    raise self.needs_sizes(name)
                for column in zip(*split, strict=True):
                    key = (tuple(f.size for f in column), column[0].axes, column[0].parts)
                    if len(set(key[0])) > 1 and key not in split_sizes:
                        split_sizes[key] = self._split_size(name, column)
        return list(split_sizes.values())

    def _split_size(self, name: str, column: Sequence[Factor]) -> SplitSize:
        """Returns the split size of a factor from `column`, its sharding at each binding (values of
        the open sizes). Errors: OpenSizesError if the size has no formula."""
        sizes = tuple(f.size for f in column)
        size, parts = self.sizes.formula(sizes), column[0].parts
        if size is None or isinstance(parts, tuple) or any(f.parts != parts for f in column):
            raise self.needs_sizes(name)
        return SplitSize(sizes, size, column[0].axes, parts)

    def is_open(self, name: str, axis: int) -> bool:
        """True if the size of dimension `axis` of an input or output depends on the open sizes."""
        layouts = [lowered.layouts.get(name) for lowered in self.all]
        return len({layout.shape[axis] for layout in layouts if layout is not None}) > 1

    def attributes(self, rank: int) -> Iterator[tuple[str, str]]:
        """Yields (node, attribute) for each attribute that the rank's nodes must not have, because
        it has sizes that differ between runs. The collective gets such sizes as an operand, or
        finds them when it runs. Errors: OpenSizesError for any other attribute that depends on open
        sizes."""
        for node in self.base.graph.nodes:
            yield from self._attributes(rank, node)

    def _attributes(self, rank: int, node: gs.Node) -> list[tuple[str, str]]:
        """Returns (node, attribute) for each attribute that this node must not have on the rank,
        because it has sizes that differ between runs: a collective gets them otherwise. Errors:
        OpenSizesError for any other attribute that depends on open sizes."""
        if self._reaches_over(node):
            raise self.needs_sizes(node.name)
        removed = []
        keys = {k for lowered in self.all for k in lowered.nodes[node.name].attrs}
        for key in sorted(k for k in keys if not k.startswith("onnxpar.")):
            values = [lowered.attribute(node.name, key, rank) for lowered in self.all]
            if all(_equal(values[0], v) for v in values[1:]):
                continue
            if node.domain != DOMAIN or not _is_found_in_a_run(node, key, values):
                self._member_sizes(rank, node, key, values)
            removed.append((node.name, key))
        return removed

    def operands(self, rank: int) -> dict[str, tuple[OpenArray, dict[str, Extent]]]:
        """Returns the sizes that a rank's collectives take as an operand, by node: the sizes of the
        shards into which a collective cuts its tensor, as polynomials, with the starts and sizes of
        shards on which these depend, by variable. Errors: OpenSizesError if a size has no
        formula."""
        operands = {}
        for node in self.base.graph.nodes:
            for name, key in self._attributes(rank, node):
                values = [lowered.attribute(name, key, rank) for lowered in self.all]
                if not _is_found_in_a_run(node, key, values):
                    operands[name] = self._member_sizes(rank, node, key, values)
        return operands

    def _member_sizes(
        self, rank: int, node: gs.Node, key: str, values: Sequence[Any]
    ) -> tuple[OpenArray, dict[str, Extent]]:
        """Returns the sizes of the shards into which a collective cuts its tensor, one for each
        member of the rank's group, as polynomials; and the starts and sizes of shards on which
        these depend, by variable.

        key     the attribute that has the sizes
        values  the attribute at each binding (values of the open sizes)

        Errors: OpenSizesError for any other attribute.
        """
        kind = KINDS.get(node.op) if node.domain == DOMAIN else None
        if kind is None or not kind.cuts or key != kind.cuts.sizes or _moved_axis(node) is not None:
            raise self.needs_sizes(node.name)
        elements: list[Polynomial] = []
        extents: dict[str, Extent] = {}
        members = self.base.attribute(node.name, "group", rank)
        for member, column in zip(members, zip(*values, strict=True), strict=True):
            sizes = [np.array([size], np.int64) for size in column]
            (element,) = self._fitted(node.name, sizes, member, frozenset()).elements
            for name, extent in self._parts(member, frozenset()).items():
                if name in element.variables:
                    renamed = f"{name}_of_{member}"
                    element = element.replace(name, Polynomial.variable(renamed))
                    extents[renamed] = extent
            elements.append(element)
        return OpenArray(tuple(elements), (len(elements),), np.dtype(np.int64)), extents

    def _reaches_over(self, node: gs.Node) -> bool:
        """True if lowering added the node to move elements between neighbouring shards of an open
        size.

        The numbers of moved elements may be equal at all bindings, but they are wrong in a run in
        which a shard is smaller than the halo of its neighbours.
        """
        axis = _moved_axis(node)
        if axis is None or vars(node).get("onnx_source") is None:  # None: a node of the author
            return False
        results = [_result(lowered.nodes[node.name]) for lowered in self.all]
        return len({tuple(y.shape)[axis] for y in results}) > 1


def _ends(column: Sequence[int], variables: Mapping[Variable, Sequence[int]]) -> list[Polynomial]:
    """Returns the polynomials "start + size" of a shard (its end) that have the values `column` at
    all bindings (values of the open sizes). They are preferred, as other polynomials may agree
    there by chance.

    variables  the values of each variable at all bindings
    """
    texts = [v for v in variables if isinstance(v, str) and "start" in v]
    pairs = [
        (start, part) for start in texts if (part := start.replace("start", "part")) in variables
    ]
    return [
        Polynomial.variable(start) + Polynomial.variable(part)
        for start, part in pairs
        if [a + b for a, b in zip(variables[start], variables[part], strict=True)] == [*column]
    ]


def _result(node: gs.Node) -> gs.Tensor:
    """Returns the result of a collective; for one that is only started, that of the node that
    completes it."""
    (y, *_) = node.outputs
    return y.outputs[0].outputs[0] if node.op.startswith(START) else y


def _moved_axis(node: gs.Node) -> int | None:
    """Returns the axis along which a collective moves elements between neighbouring shards; None
    for any other node."""
    if node.domain != DOMAIN:
        return None
    kind = kind_of(node.op)
    if kind == "NeighborExchange":
        return int(node.attrs["axis"])
    same = kind == "AllToAll" and node.attrs["split_axis"] == node.attrs["concat_axis"]
    return int(node.attrs["split_axis"]) if same else None


def _ranks_to_check(count: int) -> list[int]:
    """Returns the ranks of a small mesh, or a sample of the ranks of a large mesh: both ends, the
    middle, a third. All ranks are checked when they are written."""
    some = {0, 1, 2, count // 3, count // 2, count - 3, count - 2, count - 1}
    return list(range(count)) if count <= _FEW else sorted(some)


_FEW = 16


@contextmanager
def _collect_error(errors: dict[str, OpenSizesError]) -> Iterator[None]:
    """Stores the first error of each node in `errors`."""
    try:
        yield
    except OpenSizesError as error:
        for node in error.nodes:
            errors.setdefault(node, error)


def _is_found_in_a_run(node: gs.Node, key: str, values: Sequence[Any]) -> bool:
    """True if a collective finds the sizes in its attribute `key` by itself when it runs: sizes of
    its members' tensors, or of shards that are as equal as possible. `values` has the attribute at
    each binding (values of the open sizes)."""
    if _moved_axis(node) is not None:
        return False
    kind = KINDS.get(kind_of(node.op))
    if kind and kind.joins and key == kind.joins.sizes:
        return True
    if kind and kind.shapes and key == kind.shapes:
        return True
    if kind and kind.cuts and key == kind.cuts.sizes:
        return all(tuple(v) == nested_parts(sum(v), (len(v),)) for v in values)
    return False


def _equal(a: Any, b: Any) -> bool:
    """True if two values of an attribute or constant are equal; NaN equals NaN, and subgraphs are
    not compared."""
    if isinstance(a, gs.Graph) or isinstance(b, gs.Graph):
        return True
    a, b = (np.asarray(x.values if isinstance(x, gs.Constant) else x) for x in (a, b))
    return np.array_equal(a, b, equal_nan=a.dtype.kind == b.dtype.kind == "f")
