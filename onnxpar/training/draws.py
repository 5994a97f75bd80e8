"""Reproducible random numbers: each number is a hash of the seed, the node and the element's index.

onnxruntime's own generator is neither shared between ranks nor repeatable. So random ops are
replaced by a hash, made of ops that are sharded like any others: each rank computes its shard of
the numbers of the unsplit model, and a run that resumes from a checkpoint continues with the same
numbers as an uninterrupted run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs

from onnxpar.base.errors import ModelError
from onnxpar.graph.subgraphs import all_nodes, bodies
from onnxpar.training.gradients.value import Builder, Value
from onnxpar.training.rewrite import replace_node

_BITS = 32
_MASK = (1 << _BITS) - 1
_FACTOR = 0x45D9F3B
"""The factor of Mueller's 32-bit integer hash, stackoverflow.com/a/12996028; its product with a
32-bit number fits into 63 bits."""
_STEP = 0x9E3779B9
_APART = 1 << 31
"""A number that no node has, for draws that belong to no node."""


def seed_draws(graph: gs.Graph, seed: str) -> bool:
    """Replaces all random ops of a graph by hashes of a new int64 input named `seed`. Returns
    False, and adds no input, if the graph draws no random numbers.

    A Dropout that is switched off becomes an Identity. Errors: ModelError for a random op in the
    body of a loop, where every iteration would draw the same numbers.
    """
    nodes = [n for n in all_nodes(graph) if n.op in _MAKERS]
    looped = {
        id(inner)
        for node in all_nodes(graph)
        if node.op in ("Loop", "Scan")
        for body in bodies(node)
        for inner in all_nodes(body)
    }
    tensor = gs.Variable(seed, np.dtype(np.int64), [])
    draws = 0
    for number, node in enumerate(nodes):
        if id(node) in looped and not is_off(node):
            raise ModelError(
                f"{node.op} '{node.name}' draws random numbers in the body of a loop, where they "
                "would be the same in each iteration; move it out of the loop, or export the model "
                "without it"
            )
        draws += not is_off(node)
        attrs, op = dict(node.attrs), node.op
        results = list(node.outputs)

        def make(
            builder: Builder,
            inputs: Sequence[gs.Tensor],
            number: int = number,
            attrs: Mapping[str, Any] = attrs,
            op: str = op,
            results: list[gs.Tensor] = results,
        ) -> Sequence[Value | None]:
            source = _Source(builder, builder.value(tensor), number, results[0].shape)
            values = _MAKERS[op](source, [builder.value(t) for t in inputs], attrs)
            return values[: len(results)]

        replace_node(graph, node, make)
    if draws:
        graph.inputs.append(tensor)
    return draws > 0


def integers_of(seed: Value, numbers: Value) -> Value:
    """Returns a random integer from 0 to 2**32 - 1 for each element of a tensor of int64: a hash of
    the seed and of the element. The hash differs from those that nodes of a model draw."""
    start = _started(seed, _APART)
    return _round(_low(_mixed(start + 1) + _mixed(numbers + 1)))


def is_off(node: gs.Node) -> bool:
    """True if a node is a Dropout that always returns its input."""
    if node.op != "Dropout":
        return False
    training = node.inputs[2] if len(node.inputs) > 2 else None
    if training is None or not training.name:
        return True
    return _is_zero(training) or _is_zero(node.inputs[1])


def _is_zero(tensor: gs.Tensor) -> bool:
    """True if a tensor is a constant of zeros or False."""
    return isinstance(tensor, gs.Constant) and not np.any(tensor.values)


class _Source:
    """Adds nodes that compute random numbers for the elements of one tensor of this shape. `node`
    is the number of the random node, which is part of the hash."""

    def __init__(self, builder: Builder, seed: Value, node: int, shape: Sequence[int]) -> None:
        self.builder = builder
        self.shape = list(shape)
        self._start = _started(seed, node)
        self._drawn = 0

    def integers(self) -> Value:
        """Returns random integers from 0 to 2**32 - 1, one for each element; each call returns
        different numbers."""
        self._drawn += 1
        total = _mixed(self._start + self._drawn)
        for axis, size in enumerate(self.shape):
            if size > 1:
                places = _hashed(np.arange(size) * len(self.shape) + axis + 1)
                shape = [-1 if a == axis else 1 for a in range(len(self.shape))]
                total = total + places.reshape(shape)
        return _round(_low(total)).expand(self.shape)

    def uniform(self, dtype: np.dtype[Any]) -> Value:
        """Returns uniform numbers between 0 and 1, both excluded (before the cast to `dtype`)."""
        return ((self.integers().cast(np.float64) + 0.5) / 2.0**_BITS).cast(dtype)

    def normal(self, dtype: np.dtype[Any]) -> Value:
        """Returns standard normal numbers, by Box and Muller's transform."""
        radius = (-2.0 * self.uniform(np.dtype(np.float64)).log()).sqrt()
        angle = self.uniform(np.dtype(np.float64)) * (2 * math.pi)
        return (radius * angle.op("Cos")).cast(dtype)


