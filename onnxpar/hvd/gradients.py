"""Reduces the gradients of a model, by parameter name, over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.hvd.compression import Compression, Compressor, prepared
from onnxpar.hvd.cycles import Cycles
from onnxpar.hvd.fusion import Fusion, Layout, layout_of
from onnxpar.hvd.handles import Handle, Together
from onnxpar.hvd.process_sets import Members, ProcessSet, members_of
from onnxpar.hvd.reduce_work import Reduce
from onnxpar.hvd.reductions import Average, Reduction, Sum, scaled
from onnxpar.hvd.sparse import IndexedSlices, check_sparse, gather_sparse
from onnxpar.hvd.two_bit import TwoBit
from onnxpar.lowering.compression import KINDS, NONE, TWO_BIT
from onnxpar.runtime.ranks import collectives

Gradients = Mapping[str, Any]
"""Arrays or `IndexedSlices`, by the name of their parameter."""
Groups = int | Sequence[Sequence[Any]] | None


def compression_of(compression: Compressor, gc_type: str) -> Compressor:
    """Returns the compression that Horovod's argument `compression` requests, or `gc_type`, the
    kind of compression in graphs: "float16", "bfloat16", "2bit" or "none". Errors: InputError if
    both request a compression, or for an unknown type."""
    chosen = {NONE: compression, TWO_BIT: compression, "float16": Compression.fp16}
    chosen["bfloat16"] = Compression.bf16
    if gc_type not in chosen:
        raise InputError(f"gc_type={gc_type!r} is unknown; choose {', '.join(KINDS)}")
    if gc_type != NONE and compression is not Compression.none:
        raise InputError("compression and gc_type exclude each other; give only one of them")
    return chosen[gc_type]


@dataclass
class GradientReducer:
    """Reduces gradients, by parameter name, over a process set; keeps its buffers from call to
    call.

    threshold        size in bytes of the buffers in which gradients are sent together
    groups           gradients that have a buffer of their own: lists of names or parameters, or a
                     number of groups of about equal counts
    named            the parameters by name, to find the arrays in `groups`
    sparse_as_dense  reduces `IndexedSlices` as whole arrays
    two_bit          sums dense gradients in two bits per element; for Average, each rank divides
                     its gradients by the number of ranks before
    least_bytes      smaller gradients are not compressed
    """

    reduction: Reduction
    process_set: ProcessSet
    compression: Compressor
    threshold: float
    groups: Groups = None
    named: Mapping[str, Array] = field(default_factory=dict)
    sparse_as_dense: bool = False
    two_bit: TwoBit | None = None
    least_bytes: int = 0

    def __post_init__(self) -> None:
        self._fusions: dict[str, Fusion] = {}
        if self.threshold < 0:
            raise InputError(f"fusion_threshold={self.threshold} must be at least 0")
        if self.two_bit and self.reduction.op not in (Average, Sum):
            raise InputError(f"gc_type={TWO_BIT!r} needs op=hvd.Average or op=hvd.Sum")

    def reduce(self, grads: Gradients) -> dict[str, Any]:
        """Returns the reduced gradients by name; the next call overwrites the returned arrays.
        Errors: InputError if a gradient cannot be reduced, and, on every rank, if names, dtypes or
        shapes differ between ranks; RankError as for `allreduce`."""
        members, dense, sparse = self._checked(grads)
        if members.communicator.cycles is not None and not self.two_bit:
            return self._in_cycles(members.communicator.cycles, members, dense, sparse).result()
        run = partial(self._all, members, dense, sparse)
        return members.communicator.ordered(run, "ALLREDUCE", list(grads))

    def begin(self, grads: Gradients, called: str) -> Handle[dict[str, Any]]:
        """Starts to reduce gradients, and returns a handle of the result of `reduce`. `called`
        begins the names of the collectives. Do not change the gradients until the result is
        ready."""
        members, dense, sparse = self._checked(grads)
        prefix = f"{called}, "
        if members.communicator.cycles is not None and not self.two_bit:
            cycles = members.communicator.cycles
            return Handle(self._in_cycles(cycles, members, dense, sparse, prefix))
        run = partial(self._all, members, dense, sparse, prefix)
        return Handle(members.communicator.begin(run, "ALLREDUCE", list(grads)))

    def _checked(
        self, grads: Gradients
    ) -> tuple[Members, dict[str, Array], dict[str, IndexedSlices]]:
        """Returns the ranks, and the dense and the sparse gradients, each in the order of their
        names. Errors: InputError if a gradient cannot be reduced."""
        members = members_of(self.process_set, "gradients")
        dense: dict[str, Array] = {}
        sparse: dict[str, IndexedSlices] = {}
        for name in sorted(grads):
            grad, what = grads[name], f"the gradient of {name!r}"
            if isinstance(grad, IndexedSlices) and not self.sparse_as_dense:
                sparse[name] = check_sparse(grad, Reduction(self.reduction.op), what)
                continue
            array = grad.dense() if isinstance(grad, IndexedSlices) else grad
            dense[name] = collectives.as_exchangeable(array, what)
            self.reduction.check(dense[name].dtype, members.size, what)
        return members, dense, sparse

    def _all(
        self,
        members: Members,
        dense: Mapping[str, Array],
        sparse: Mapping[str, IndexedSlices],
        prefix: str = "",
    ) -> dict[str, Any]:
        """Reduces all gradients at once, and returns them by name: dense ones in buffers, sparse
        ones one after the other."""
        reduced: dict[str, Any] = self._dense(members, dense, prefix) if dense else {}
        for name, grad in sparse.items():
            plain = Reduction(self.reduction.op)
            reduced[name] = _gathered(members, grad, plain, prefix + name)
        return reduced

    def _in_cycles(
        self,
        cycles: Cycles,
        members: Members,
        dense: Mapping[str, Array],
        sparse: Mapping[str, IndexedSlices],
        prefix: str = "",
    ) -> Together[dict[str, Any]]:
        """Starts to reduce each gradient by itself, as `Cycles` fuse gradients into buffers.
        Returns a handle of all reduced gradients by name."""
        works: dict[str, Any] = {}
        for name, array in dense.items():
            small = array.nbytes < self.least_bytes
            compression = Compression.none if small else self.compression
            what, called = f"the gradient of {name!r}", prefix + name
            works[name] = Reduce.of(members, called, array, compression, self.reduction, what)
        plain = Reduction(self.reduction.op)
        for name, grad in sparse.items():
            works[name] = partial(_gathered, members, grad, plain, prefix + name)
        futures = cycles.submit(list(works.values()), "gradients", prefix + ", ".join(works))
        return Together(futures, lambda results: dict(zip(works, results, strict=True)))

    def _dense(self, members: Members, grads: Mapping[str, Array], prefix: str) -> dict[str, Array]:
        """Returns the reduced dense gradients by name: gradients of at least `least_bytes`
        compressed, the others as they are."""
        small = {n: array for n, array in grads.items() if array.nbytes < self.least_bytes}
        large = {n: array for n, array in grads.items() if n not in small}
        reduced: dict[str, Array] = {}
        if large and self.two_bit:
            reduced |= self._summed(members, self.two_bit, large, prefix)
        elif large:
            reduced |= self._fused(members, large, self.compression, "gradients", prefix)
        if small:
            reduced |= self._fused(members, small, Compression.none, "small gradients", prefix)
        return reduced

    def _summed(
        self, members: Members, two_bit: TwoBit, grads: Mapping[str, Array], prefix: str
    ) -> dict[str, Array]:
        """Returns the sums (for Average, the means) of gradients by name, sent in two bits per
        element."""
        factor = 1 / members.size if self.reduction.op is Average else 1.0
        parts = [scaled(array, factor) for array in grads.values()]
        summed = two_bit.sum(members, list(grads), parts, f"{prefix}gradients")
        return dict(zip(grads, summed, strict=True))

    def _fused(
        self,
        members: Members,
        grads: Mapping[str, Array],
        compression: Compressor,
        what: str,
        prefix: str,
    ) -> dict[str, Array]:
        """Returns the gradients by name, reduced in buffers. `what` names the buffers, which are
        kept for the next call with the same gradients."""
        names = list(grads)
        cast, wires, restore = prepared(compression, list(grads.values()))
        layout = layout_of(names, wires)
        fusion = self._fusions.get(what)
        if fusion is None or (fusion.layout, fusion.threshold) != (layout, self.threshold):
            fusion = Fusion(layout, cast, self.threshold, self._grouped(layout))
            self._fusions[what] = fusion
        results = restore(fusion.reduce(members, wires, self.reduction, prefix + what))
        return dict(zip(names, results, strict=True))

    def _grouped(self, layout: Layout) -> list[list[int]] | None:
        """Returns the indices in `layout` of the gradients of each group; a gradient in no group is
        a group of its own. None if there are no groups."""
        if self.groups is None:
            return None
        names = [tensor.name for tensor in layout]
        if isinstance(self.groups, int):
            if self.groups < 1:
                raise InputError(f"groups={self.groups} must be at least 1, or a list of lists")
            parts = np.array_split(np.arange(len(names)), self.groups)
            return [part.tolist() for part in parts if len(part)]
        groups = [[self._name(each) for each in group] for group in self.groups]
        listed = [name for group in groups for name in group]
        if len(set(listed)) < len(listed):
            raise InputError("groups: a parameter can only be in one group")
        indices = [[names.index(name) for name in group if name in names] for group in groups]
        rest = [[index] for index, name in enumerate(names) if name not in listed]
        return [group for group in indices if group] + rest

    def _name(self, parameter: Any) -> str:
        """Returns the name of a parameter in `groups`: `parameter` is the name, or one of the
        arrays in `named`."""
        if isinstance(parameter, str):
            return parameter
        for name, array in self.named.items():
            if array is parameter:
                return name
        raise InputError("groups: list names of parameters, or arrays of named_parameters")


def _gathered(
    members: Members, grad: IndexedSlices, reduction: Reduction, name: str
) -> IndexedSlices:
    """Returns the rows of all ranks' gradients, with each index once."""
    return gather_sparse(members, grad, reduction, name).merged()
