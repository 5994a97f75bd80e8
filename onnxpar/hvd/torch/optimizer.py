"""An optimizer of PyTorch whose steps use the gradients of all ranks: Horovod's
DistributedOptimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from onnxpar.base.errors import InputError
from onnxpar.hvd.broadcast_state import named_arrays
from onnxpar.hvd.communicator import current
from onnxpar.hvd.compression import Compression, Compressor
from onnxpar.hvd.fusion import default_threshold
from onnxpar.hvd.gradients import GradientReducer
from onnxpar.hvd.process_sets import ProcessSet, global_process_set, members_of
from onnxpar.hvd.reductions import Adasum, Average, ReduceOp, Reduction
from onnxpar.hvd.torch.backward_hooks import Named, Passes
from onnxpar.hvd.torch.buckets import Buckets, filled
from onnxpar.hvd.torch.tensors import array_of, tensor_of


def DistributedOptimizer(
    optimizer: Any,
    named_parameters: Iterable[tuple[str, Any]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Sequence[Sequence[Any]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns an optimizer of the same class, with the same state, whose steps use the gradients of
    all ranks, reduced by `op` while the backward pass goes on.

    optimizer                  updates the parameters on each rank
    named_parameters           names of all parameters, for errors, such as
                               `model.named_parameters()`
    compression                dtype in which gradients are sent
    backward_passes_per_step   number of backward passes per call of `step`, which add up gradients
                               on this rank; the last one reduces them
    op                         Average, Sum, or another reduction; Adasum combines the updates that
                               the ranks would make rather than the gradients
    gradient_predivide_factor  divides gradients before they are added; the sum is divided by the
                               rest of the number of ranks
    groups, num_groups         parameters whose gradients are sent together: lists of parameters, or
                               a number of groups of about equal counts
    sparse_as_dense            reduces sparse gradients as whole tensors, not as their rows
    process_set                ranks that reduce; the others update with their own gradients

    `synchronize` waits for the reduced gradients, for instance to clip them; `step` then uses them
    as they are. A gradient that this rank lacks counts as 0; a gradient that all ranks lack stays
    None.
    """
    if gradient_predivide_factor != 1 and op is not Average:
        raise InputError("gradient_predivide_factor needs op=hvd.Average")
    factor = gradient_predivide_factor
    reducer = partial(
        GradientReducer,
        reduction=Reduction(op, 1 / factor, factor),
        process_set=process_set,
        compression=compression,
        threshold=float("inf"),
        sparse_as_dense=sparse_as_dense,
    )
    named = _named(optimizer, named_parameters)
    trained = {name: each for name, each in named.items() if each.requires_grad}
    parts = _groups(trained, num_groups, groups)
    base = type(optimizer)
    distributed: Any = object.__new__(type(base.__name__, (_Distributed, base), {}))
    vars(distributed).update(
        {name: value for name, value in vars(optimizer).items() if name != "step"}
    )
    distributed._names = None if named_parameters is None else named
    distributed._reductions = Reductions(parts, reducer, op)
    distributed.set_backward_passes_per_step(backward_passes_per_step)
    return distributed


class Reductions(Passes):
    """Reduces the gradients of an optimizer's parameters over the ranks.

    groups   the parameters whose gradients are sent together, by name
    reducer  returns an object that reduces gradients, for each group
    op       Adasum combines updates instead of gradients, so nothing is sent in the backward pass

    The reduction starts in the last of `passes` backward passes.
    """

    def __init__(
        self,
        groups: Sequence[Named],
        reducer: Callable[[], GradientReducer],
        op: ReduceOp,
    ) -> None:
        self.passes = 1
        self.reducer = reducer()
        self.named: dict[str, Any] = {}
        self.is_done = False
        """True if the gradients are reduced over all ranks."""
        process_set = self.reducer.process_set
        self._included = process_set.included()
        self.combines_updates = self._included and op is Adasum and current().size > 1
        self._times: Counter[str] = Counter()
        """Number of gradients of each parameter since the last step."""
        self._buckets = Buckets(_label(process_set), process_set, [], reducer)
        for group in groups:
            self.add(group)

    def add(self, group: Named) -> None:
        """Also reduces the gradients of these parameters, by name, as a group of their own."""
        self.named |= group
        if group and self._included and not self.combines_updates:
            self._buckets.add(group)
            self.watch(group)

    @property
    def waits(self) -> bool:
        """True if there are gradients that no step has used yet; False after a failed pass."""
        return bool(self._times) and not self.has_failed

    def has_gradient(self, name: str) -> None:
        """Counts a gradient of a parameter, and marks it ready to send after the last of `passes`.
        Errors: InputError if it is one gradient too many."""
        self.enter()
        self.is_done = False
        self._times[name] += 1
        if self._times[name] > self.passes:
            raise InputError(
                f"DistributedOptimizer: {name!r} has had {self._times[name]} gradients since the "
                f"last step; call step(), or give backward_passes_per_step={self._times[name]}"
            )
        if self._times[name] == self.passes:
            self._buckets.ready(name)

    def begin_pass(self) -> None:
        if self.has_failed:
            self.reset()
        self._buckets.count()

    def end_pass(self) -> None:
        """Does nothing, because `finish` waits for the reduced gradients."""

    def finish(self) -> None:
        """Waits until the gradients are reduced over all ranks, and written to the parameters."""
        if self._included and not self.combines_updates and not self.is_done:
            self._times.clear()
            with torch.no_grad():
                self._buckets.finish()
            self.is_done = True

    def reset(self) -> None:
        """Forgets the gradients since the last step."""
        self._times.clear()
        self._buckets.reset()
        self.is_done = False


