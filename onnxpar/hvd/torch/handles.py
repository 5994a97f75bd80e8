"""Handles of collectives on tensors, and gradients of collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxpar.hvd.handles import Handle
from onnxpar.hvd.torch.tensors import array_of, store, tensor_of

Run = Callable[..., Any]


class _Converted:
    """The result of a handle as `finish` converts it, once."""

    def __init__(self, handle: Handle[Any], finish: Callable[[Any], Any]) -> None:
        self._handle = handle
        self._finish: Callable[[Any], Any] | None = finish
        self._result: Any = None

    def done(self) -> bool:
        return self._handle.done()

    def result(self) -> Any:
        if self._finish is not None:
            self._result, self._finish = self._finish(self._handle()), None
        return self._result


def converted(handle: Handle[Any], finish: Callable[[Any], Any]) -> Handle[Any]:
    """Returns a handle that applies `finish` to the result of another."""
    return Handle(_Converted(handle, finish))


def in_new(tensor: Any) -> Callable[[Any], Any]:
    """Returns a function that converts a result to a tensor with the dtype of this one."""
    return lambda array: tensor_of(array, tensor.dtype)


def in_place(tensor: Any) -> Callable[[Any], Any]:
    """Returns a function that overwrites this tensor with a result, and returns it."""

    def overwrite(array: Any) -> Any:
        store(tensor, array)
        return tensor

    return overwrite


def each(functions: Sequence[Callable[[Any], Any]]) -> Callable[[Sequence[Any]], list[Any]]:
    """Returns a function that applies one function to each result."""
    return lambda results: [f(result) for f, result in zip(functions, results, strict=True)]


def arrays_of(tensors: Sequence[Any]) -> list[Any]:
    return [array_of(tensor) for tensor in tensors]


class _Collective(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, run: Run, back: Run, *tensors: Any) -> Any:
        ctx.back = back
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        results = ctx.back(*grads)
        return None, None, *(results if isinstance(results, (tuple, list)) else [results])


def differentiable(run: Run, back: Run, *tensors: Any) -> Any:
    """Returns the result of `run`, a tensor or a tuple of tensors, with the gradient `back`."""
    return _Collective.apply(run, back, *tensors)
