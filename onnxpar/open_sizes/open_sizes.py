"""Models with open sizes: at which bindings they are inferred, and their graph at each."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto, TypeProto

from onnxpar.base.arrays import Array
from onnxpar.errors import StrategyError
from onnxpar.ir.scopes import open_scopes
from onnxpar.ir.stored import FOLD_LIMIT, copy_with_stubs
from onnxpar.ir.tensors import Whole
from onnxpar.model.misfits import check_fits
from onnxpar.model.shapes import keep_nodes
from onnxpar.open_sizes.branch_sizes import free_sizes
from onnxpar.open_sizes.cache_sizes import CacheSizes, cache_sizes
from onnxpar.open_sizes.lockstep import Lockstep, Strides, Unsolved
from onnxpar.open_sizes.typical import Profile, Ties, Typical, typical_sizes
from onnxpar.symbols.fits import DOMAINS, Domain, sample
from onnxpar.symbols.symbols import Binding, Polynomial, Quotient, Variable

OpenDims = Mapping[tuple[str, int], Polynomial]
"""Open dimensions of inputs, by name and axis."""


@dataclass(frozen=True)
class OpenSizes:
    """What a model leaves open. `graph(i)` is the model's graph at `bindings[i]`; the same nodes
    and tensors at each, with other sizes. `labels` are the symbols as `--dim` knows them; nodes
    whose results have sizes without a closed form are among the `whole` ones. `typical` are sizes
    for costs, with weights, and `is_told` whether a user gave them; `caches` say which sizes their
    kernels refuse together. Inputs may have other sizes than their symbols have in dimensions that
    are `free`."""

    symbols: tuple[str, ...]
    bindings: list[Binding]
    dims: OpenDims
    graph: Callable[[int], gs.Graph]
    quotients: tuple[Quotient, ...] = ()
    labels: tuple[str, ...] = ()
    whole: Whole = field(default_factory=dict)
    typical: tuple[Profile, ...] = ()
    is_told: bool = False
    caches: Sequence[CacheSizes] = ()
    free: frozenset[tuple[str, int]] = frozenset()

    @property
    def flags(self) -> str:
        """What binds every symbol."""
        return " ".join(f"--dim {label}=N" for label in self.labels)

    def variables(self) -> dict[Variable, list[int]]:
        """The values of every symbol and quotient."""
        found: dict[Variable, list[int]] = {s: [b[s] for b in self.bindings] for s in self.symbols}
        return found | {q: [q.at(b) for b in self.bindings] for q in self.quotients}


def infer_open(
    proto: onnx.ModelProto,
    dims: OpenDims,
    least: int,
    prepare: Callable[[onnx.ModelProto], gs.Graph],
    typical: Typical | None = None,
) -> OpenSizes:
    """Folds and infers the model at sample sizes of at least `least`, in place.

    Where symbols turn out to be one size, or one the sum of others (a mask over past and present)
    or a multiple of a number (an image that is halved and doubled), they are tied; where sizes do
    not fit the model at all (a table of positions), others are tried. `prepare` makes a graph of
    an inferred model. Errors: ModelError for a node that cannot run on its operands.
    """
    open_scopes(proto.graph)  # bodies may call different weights by one name
    labels = _symbols(dims)
    # No sample may cut a table so that nothing is left of it, or a single row.
    taken = {d - n for weight in proto.graph.initializer for d in weight.dims for n in (0, 1)}
    search = _Search(proto, dims, least, taken)
    dims, walks = search.run()
    live = [walks.walks[i] for i in walks.live]
    for name, size in search.limited:
        warnings.warn(
            f"{name} is {size} in every run, as ops of the model need that at the sizes tried; "
            f"where it runs at others, give --dim {name}=N",
            stacklevel=2,
        )
    for node in walks.conflicts:
        check_fits(live, node)
    typical = typical or Typical()
    symbols, ties = tuple(walks.bindings[0]), Ties(tuple(search.ties))
    caches = cache_sizes(proto.graph, walks)
    fits = [search.suits, search.fits]
    profiles = typical_sizes(typical, symbols, ties, dims, caches, fits)
    keep_nodes(proto.graph, walks.kept)
    free = free_sizes(proto.graph, dims, walks.sizes)
    bare = copy_with_stubs(proto, _reference_to_nowhere)
    bindings = [walks.bindings[i] for i in walks.live]

    def graph(i: int) -> gs.Graph:
        model = proto
        if i:
            model = onnx.ModelProto()
            model.CopyFrom(bare)
        live[i].declare(model.graph)
        return prepare(model)

    quotients = tuple(walks.quotients)
    whole = dict.fromkeys(walks.lost)
    told = bool(typical.profiles)
    return OpenSizes(
        tuple(bindings[0]),
        bindings,
        dims,
        graph,
        quotients,
        labels,
        whole,
        profiles,
        told,
        caches,
        free,
    )


def _symbols(dims: OpenDims) -> tuple[str, ...]:
    """The symbols in the order of the inputs."""
    return tuple(dict.fromkeys(v for size in dims.values() for v in size.variables))


class _Search:
    """Tries sample sizes until the model fits them, and no open size is too small to be split."""

    def __init__(
        self, proto: onnx.ModelProto, dims: OpenDims, least: int, taken: Iterable[int]
    ) -> None:
        self.proto = proto
        self.dims = dims
        self.least = least
        self.taken = set(taken)
        self.domains: dict[str, Domain] = {}
        self.strides: Strides = {}
        self.ties: list[tuple[str, Polynomial]] = []
        self.limited: list[tuple[str, Polynomial]] = []
        self.best: tuple[tuple[int, int], OpenDims, Lockstep] | None = None

    def run(self) -> tuple[OpenDims, Lockstep]:
        """The dimensions, written in the symbols that are left, and the best walk."""
        for general in DOMAINS:
            self.domains = {}
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
                if self.best is None or badness <= self.best[0]:
                    self.best = (badness, self.dims, walks)
                elif badness[0] > self.best[0][0]:
                    break  # what has grown does not fit
                if not self._grow(walks, small):
                    break
            if self.best is not None and not self.best[0][0]:
                break
        assert self.best is not None
        _, dims, walks = self.best
        for odd in walks.unsolved[:1]:
            raise StrategyError(
                f"{odd.node.op_type} '{odd.node.name or odd.node.output[0]}' needs two sizes to be "
                f"equal, {odd.first} and {odd.second}, which does not tell what the open ones are; "
                f"give " + " ".join(f"--dim {s}=N" for s in _symbols(self.dims))
            )
        return dims, walks

    def fits(self, binding: Binding) -> bool:
        """Whether the shapes of the model allow these sizes, as they do those sampled."""
        assert self.best is not None
        return self._conflicts(binding) <= len(self.best[2].conflicts)

    def suits(self, binding: Binding) -> bool:
        """Whether they also fit where all integers that are fed are 0, or 1: positions that are
        computed from a mask or from token ids must lie in their table. What does not fit with
        these values at sizes of 1 does not count."""
        if not self.fits(binding):
            return False
        for value in (0, 1):
            odd = self._conflicts(binding, value)
            if odd and odd > self._conflicts(dict.fromkeys(binding, 1), value):
                return False
        return True

    def _conflicts(self, binding: Binding, value: int | None = None) -> int:
        """How many nodes do not fit these sizes, where all integers that are fed have a value."""
        types = self._types(binding)
        alone = Lockstep(self.proto, [types], [binding], _symbols(self.dims))
        if value is not None:
            alone.walks[0].suppose(_integers(types, value))
        with np.errstate(all="ignore"):  # what is folded may be the logarithm of 0
            alone.run()
        return len(alone.conflicts)

    def _walk(self, general: Domain) -> Lockstep:
        symbols = sorted(_symbols(self.dims))
        self.domains = {s: self.domains.get(s, general) for s in symbols}
        bindings = sample(self.domains, self.least, self.taken)
        closed = [s for s, domain in self.domains.items() if domain.closed]
        inputs = [self._types(b) for b in bindings]
        order = _symbols(self.dims)
        walks = Lockstep(self.proto, inputs, bindings, order, self.strides, closed)
        walks.run()
        return walks

    def _types(self, binding: Binding) -> dict[str, TypeProto]:
        found = {}
        for tensor in self.proto.graph.input:
            type_ = TypeProto()
            type_.CopyFrom(tensor.type)
            for axis, dim in enumerate(type_.tensor_type.shape.dim):
                if (tensor.name, axis) in self.dims:
                    dim.dim_value = self.dims[tensor.name, axis].at(binding)
            found[tensor.name] = type_
        return found

    def _bound(self, unsolved: Sequence[Unsolved]) -> bool:
        """Keeps symbols within the sizes that nodes need, where that is a range; whether there is
        anything new."""
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
        """Open sizes that some sample leaves too few elements of."""
        bindings = [walks.bindings[i] for i in walks.live]
        small = [s for s in walks.found if any(s.at(b) < self.least for b in bindings)]
        return [*small, *walks.void]

    def _grow(self, walks: Lockstep, small: Sequence[Polynomial]) -> bool:
        """Lets symbols have larger sizes, of wider steps, where a quotient needs them."""
        before = dict(self.domains)
        for size in small:
            for symbol in size.variables:
                own = before[symbol]
                if not own.closed:
                    self.domains[symbol] = replace(own, low=own.low * 4, high=own.high * 4)
        for divided in walks.quotients:
            for symbol in divided.over.variables:
                own = self.domains[symbol]
                if own.step <= divided.below and not own.closed:
                    step = _prime_above(divided.below, self.least)
                    low = max(4, own.low * own.step // step)
                    self.domains[symbol] = Domain(step, low, 4 * low + 16, own.low % step)
        largest = max((d.size(d.high) for d in self.domains.values()), default=0)
        return self.domains != before and largest < _LARGEST


_INTEGERS = (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL)
_ROUNDS = 24
"""Walks over a model at most, for each way to sample its symbols."""
_WIDEST = 1 << 16
"""Up to which size the sizes are looked for that a node needs."""
_LARGEST = 1 << 22
"""The size up to which samples grow."""


def _integers(types: Mapping[str, TypeProto], value: int) -> dict[str, Array]:
    """Inputs of integers that all have one value; those too large to reckon with are left out."""
    found = {}
    for name, type_ in types.items():
        tensor = type_.tensor_type
        shape = [dim.dim_value for dim in tensor.shape.dim]
        is_small = all(d.HasField("dim_value") for d in tensor.shape.dim)
        if tensor.elem_type in _INTEGERS and is_small and math.prod(shape) <= FOLD_LIMIT:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
            found[name] = np.full(shape, value, dtype)
    return found


def _prime_above(n: int, ranks: int) -> int:
    """The first prime above a number that does not divide the number of ranks: steps of it leave
    every remainder of both, and of all numbers of parts."""
    primes = (p for p in count(n + 1) if all(p % d for d in range(2, math.isqrt(p) + 1)))
    return next(p for p in primes if ranks % p)


def _reference_to_nowhere(weight: TensorProto) -> TensorProto | None:
    """What stands in for a large weight at the other bindings, where nobody reads it."""
    is_large = math.prod(weight.dims) > FOLD_LIMIT
    if weight.data_location == TensorProto.EXTERNAL or not is_large:
        return None
    stub = TensorProto(name=weight.name, data_type=weight.data_type, dims=weight.dims)
    stub.data_location = TensorProto.EXTERNAL
    stub.external_data.add(key="location", value="")
    return stub
