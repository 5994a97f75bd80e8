"""Reduces gradients of PyTorch's parameters over the ranks while the backward pass goes on. A
bucket is a group of gradients that are sent together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from onnxpar.hvd.allreduce import allreduce
from onnxpar.hvd.communicator import current
from onnxpar.hvd.handles import Handle
from onnxpar.hvd.process_sets import ProcessSet
from onnxpar.hvd.reductions import Max
from onnxpar.hvd.torch.backward_hooks import Named
from onnxpar.hvd.torch.tensors import array_of, put_gradient, slices_of


class Reducer(Protocol):
    """An object that reduces the gradients of a bucket over a process set: `begin` starts, and
    returns a handle of the reduced gradients by name. `called` begins the names of its
    collectives."""

    process_set: ProcessSet

    def begin(self, grads: Mapping[str, Any], called: str) -> Handle[dict[str, Any]]: ...


class Buckets:
    """Reduces the gradients of parameters, bucket by bucket, as soon as all gradients of a bucket
    exist.

    label        the name in errors; equal on all ranks
    process_set  the ranks
    groups       the parameters of each bucket, by name; all ranks send the buckets in this order
    reducer      returns an object that reduces a bucket, for each bucket
    sparse       names of parameters with sparse gradients, also on ranks where they have none

    A gradient that this rank lacks counts as 0; a gradient that all ranks lack stays None.
    """

    def __init__(
        self,
        label: str,
        process_set: ProcessSet,
        groups: Sequence[Named],
        reducer: Callable[[], Reducer],
        sparse: Iterable[str] = (),
    ) -> None:
        self._label = label
        self._process_set = process_set
        self._reducer = reducer
        self._sparse = set(sparse)
        self._called = label
        self._groups: list[Named] = []
        self._reducers: list[Reducer] = []
        self._places: dict[str, int] = {}
        self.reset()
        for group in groups:
            self.add(group)

    def add(self, group: Named) -> None:
        """Adds a bucket of these parameters, by name."""
        self._places.update(dict.fromkeys(group, len(self._groups)))
        self._missing.append(len(group))
        self._groups.append(group)
        self._reducers.append(self._reducer())

    def count(self) -> None:
        """Counts a backward pass that begins. The number of the pass is part of the names of its
        collectives: after a rank has skipped a pass, because of an error, names differ and all
        ranks notice."""
        counts = current().counts
        counts[self._label] += 1
        self._called = f"{self._label}, backward pass {counts[self._label]}"

    def reset(self) -> None:
        """Forgets which gradients of the pass are ready."""
        self._missing = [len(group) for group in self._groups]
        self._found: dict[str, bool] = {}
        self._handles: list[Handle[dict[str, Any]]] = []

    def is_sent(self, name: str) -> bool:
        """Returns True if the bucket of this parameter is sent, so that its gradient may no longer
        change."""
        return self._places[name] < len(self._handles)

    def ready(self, name: str) -> None:
        """Records that this rank has the gradient of a parameter. Sends each bucket whose gradients
        are all ready, unless an earlier bucket waits."""
        self._missing[self._places[name]] -= 1
        while len(self._handles) < len(self._groups) and not self._missing[len(self._handles)]:
            self._start()

    def finish(self) -> None:
        """Sends the buckets that are not sent yet, and writes the reduced gradients to the
        parameters."""
        try:
            self._finish()
        finally:
            self.reset()

    def _finish(self) -> None:
        """Sends the buckets that are not sent yet, and writes the reduced gradients to the
        parameters that have a gradient on any rank."""
        while len(self._handles) < len(self._groups):
            self._start()
        flags = np.array(list(self._found.values()), np.uint8)
        name = f"{self._called}, which are used"
        used = allreduce(flags, op=Max, name=name, process_set=self._process_set)
        on_any = dict(zip(self._found, used.tolist(), strict=True))
        for group, handle in zip(self._groups, self._handles, strict=True):
            results = handle()
            for name, parameter in group.items():
                if on_any[name]:
                    put_gradient(parameter, results[name])

    def _start(self) -> None:
        """Sends the next bucket."""
        place = len(self._handles)
        group, reducer = self._groups[place], self._reducers[place]
        for name, parameter in group.items():
            self._found[name] = parameter.grad is not None
        grads = {name: self._sent(name, parameter) for name, parameter in group.items()}
        self._handles.append(reducer.begin(grads, f"{self._called}, bucket {place}"))

    def _sent(self, name: str, parameter: Any) -> Any:
        """Returns what this rank sends for a parameter: its gradient as an array or
        `IndexedSlices`, or zeros."""
        grad, what = parameter.grad, f"the gradient of {name!r}"
        if grad is not None and grad.layout is torch.sparse_coo:
            self._sparse.add(name)
        if name in self._sparse:
            return slices_of(parameter, grad)
        return array_of(torch.zeros_like(parameter) if grad is None else grad, what)


def filled(named: Named, limit: float) -> list[dict[str, Any]]:
    """Returns the parameters of each bucket, by name, in their order. A bucket holds neighbours of
    one dtype: up to `limit` bytes, or a single larger parameter."""
    buckets: list[dict[str, Any]] = []
    used, dtype = 0.0, None
    for name, parameter in named.items():
        bytes_ = parameter.numel() * parameter.element_size()
        if not buckets or used + bytes_ > limit or parameter.dtype != dtype:
            buckets.append({})
            used, dtype = 0.0, parameter.dtype
        buckets[-1][name] = parameter
        used += bytes_
    return buckets
