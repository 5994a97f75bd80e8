"""Reduces gradients of PyTorch's parameters over the ranks during backward passes."""

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
    """An object that reduces the gradients of a bucket over a process set."""

    process_set: ProcessSet

    def begin(self, grads: Mapping[str, Any], called: str) -> Handle[dict[str, Any]]: ...


class Buckets:
    """Reduces the gradients of parameters, bucket by bucket.

    label        the name in errors; equal on all ranks
    process_set  the ranks
    groups       the parameters of each bucket, by name; all ranks send the buckets in this order
    reducer      returns an object that reduces a bucket, and keeps its buffers
    sparse       parameters with sparse gradients, even on ranks where they have none

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
        """Adds a bucket."""
        self._places.update(dict.fromkeys(group, len(self._groups)))
        self._missing.append(len(group))
        self._groups.append(group)
        self._reducers.append(self._reducer())

    def count(self) -> None:
        """Records that a backward pass begins. The number of the pass is part of the names of
        collectives: if a rank has skipped a pass after an error, all ranks notice."""
        counts = current().counts
        counts[self._label] += 1
        self._called = f"{self._label}, backward pass {counts[self._label]}"

    def reset(self) -> None:
        """Forgets which gradients are ready."""
        self._missing = [len(group) for group in self._groups]
        self._found: dict[str, bool] = {}
        self._handles: list[Handle[dict[str, Any]]] = []

    def is_sent(self, name: str) -> bool:
        """Returns True if the gradient of this parameter can no longer change."""
        return self._places[name] < len(self._handles)

    def ready(self, name: str) -> None:
        """Records that this rank has the gradient of a parameter. Starts full buckets in their
        turn."""
        self._missing[self._places[name]] -= 1
        while len(self._handles) < len(self._groups) and not self._missing[len(self._handles)]:
            self._start()

    def finish(self) -> None:
        """Sends the remaining buckets, and writes the reduced gradients to the parameters."""
        try:
            self._finish()
        finally:
            self.reset()

    def _finish(self) -> None:
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
        """Starts the next bucket."""
        place = len(self._handles)
        group, reducer = self._groups[place], self._reducers[place]
        for name, parameter in group.items():
            self._found[name] = parameter.grad is not None
        grads = {name: self._sent(name, parameter) for name, parameter in group.items()}
        self._handles.append(reducer.begin(grads, f"{self._called}, bucket {place}"))

    def _sent(self, name: str, parameter: Any) -> Any:
        grad, what = parameter.grad, f"the gradient of {name!r}"
        if grad is not None and grad.layout is torch.sparse_coo:
            self._sparse.add(name)
        if name in self._sparse:
            return slices_of(parameter, grad)
        return array_of(torch.zeros_like(parameter) if grad is None else grad, what)


def filled(named: Named, limit: float) -> list[dict[str, Any]]:
    """Returns buckets of one dtype, of up to `limit` bytes or of one larger parameter, in order."""
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