def _started(seed: Value, node: int) -> Value:
    """Returns the hash of a seed and of a node's number, from which the node's draws continue."""
    mixed = _mixed(_mixed(_low(seed)) + _low(seed / (1 << _BITS)))
    return _mixed(mixed + node * _STEP % _MASK)


def _low(x: Value) -> Value:
    """Returns the low 32 bits of each number."""
    return x.op("BitwiseAnd", np.array(_MASK))


def _round(x: Value) -> Value:
    """Applies one round of the hash to 32-bit numbers; the high bits of the result depend on all
    bits."""
    return _low(x.op("BitwiseXor", x / (1 << 16)) * _FACTOR)


def _mixed(x: Value) -> Value:
    """Adds nodes that hash each number of a tensor to 32 bits, and returns the hashes."""
    x = _round(_round(_low(x)))
    return x.op("BitwiseXor", x / (1 << 16))


def _hashed(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns hashes of constant numbers, equal to those that `_mixed` computes in the graph."""
    x = numbers & _MASK
    for _ in range(2):
        x = (x ^ x >> 16) * _FACTOR & _MASK
    return x ^ x >> 16


Operands = Sequence[Value]
Attrs = Mapping[str, Any]


def _dropout(source: _Source, operands: Operands, attrs: Attrs) -> Sequence[Value | None]:
    """Returns the results of a Dropout: the scaled tensor and the mask. The functions below do the
    same for other random ops."""
    x = operands[0]
    ratio = operands[1] if len(operands) > 1 and operands[1].tensor.name else None
    training = operands[2] if len(operands) > 2 and operands[2].tensor.name else None
    share = source.builder.constant(0.5, np.float64) if ratio is None else ratio.cast(np.float64)
    if training is None or _is_zero(training.tensor) or (ratio and _is_zero(ratio.tensor)):
        return [x, source.builder.constant(np.ones(1, np.bool_)).expand(x.shape)]
    limit = (share * 2.0**_BITS).cast(np.int64)
    if not isinstance(training.tensor, gs.Constant):
        limit = training.where(limit, 0)
        share = training.where(share, 0.0)
    mask = source.integers() >= limit
    return [mask.where(x * (1.0 / (1.0 - share)).cast(x.dtype), 0.0), mask]


def _uniform(source: _Source, operands: Operands, attrs: Attrs) -> Sequence[Value | None]:
    low, high = float(attrs.get("low", 0.0)), float(attrs.get("high", 1.0))
    return [source.uniform(_dtype(operands, attrs)) * (high - low) + low]


def _normal(source: _Source, operands: Operands, attrs: Attrs) -> Sequence[Value | None]:
    mean, scale = float(attrs.get("mean", 0.0)), float(attrs.get("scale", 1.0))
    return [source.normal(_dtype(operands, attrs)) * scale + mean]


def _bernoulli(source: _Source, operands: Operands, attrs: Attrs) -> Sequence[Value | None]:
    p = operands[0]
    drawn = source.uniform(np.dtype(np.float64)) < p.cast(np.float64)
    return [drawn.cast(_dtype(operands, attrs))]


def _dtype(operands: Operands, attrs: Attrs) -> np.dtype[Any]:
    if "dtype" in attrs:
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(int(attrs["dtype"])))
    return operands[0].dtype if operands else np.dtype(np.float32)


_MAKERS: Mapping[str, Callable[[_Source, Operands, Attrs], Sequence[Value | None]]] = {
    "Dropout": _dropout,
    "RandomUniform": _uniform,
    "RandomUniformLike": _uniform,
    "RandomNormal": _normal,
    "RandomNormalLike": _normal,
    "Bernoulli": _bernoulli,
}
