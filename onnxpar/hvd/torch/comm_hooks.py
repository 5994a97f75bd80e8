"""Communication hooks: functions of users that reduce buckets of gradients, as in torch's
DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from onnxpar.base.errors import InputError
from onnxpar.hvd.handles import Handle
from onnxpar.hvd.process_sets import ProcessSet
from onnxpar.hvd.sparse import IndexedSlices
from onnxpar.hvd.torch.handles import converted
from onnxpar.hvd.torch.tensors import array_of, tensor_of


class GradBucket:
    """The gradients of some parameters, in one tensor; with the methods of torch's GradBucket."""

    def __init__(self, index: int, is_last: bool, buffer: Any, parameters: list[Any]) -> None:
        self._index = index
        self._is_last = is_last
        self._buffer = buffer
        self._parameters = parameters

    def index(self) -> int:
        """Returns the number of the bucket, from 0."""
        return self._index

    def is_last(self) -> bool:
        """Returns True for the last bucket of a backward pass."""
        return self._is_last

    def buffer(self) -> Any:
        """Returns the gradients, flattened and concatenated."""
        return self._buffer

    def set_buffer(self, buffer: Any) -> None:
        """Replaces the flat tensor of the gradients."""
        self._buffer = buffer

    def parameters(self) -> list[Any]:
        """Returns the parameters, in the order of their gradients in the buffer."""
        return self._parameters

    def gradients(self) -> list[Any]:
        """Returns the gradients in the shapes of the parameters, as views of the buffer."""
        parts = self._buffer.split([parameter.numel() for parameter in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]


Hook = Callable[[Any, GradBucket], Any]


class HookReducers:
    """Calling it returns a reducer for the next bucket, which calls the hook of the module."""

    def __init__(self, state: Any, hook: Hook, module: Any, process_set: ProcessSet) -> None:
        self.state = state
        self.hook = hook
        self.module = module
        self.process_set = process_set
        self.count = 0

    def __call__(self) -> HookReducer:
        self.count += 1
        return HookReducer(self, self.count - 1)


class HookReducer:
    """Reduces the bucket number `index` by a hook; `every` is the HookReducers that made it."""

    def __init__(self, every: HookReducers, index: int) -> None:
        self.process_set = every.process_set
        self._every = every
        self._index = index

    def begin(self, grads: Mapping[str, Any], called: str) -> Handle[dict[str, Any]]:
        """Calls the hook with the gradients as a GradBucket. Returns a handle of the reduced
        gradients by name; the hook returns the reduced buffer, or a future of it. `called` is not
        used."""
        every = self._every
        sparse = [name for name, grad in grads.items() if isinstance(grad, IndexedSlices)]
        if sparse:
            raise InputError(f"a hook cannot reduce the sparse gradient of {sparse[0]!r}")
        parameters = [every.module.get_parameter(name) for name in grads]
        flat = [
            tensor_of(grad, parameter.dtype).reshape(-1)
            for grad, parameter in zip(grads.values(), parameters, strict=True)
        ]
        is_last = self._index == every.count - 1
        bucket = GradBucket(self._index, is_last, torch.cat(flat), parameters)
        reduced = every.hook(every.state, bucket)

        def finish(buffer: Any) -> dict[str, Any]:
            bucket.set_buffer(buffer[0] if isinstance(buffer, list) else buffer)
            return {n: array_of(g) for n, g in zip(grads, bucket.gradients(), strict=True)}

        return converted(Handle(_Found(reduced)), finish)


class _Found:
    """The result of a hook as a handle waits for it: a tensor, or a torch.futures.Future of one."""

    def __init__(self, found: Any) -> None:
        self._found = found

    def result(self) -> Any:
        return self._found.wait() if hasattr(self._found, "wait") else self._found

    def done(self) -> bool:
        return bool(self._found.done()) if hasattr(self._found, "done") else True