class _Distributed:
    """The methods that `DistributedOptimizer` adds to a class of optimizers."""

    _names: Named | None
    _reductions: Reductions
    _synchronizes = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters by the gradients reduced over all ranks. Returns the loss that
        `closure` returns, as in torch."""
        inner: Any = super()
        if self._reductions.combines_updates:
            loss = self._combine(lambda: inner.step(closure))
        elif closure is not None:
            loss = inner.step(lambda: self._reduced(closure))
        else:
            if self._synchronizes:
                self.synchronize()
            loss = inner.step()
        self._reductions.reset()
        return loss

    def synchronize(self) -> None:
        """Waits until the gradients are reduced over all ranks, and written to the parameters.
        Parameters that the optimizer got since the last call are reduced, too."""
        known = {id(parameter) for parameter in self._reductions.named.values()}
        named = _named(self, None if self._names is None else self._names.items())
        self._reductions.add(
            {n: p for n, p in named.items() if p.requires_grad and id(p) not in known}
        )
        self._reductions.finish()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Returns a context in which `step` uses the gradients as they are, after `synchronize`.
        Errors: InputError for Adasum."""
        if self._reductions.combines_updates:
            raise InputError("Adasum combines updates inside step, which cannot skip it")
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets the number of backward passes per step, and forgets the gradients since the last
        step."""
        if passes < 1:
            raise InputError(f"backward_passes_per_step={passes} must be at least 1")
        self._reductions.reset()
        self._reductions.passes = passes

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients. Errors: InputError if neither `step` nor `synchronize` has used the
        last pass's gradients yet."""
        if self._reductions.waits:
            raise InputError("zero_grad() before step() or synchronize() would lose gradients")
        self._reductions.reset()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Any) -> None:
        """Restores a state that `state_dict` returned, and forgets the gradients since the last
        step."""
        self._reductions.reset()
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def __reduce_ex__(self, _: Any) -> Any:
        raise InputError("a DistributedOptimizer cannot be copied; wrap a copy of the inner one")

    def _reduced(self, closure: Callable[[], Any]) -> Any:
        """Runs a closure, which computes gradients, waits until they are reduced, and returns its
        loss."""
        loss = closure()
        if self._synchronizes:
            self.synchronize()
        self._reductions.reset()
        return loss

    def _combine(self, step: Callable[[], Any]) -> Any:
        """Runs `step` on this rank, then replaces the update of each parameter by the Adasum of all
        ranks' updates. Returns the result of `step`."""
        named = self._reductions.named
        before = {name: parameter.detach().clone() for name, parameter in named.items()}
        loss = step()
        updates = {n: array_of(p.detach() - before[n]) for n, p in named.items()}
        for name, update in self._reductions.reducer.reduce(updates).items():
            parameter = named[name]
            parameter.data.copy_(before[name] + tensor_of(update, parameter.dtype))
        return loss


def _label(process_set: ProcessSet) -> str:
    """Returns the name of an optimizer's collectives, equal on all ranks: it has the ranks and a
    count."""
    if not process_set.included():
        return "optimizer"
    among = f"optimizer over ranks {list(members_of(process_set, 'the optimizer').ranks)}"
    counts = current().counts
    counts[among] += 1
    return f"{among}, number {counts[among]}"


def _named(optimizer: Any, given: Iterable[tuple[str, Any]] | None) -> dict[str, Any]:
    """Returns the parameters of an optimizer by name: the names in `given`, or "parameter 0 of
    group 0". Errors: InputError if `given` lacks a parameter."""
    own = [
        (f"parameter {index} of group {number}", parameter)
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
    ]
    if given is None:
        return dict(own)
    pairs = list(given)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise InputError("named_parameters: give pairs of a name and a parameter")
    names = {
        id(parameter): name for name, parameter in named_arrays(pairs, "named_parameters").items()
    }
    for where, parameter in own:
        if id(parameter) not in names:
            raise InputError(f"named_parameters: {where} of the optimizer is not among them")
    return {names[id(parameter)]: parameter for _, parameter in own}


def _groups(
    named: Named, count: int, groups: Sequence[Sequence[Any]] | None
) -> list[dict[str, Any]]:
    """Returns the groups of parameters whose gradients are sent together, each by name. The last
    parameters of a model come first, as their gradients are ready first.

    count   number of groups of about equal counts; 0 forms groups by size
    groups  groups of parameters that the user lists; the rest are grouped by size
    """
    in_turn = list(reversed(list(named.items())))
    if groups is None and count < 1:
        return filled(dict(in_turn), default_threshold())
    if groups is None:
        parts = np.array_split(np.arange(len(in_turn)), count)
        return [dict(in_turn[place] for place in part) for part in parts if len(part)]
    names = {id(parameter): name for name, parameter in in_turn}
    buckets: list[dict[str, Any]] = []
    for group in groups:
        if not all(id(parameter) in names for parameter in group):
            raise InputError("groups: a tensor is in two groups, or no parameter of the optimizer")
        buckets.append({names.pop(id(parameter)): parameter for parameter in group})
    return buckets + filled({name: named[name] for name in names.values()}, default_threshold())
