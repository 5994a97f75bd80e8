"""Handles of collectives on tensors, and functions that give a collective a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxpar.hvd.handles import Handle
from onnxpar.hvd.torch.tensors import array_of, store, tensor_of

Run = Callable[..., Any]


class _Converted:
    """The future behind a handle that applies `finish` to the result of another handle, once."""

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
    """Returns a handle whose result is `finish` of the result of `handle`."""
    return Handle(_Converted(handle, finish))


def in_new(tensor: Any) -> Callable[[Any], Any]:
    """Returns a function that converts a result, an array, to a new tensor with the dtype of
    `tensor`."""
    return lambda array: tensor_of(array, tensor.dtype)


def in_place(tensor: Any) -> Callable[[Any], Any]:
    """Returns a function that overwrites `tensor` with a result, an array, and returns `tensor`."""

    def overwrite(array: Any) -> Any:
        store(tensor, array)
        return tensor

    return overwrite


def each(functions: Sequence[Callable[[Any], Any]]) -> Callable[[Sequence[Any]], list[Any]]:
    """Returns a function that applies function i to result i of a list, and returns the list."""
    return lambda results: [f(result) for f, result in zip(functions, results, strict=True)]


def arrays_of(tensors: Sequence[Any]) -> list[Any]:
    return [array_of(tensor) for tensor in tensors]


class _Collective(torch.autograd.Function):  # type: ignore[misc]
    """An autograd function: `run` is its forward pass, `back` maps the gradients of the results to
    the gradients of the tensors."""

    @staticmethod
    def forward(ctx: Any, run: Run, back: Run, *tensors: Any) -> Any:
        ctx.back = back
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        results = ctx.back(*grads)
        return None, None, *(results if isinstance(results, (tuple, list)) else [results])


def differentiable(run: Run, back: Run, *tensors: Any) -> Any:
    """Returns `run(*tensors)`, a tensor or a tuple of tensors. Autograd computes the gradients of
    `tensors` by `back`, from the gradients of the results."""
    return _Collective.apply(run, back, *tensors)
