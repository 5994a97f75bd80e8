"""Chooses bindings (sample sizes of all symbols) for a model with open sizes, and infers the model
at each of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto, TypeProto

from onnxpar.base.arrays import Array
from onnxpar.base.errors import StrategyError
from onnxpar.graph.boundary_sizes import Side, edge_bindings, limit, unseen
from onnxpar.graph.branch_sizes import free_sizes
from onnxpar.graph.cache_sizes import CacheSizes, cache_sizes
from onnxpar.graph.counted_windows import round_down
from onnxpar.graph.lockstep import Lockstep, Strides, Unsolved
from onnxpar.graph.misfits import check_fits
from onnxpar.graph.scopes import open_scopes
from onnxpar.graph.shape_inference import Walk, keep_nodes
from onnxpar.graph.size_arithmetic import Forms, Limit
from onnxpar.graph.stored import FOLD_LIMIT, copy_with_stubs
from onnxpar.graph.tensors import Whole
from onnxpar.graph.typical import Profile, Ties, Typical, typical_sizes
from onnxpar.layout.fits import DOMAINS, Domain, fits, sample
from onnxpar.layout.symbols import Atom, Binding, Polynomial, Quotient, Variable, symbols_of

OpenDims = Mapping[tuple[str, int], Polynomial]
"""The closed forms of open dimensions of inputs, by (input, axis)."""


@dataclass(frozen=True)
class OpenSizes:
    """The open sizes of a model, and its graphs at sample bindings (sizes of all symbols).

    graph    `graph(i)` is the model's graph at `bindings[i]`: the same nodes and tensors for every
             i, with other sizes
    atoms    the minima and quotients in closed forms of sizes
    labels   the names of the symbols for --dim
    whole    first results of nodes whose results have data-dependent sizes, so that they stay whole
    typical  sizes for costs, each with its share of runs
    is_told  True if the user gave the typical sizes
    caches   relations between sizes that attention kernels demand
    free     dimensions in which inputs may have other sizes than the symbols say
    limits   pairs of sizes (a, b): a run must have a <= b
    forms    all closed forms of sizes in the model
    values   closed forms of the elements of tensors, by name
    """

    symbols: tuple[str, ...]
    bindings: list[Binding]
    dims: OpenDims
    graph: Callable[[int], gs.Graph]
    atoms: tuple[Atom, ...] = ()
    labels: tuple[str, ...] = ()
    whole: Whole = field(default_factory=dict)
    typical: tuple[Profile, ...] = ()
    is_told: bool = False
    caches: Sequence[CacheSizes] = ()
    free: frozenset[tuple[str, int]] = frozenset()
    limits: tuple[Limit, ...] = ()
    forms: tuple[Polynomial, ...] = ()
    values: Mapping[str, Forms] = field(default_factory=dict)

    def at(self, numbers: Sequence[int]) -> OpenSizes:
        """Returns the open sizes with only the bindings (sample sizes) at these indices. More
        limits keep runs from sizes that no remaining binding covers, such as those beyond a
        minimum."""
        bindings = [self.bindings[i] for i in numbers]
        limits = [*self.limits, *map(limit, unseen(self.atoms, bindings))]
        return replace(
            self,
            bindings=bindings,
            graph=lambda i: self.graph(numbers[i]),
            limits=tuple(dict.fromkeys(limits)),
        )

    @property
    def flags(self) -> str:
        """The options that fix every symbol: `--dim batch=N --dim seq=N`."""
        return " ".join(f"--dim {label}=N" for label in self.labels)

    def formula(self, values: Sequence[int]) -> Polynomial | None:
        """Returns the closed form of a size that has these values, one for each binding (sample
        sizes); None if there is none."""
        return next(iter([*self.known(values), *self.fitting(values, self.variables())]), None)

    def fitting(
        self, values: Sequence[int], variables: Mapping[Variable, Sequence[int]]
    ) -> list[Polynomial]:
        """Returns polynomials of these variables that have these values, one for each binding
        (sample sizes). They may only contain minima that the model has: others could fit by chance,
        because they equal one operand at most samples."""
        return [f for f in fits(values, variables) if all(map(self._is_known, f.atoms))]

    def _is_known(self, atom: Atom) -> bool:
        return atom in self.atoms or not {*self.symbols}.issuperset(symbols_of(atom))

    def known(self, values: Sequence[int]) -> list[Polynomial]:
        """Returns the closed forms of sizes in the model that have these values, one for each
        binding (sample sizes), the simplest first. Within the limits of runs they are equal."""
        forms = self._columns.get(tuple(values), [])
        return sorted(forms, key=lambda form: (len(form.atoms), len(form.terms)))

    @cached_property
    def _columns(self) -> dict[tuple[int, ...], list[Polynomial]]:
        by_values: dict[tuple[int, ...], list[Polynomial]] = {}
        for form in self.forms:
            by_values.setdefault(tuple(form.at(b) for b in self.bindings), []).append(form)
        return by_values

    def variables(self) -> dict[Variable, list[int]]:
        """Returns the values of every symbol, minimum and quotient at each binding (sample
        sizes)."""
        values: dict[Variable, list[int]] = {s: [b[s] for b in self.bindings] for s in self.symbols}
        return values | {a: [a.at(b) for b in self.bindings] for a in self.atoms}


def infer_open(
    proto: onnx.ModelProto,
    dims: OpenDims,
    least: int,
    prepare: Callable[[onnx.ModelProto], gs.Graph],
    typical: Typical | None = None,
    remainders: int = 0,
) -> OpenSizes:
    """Infers the model at sample sizes and folds nodes, in place; returns the open sizes and the
    graphs.

    dims        the open dimensions of inputs
    least       the smallest sample size
    prepare     makes the graph of an inferred model
    typical     the user's typical sizes
    remainders  number of bindings wanted, as for `sample`

    A symbol is replaced where nodes require it to equal another symbol, a sum of others (a mask
    over past and present), or a multiple of a number (an image that is halved and doubled). If the
    model is not valid at some sizes (a table of positions is too short), others are tried. Errors:
    ModelError for a node that is not valid for its operands; StrategyError if two sizes must be
    equal and cannot be made so.
    """
    open_scopes(proto.graph)  # two bodies may use one name for different weights
    labels = _symbols(dims)
    # If a run slices a table by a sample size, at least two rows must be left.
    taken = {d - n for weight in proto.graph.initializer for d in weight.dims for n in (0, 1)}
    search = _Search(proto, dims, (least, remainders), taken)
    dims, walks = search.run()
    walks.put_first()
    live = [walks.walks[i] for i in walks.live]
    for name, size in search.limited:
        warnings.warn(
            f"{name} is fixed at {size}: of the sizes tried, the ops of the model accept only this "
            f"one; for another size, give --dim {name}=N",
            stacklevel=2,
        )
    for node in walks.conflicts:
        check_fits(live, node)
        _check_related(walks, node, dims)
    typical = typical or Typical()
    symbols, ties = tuple(walks.bindings[0]), Ties(tuple(search.ties))
    caches = cache_sizes(proto.graph, walks)
    fits = [search.suits, search.fits]
    profiles = typical_sizes(typical, symbols, ties, dims, caches, fits)
    keep_nodes(proto.graph, walks.kept)
    round_down(proto.graph, walks.fixed_sizes)
    bindings = [walks.bindings[i] for i in walks.live]
    return OpenSizes(
        tuple(bindings[0]),
        bindings,
        dims,
        _graph_at(proto, live, prepare),
        tuple(walks.atoms),
        labels,
        dict.fromkeys(walks.lost),
        profiles,
        bool(typical.profiles),
        caches,
        free_sizes(proto.graph, dims, walks.sizes),
        tuple(
            dict.fromkeys(
                [*search.bounds(), *walks.limits, *map(limit, unseen(walks.atoms, bindings))]
            )
        ),
        tuple(walks.found),
        walks.forms.values,
    )


def _check_related(walks: Lockstep, node: onnx.NodeProto, dims: OpenDims) -> None:
    """Checks a node that is not valid at some of the sample sizes. Errors: StrategyError if it is
    valid at others: sizes are then related in a way that does not follow from the model."""
    odd = [i for i in walks.live if any(node is each for each in walks.walks[i].conflicts)]
    if len(odd) == len(walks.live):
        return
    symbols = _symbols(dims)
    at = ", ".join(f"{s}={walks.bindings[odd[0]][s]}" for s in symbols)
    raise StrategyError(
        f"{node.op_type} '{node.name or node.output[0]}' is not possible at all open sizes, such "
        f"as {at}; relate sizes to others, as in --dim total=past+seq, or fix them with "
        + " ".join(f"--dim {s}=N" for s in symbols)
    )


def _graph_at(
    proto: onnx.ModelProto, live: Sequence[Walk], prepare: Callable[[onnx.ModelProto], gs.Graph]
) -> Callable[[int], gs.Graph]:
    """Returns the function `graph` of OpenSizes: it makes the graph at the sample sizes with a
    given index. Only the graph at index 0 has the values of large weights."""
    bare = copy_with_stubs(proto, _reference_to_nowhere)

    def graph(i: int) -> gs.Graph:
        model = proto
        if i:
            model = onnx.ModelProto()
            model.CopyFrom(bare)
        live[i].declare(model.graph)
        return prepare(model)

    return graph


def _symbols(dims: OpenDims) -> tuple[str, ...]:
    """Returns the symbols of these dimensions, in the order of the inputs."""
    return tuple(dict.fromkeys(v for size in dims.values() for v in size.variables))


@dataclass(frozen=True)
class _Found:
    """A result of the search for sample sizes.

    badness  (number of conflicts, number of sizes that are too small); less is better
    dims     the open dimensions
    walks    the inferred model at samples from `domains`
    """

    badness: tuple[int, int]
    dims: OpenDims
    walks: Lockstep
    domains: Mapping[str, Domain]


class _Search:
    """Tries sample sizes until the model is valid at them, and every open size is large enough to
    be split."""

    def __init__(
        self,
        proto: onnx.ModelProto,
        dims: OpenDims,
        sampled: tuple[int, int],
        taken: Iterable[int],
    ) -> None:
        self.proto = proto
        self.dims = dims
        self.least, self.remainders = sampled
        self.taken = set(taken)
        self.domains: dict[str, Domain] = {}
        self.strides: Strides = {}
        self.ties: list[tuple[str, Polynomial]] = []
        self.limited: list[tuple[str, Polynomial]] = []
        self.edges: list[Binding] = []
        self.sought: set[Side] = set()
        self.small = _SMALL
        self.best: _Found | None = None

    def run(self) -> tuple[OpenDims, Lockstep]:
        """Returns the open dimensions, in the symbols that remain after replacements, and the
        inferred model at the best sample sizes. Errors: StrategyError if two sizes must be equal
        and cannot be made so."""
        for general in DOMAINS:
            self.domains, vain = {}, 0
            for _ in range(_ROUNDS):
                walks = self._walk(general)
                if walks.tie is not None:
                    if not walks.tie[1].variables and not walks.is_certain:
                        if general is not DOMAINS[-1]:
                            break  # a table of positions may be shorter than the sizes sampled
                        self.limited.append(walks.tie)
                    self.ties.append(walks.tie)
                    tied = {at: d.replace(*walks.tie) for at, d in self.dims.items()}
                    self.dims = tied
                    self.best = None
                    continue
                if self._bound(walks.unsolved):
                    self.best = None
                    continue
                small = self._small(walks)
                badness = (len(walks.conflicts), len(small))
                vain = 0 if self.best is None or badness < self.best.badness else vain + 1
                if self.best is None or badness <= self.best.badness:
                    self.best = _Found(badness, self.dims, walks, dict(self.domains))
                elif badness[0] > self.best.badness[0]:
                    break  # the model is not valid at larger sizes
                if vain <= _PATIENCE and self._grow(walks, small):
                    continue
                self.domains = dict(self.best.domains)
                if not self._seek_edges(self.best.walks):
                    break
            if self.best is not None and not self.best.badness[0]:
                break
        assert self.best is not None
        dims, walks = self.best.dims, self.best.walks
        for odd in walks.unsolved[:1]:
            raise StrategyError(
                f"{odd.node.op_type} '{odd.node.name or odd.node.output[0]}' needs the sizes "
                f"{odd.first} and {odd.second} to be equal, and onnxpar cannot solve this for an "
                "open size; fix the sizes with "
                + " ".join(f"--dim {s}=N" for s in _symbols(self.dims))
            )
        return dims, walks

    def bounds(self) -> Iterator[Limit]:
        """Yields limits for the least and the greatest size of each symbol that has no sizes
        outside its domain."""
        assert self.best is not None
        closed = {s: d for s, d in self.best.domains.items() if d.closed}
        for symbol, domain in closed.items():
            size = Polynomial.variable(symbol)
            yield Polynomial.constant(domain.low), size
            yield size, Polynomial.constant(domain.high)

    def fits(self, binding: Binding) -> bool:
        """True if these sizes cause no more conflicts in the model than the samples do."""
        assert self.best is not None
        return self._conflicts(binding) <= len(self.best.walks.conflicts)

    def suits(self, binding: Binding) -> bool:
        """True if the model fits these sizes, also with all integer inputs 0, and with all 1:
        positions that are computed from a mask or from token ids must be in the range of their
        table. Conflicts that these values cause even at sizes of 1 do not count."""
        if not self.fits(binding):
            return False
        for value in (0, 1):
            odd = self._conflicts(binding, value)
            if odd and odd > self._conflicts(dict.fromkeys(binding, 1), value):
                return False
        return True

    def _conflicts(self, binding: Binding, value: int | None = None) -> int:
        """Returns how many nodes are not valid at these sizes, if all integer inputs hold `value`
        (None: unknown values)."""
        types = self._types(binding)
        alone = Lockstep(self.proto, [types], [binding], _symbols(self.dims))
        if value is not None:
            alone.walks[0].suppose(_integers(types, value))
        with np.errstate(all="ignore"):  # folding may compute the logarithm of 0
            alone.run()
        return len(alone.conflicts)

    def _walk(self, general: Domain) -> Lockstep:
        """Infers the model at sample sizes from the current domains; a symbol without a domain gets
        `general`."""
        symbols = sorted(_symbols(self.dims))
        self.domains = {s: self.domains.get(s, general) for s in symbols}
        bindings = sample(self.domains, self.least, self.taken, self.remainders)
        open_ = [s for s in symbols if not self.domains[s].closed]
        small = {s: self.domains[s].size(self.small + i) for i, s in enumerate(open_)}
        edges = [{**bindings[0], **edge} for edge in ([small] if small else []) + self.edges]
        bindings += edges
        closed = [s for s, domain in self.domains.items() if domain.closed]
        inputs = [self._types(b) for b in bindings]
        order = _symbols(self.dims)
        walks = Lockstep(
            self.proto, inputs, bindings, order, self.strides, closed, self.dims, len(edges)
        )
        walks.run()
        return walks

    def _types(self, binding: Binding) -> dict[str, TypeProto]:
        types = {}
        for tensor in self.proto.graph.input:
            type_ = TypeProto()
            type_.CopyFrom(tensor.type)
            for axis, dim in enumerate(type_.tensor_type.shape.dim):
                if (tensor.name, axis) in self.dims:
                    dim.dim_value = self.dims[tensor.name, axis].at(binding)
            types[tensor.name] = type_
        return types

    def _bound(self, unsolved: Sequence[Unsolved]) -> bool:
        """Where two sizes must be equal, but no replacement of a symbol makes them equal, restricts
        a symbol to the sizes at which they are, if these are a range. Returns True if a domain has
        changed."""
        before = dict(self.domains)
        for odd in unsolved:
            difference = odd.first - odd.second
            if len(difference.variables) == 1:
                (symbol,) = difference.variables
                fitting = [n for n in range(1, _WIDEST) if difference.at({symbol: n}) == 0]
                if fitting and len(fitting) == fitting[-1] - fitting[0] + 1 < _WIDEST - 1:
                    self.domains[symbol] = Domain(1, fitting[0], fitting[-1], closed=True)
        return self.domains != before

    def _small(self, walks: Lockstep) -> list[Polynomial]:
        """Returns the open sizes for which the samples are too small: sizes below `least` at some
        sample that grow with the samples (other sizes, such as differences of positions, may be
        negative at all sizes); and sizes of empty results."""
        bindings = [walks.bindings[i] for i in walks.live if i not in walks.edges]
        larger = {symbol: size * _GROWTH for symbol, size in bindings[0].items()}
        growing = [s for s in walks.found if s.at(larger) > s.at(bindings[0])]
        small = [s for s in growing if any(s.at(b) < self.least for b in bindings)]
        return [*small, *walks.void]

    def _seek_edges(self, walks: Lockstep) -> bool:
        """Adds samples beyond minima (`edges.py`) where so far at most the smallest sample is;
        returns True if there are new ones."""
        each = [(walks.bindings[i], i in walks.edges) for i in walks.live]
        bindings = [b for b, is_edge in each if not is_edge or b in self.edges]
        sides = [s for s in unseen(walks.atoms, bindings) if s not in self.sought]
        self.sought.update(sides)
        symbols = [s for s in _symbols(self.dims) if not self.domains[s].closed]
        new = edge_bindings(sides, bindings, symbols, self.least, self.taken)
        self.edges += new
        is_small = any(is_edge and b not in self.edges for b, is_edge in each)
        is_tried = not is_small and symbols and self.small < _LARGEST_SMALL
        if is_tried:
            self.small = 2 * self.small + 1
        return bool(new or is_tried)

    def _grow(self, walks: Lockstep, small: Sequence[Polynomial]) -> bool:
        """Enlarges the sample sizes of symbols: of the symbols that make a size in `small` larger;
        if there are none, of all symbols in it; of all symbols, if nodes are not valid at the
        samples, as a kernel on a short signal. Widens steps where a quotient needs that. Returns
        True if a domain has changed and none is too large."""
        before, at = dict(self.domains), walks.bindings[walks.live[0]]
        if walks.conflicts and not small:
            small = [Polynomial.variable(symbol) for symbol in before]
        for size in small:
            helps = [
                symbol
                for symbol in size.variables
                if size.at({**at, symbol: _GROWTH**4 * at[symbol]}) > size.at(at)
            ]
            for symbol in helps or size.variables:
                own = before[symbol]
                if not own.closed:
                    self.domains[symbol] = replace(
                        own, low=own.low * _GROWTH, high=own.high * _GROWTH
                    )
        for divided in (atom for atom in walks.atoms if isinstance(atom, Quotient)):
            for symbol in divided.over.variables:
                own = self.domains[symbol]
                if own.step <= divided.below and not own.closed:
                    step = _prime_above(divided.below, self.least)
                    low = max(4, own.low * own.step // step)
                    self.domains[symbol] = Domain(step, low, 4 * low + 16, own.low % step)
        largest = max((d.size(d.high) for d in self.domains.values()), default=0)
        return self.domains != before and largest < _LARGEST


_INTEGERS = (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL)
_SMALL = 2
"""The number n of the smallest sample size in a symbol's domain, at which most shards are empty."""
_LARGEST_SMALL = 23
"""The largest n to try for it; the model may not be valid at smaller sizes."""
_GROWTH = 4
"""Sample sizes that are too small are multiplied by this for the next walk."""
_PATIENCE = 2
"""After this many enlargements without progress, the best earlier samples are taken."""
_ROUNDS = 24
"""Most walks over a model with one kind of domain."""
_WIDEST = 1 << 16
"""Largest size to try as a solution of an equation that cannot be solved in closed form."""
_LARGEST = 1 << 22
"""Sample sizes stay below this."""


