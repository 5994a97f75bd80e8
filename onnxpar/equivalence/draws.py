"""Draws the values on which a window is compared."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from onnx import TensorProto, helper

from onnxpar.base.arrays import Array
from onnxpar.equivalence.evaluate import NotComputed
from onnxpar.equivalence.program import Node, Program, Shape

_EXACT = """
Add Sub Mul Neg Sum MatMul Gemm Conv ReduceSum Gather GatherND GatherElements Where Transpose
Reshape Slice Split Concat Expand Squeeze Unsqueeze Identity Pad Tile Equal Less Greater
LessOrEqual GreaterOrEqual And Or Not Max Min ReduceMax ReduceMin Abs Relu ScatterND
ScatterElements CumSum Cast Range Shape OneHot
"""
"""Ops that give whole numbers for whole numbers; small ones are exact."""
_INDEXED = {"Gather": 0, "GatherElements": 0, "ScatterElements": 0, "OneHot": 1}


_CLASSES = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")


class Draws:
    """Values for the tensors that a window reads: from a seed, the tensor's name and the number of
    the draw. Indices are drawn at the edges of what ranks hold in every other draw.
    `ranges` has the integers that inputs may hold: [low, high) by name."""

    def __init__(
        self, model: Program, nodes: Sequence[Node], edges: Sequence[int], seed: int,
        ranges: Mapping[str, Sequence[int]],
    ) -> None:  # fmt: skip
        self.model, self.seed, self.ranges = model, seed, ranges
        self.edges = np.array(edges or [0], np.int64)
        self.is_exact = all(node.domain == "" and node.op in _EXACT.split() for node in nodes)
        self.bound = _bound(model, nodes)
        self.words = ["", "another", *_words(nodes)]
        self.has_negative = not any(node.op in _CLASSES for node in nodes)
        self.scale = 0.25 if any(node.op == "LinearAttention" for node in nodes) else 1.0
        """Small numbers for states that would grow from step to step, and their rounding faster."""
        self.has_zeros = any(node.op == "NonZero" for node in nodes)

    def narrow(self) -> bool:
        """Draws whole numbers from a smaller range from now on; False if there is none."""
        if self.has_negative:
            self.has_negative = False
        elif self.bound > 1:
            self.bound //= 2
        else:
            return False
        return True

    def value(self, name: str, shape: Shape, kind: int, number: int) -> Array:
        """The value of a tensor of an element type of ONNX."""
        random = self._random(name, number)
        if kind not in helper.get_all_tensor_dtypes():
            raise NotComputed(f"{name} is no tensor")
        if kind == TensorProto.STRING:
            return np.asarray(random.choice(self.words, shape), object)
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind))
        if dtype.kind == "b":
            share = (0.5, 1.0, 0.0, 0.5)[number % 4]
            return random.random(shape) < share
        if dtype.kind in "iu":
            return self._integers(random, name, shape, dtype, number)
        return self._reals(random, shape).astype(dtype)

    def like(self, value: Array, name: str, number: int) -> Array:
        """A value of the type and shape of another."""
        random = self._random(name, number)
        if value.dtype.kind in "iu":
            return random.integers(-3, 4, value.shape).astype(value.dtype)
        return self._reals(random, value.shape).astype(value.dtype)

    def _random(self, name: str, number: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(name.encode()), number])

    def _reals(self, random: np.random.Generator, shape: Shape) -> Array:
        if self.is_exact:
            values = np.asarray(random.integers(-48, 49, shape), np.float64)
        else:
            values = np.asarray(self.scale * random.standard_normal(shape))
        return np.where(random.random(shape) < 0.25, 0, values) if self.has_zeros else values

    def _integers(
        self, random: np.random.Generator, name: str, shape: Shape, dtype: np.dtype, number: int
    ) -> Array:
        has_negative = self.has_negative and dtype.kind != "u" and number >= 2
        low, high = -self.bound if has_negative else 0, self.bound
        if name in self.ranges:
            low, high = max(low, self.ranges[name][0]), min(high, self.ranges[name][1])
            low = min(low, high - 1)
        if number % 2:
            edges = self.edges[(self.edges >= low) & (self.edges < high)]
            edges = np.concatenate([edges, [low, high - 1]])
            return random.choice(edges, shape).astype(dtype)
        return random.integers(low, high, shape).astype(dtype)


def _words(nodes: Sequence[Node]) -> Iterator[str]:
    """Yields the texts that attributes of nodes name."""
    for node in nodes:
        for value in node.attrs.values():
            for text in value if isinstance(value, list) else ():
                if isinstance(text, bytes):
                    yield text.decode(errors="replace")


def _bound(model: Program, nodes: Sequence[Node]) -> int:
    """The number of positions that indices may have in all nodes that read some."""
    bounds = []
    for node in nodes:
        if node.domain or node.op not in (*_INDEXED, *_CLASSES, "GatherND", "ScatterND"):
            continue
        name = node.inputs[0]
        shape = model.shapes.get(name)
        if name in model.constants:
            shape = model.constants.shape(name)
        if not shape:
            continue
        axis = int(node.attrs.get("axis", 0)) if node.op in _INDEXED else 0
        axis = 1 if node.op in _CLASSES else axis
        bounds.append(min(shape) if node.op.endswith("ND") else shape[axis % len(shape)])
    return max(min(bounds, default=5), 1)