def _integers(types: Mapping[str, TypeProto], value: int) -> dict[str, Array]:
    """Returns an array full of `value` for each integer input, by name; large inputs are left
    out."""
    arrays = {}
    for name, type_ in types.items():
        tensor = type_.tensor_type
        shape = [dim.dim_value for dim in tensor.shape.dim]
        is_small = all(d.HasField("dim_value") for d in tensor.shape.dim)
        if tensor.elem_type in _INTEGERS and is_small and math.prod(shape) <= FOLD_LIMIT:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
            arrays[name] = np.full(shape, value, dtype)
    return arrays


def _prime_above(n: int, ranks: int) -> int:
    """Returns the first prime above n that does not divide the number of ranks: samples in steps of
    this prime have every remainder modulo n, the ranks, and all numbers of shards."""
    primes = (p for p in count(n + 1) if all(p % d for d in range(2, math.isqrt(p) + 1)))
    return next(p for p in primes if ranks % p)


def _reference_to_nowhere(weight: TensorProto) -> TensorProto | None:
    """Returns a stub in place of a large weight, for graphs at bindings other than the first, where
    no code reads the value; None for other weights."""
    is_large = math.prod(weight.dims) > FOLD_LIMIT
    if weight.data_location == TensorProto.EXTERNAL or not is_large:
        return None
    stub = TensorProto(name=weight.name, data_type=weight.data_type, dims=weight.dims)
    stub.data_location = TensorProto.EXTERNAL
    stub.external_data.add(key="location", value="")
    return stub
