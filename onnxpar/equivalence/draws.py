"""Draws the values on which a window is compared."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from onnx import TensorProto, helper

from onnxpar.base.arrays import Array
from onnxpar.equivalence.evaluate import NotComputed
from onnxpar.equivalence.program import Node, Program, Shape, captured

_EXACT = """
Add Sub Mul Neg Sum MatMul Gemm Conv ReduceSum Gather GatherND GatherElements Where Transpose
Reshape Slice Split Concat Expand Squeeze Unsqueeze Identity Pad Tile Equal Less Greater
LessOrEqual GreaterOrEqual And Or Not Max Min ReduceMax ReduceMin Abs Relu ScatterND
ScatterElements CumSum Cast Range Shape OneHot
"""
"""Ops that give whole numbers for whole numbers; small ones are exact."""
_INDEXED = ("Gather", "GatherElements", "ScatterElements")
_CLASSES = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
"""Ops that read classes, and ignore one."""


class Draws:
    """Values for the tensors that a window reads: from a seed, the tensor's name and the number of
    the draw. Indices are drawn at the edges of what ranks hold in every other draw,
    where some are numbers that mean something of their own, such as a label that a loss ignores.
    `ranges` has the integers that inputs may hold: [low, high) by name."""

    def __init__(
        self, model: Program, nodes: Sequence[Node], edges: Sequence[int], seed: int,
        ranges: Mapping[str, Sequence[int]],
    ) -> None:  # fmt: skip
        self.model, self.seed, self.ranges = model, seed, ranges
        self.edges = np.array(edges or [0], np.int64)
        self.is_exact = all(node.domain == "" and node.op in _EXACT.split() for node in nodes)
        self.bounds, self.marks = _indices(model, nodes)
        self.least = min(self.bounds.values(), default=5)
        self.words = ["", "another", *_words(nodes)]
        self.has_negative = not any(node.op in _CLASSES for node in nodes)
        self.scale = 0.25 if any(node.op == "LinearAttention" for node in nodes) else 1.0
        """Small numbers for states that would grow from step to step, and their rounding faster."""
        self.has_zeros = any(node.op == "NonZero" for node in nodes)

    def narrow(self) -> bool:
        """Draws whole numbers from a smaller range from now on; False if there is none."""
        if self.marks:
            self.marks = {}
        elif self.has_negative:
            self.has_negative = False
        elif self.least > 1:
            self.least //= 2
            self.bounds = {name: max(bound // 2, 1) for name, bound in self.bounds.items()}
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
        high = self.bounds.get(name, self.least)
        low = -high if has_negative else 0
        if name in self.ranges:
            low, high = max(low, self.ranges[name][0]), min(high, self.ranges[name][1])
            low = min(low, high - 1)
        if number % 2:
            edges = self.edges[(self.edges >= low) & (self.edges < high)]
            edges = np.array([*edges, low, high - 1, *self.marks.get(name, ())])
            return random.choice(edges, shape).astype(dtype)
        return random.integers(low, high, shape).astype(dtype)


def _words(nodes: Sequence[Node]) -> Iterator[str]:
    """Yields the texts that attributes of nodes name."""
    for node in nodes:
        for value in node.attrs.values():
            for text in value if isinstance(value, list) else ():
                if isinstance(text, bytes):
                    yield text.decode(errors="replace")


def _indices(model: Program, nodes: Sequence[Node]) -> tuple[dict[str, int], dict[str, list[int]]]:
    """For each tensor that nodes read, and from which indices are computed, the number of positions
    that these may have in all nodes that look something up by them; and the whole numbers that mean
    something of their own: classes that are ignored, and what nodes compare with."""
    sources: dict[str, set[str]] = {}
    bounds: dict[str, int] = {}
    marks: dict[str, list[int]] = {}
    for node in nodes:
        read = {n: sources.get(n, {n}) for n in (*node.inputs, *captured(node.proto)) if n}
        sources |= dict.fromkeys(node.outputs, set().union(*read.values()))
        bound = _bound(model, node)
        if bound is not None:
            for name in read.get(node.inputs[0 if node.op == "OneHot" else 1], ()):
                bounds[name] = min(bounds.get(name, bound), bound)
        if node.op in _CLASSES and "ignore_index" in node.attrs:
            marks.setdefault(node.inputs[1], []).append(int(node.attrs["ignore_index"]))
        for other in node.inputs if node.kind == ("", "Equal") else ():
            if other in model.constants and math.prod(model.constants.shape(other)) == 1:
                value = model.constants[other].reshape(())
                for name in set().union(*read.values()) if value.dtype.kind == "i" else ():
                    marks.setdefault(name, []).append(int(value))
    return bounds, marks


def _bound(model: Program, node: Node) -> int | None:
    """The number of positions that the indices of a node may have; None if it has none."""
    if node.domain:
        return None
    if node.op == "OneHot":
        depth = model.constants.get(node.inputs[1])
        return None if depth is None else max(int(depth.reshape(-1)[0]), 1)
    if node.op not in (*_INDEXED, *_CLASSES, "GatherND", "ScatterND"):
        return None
    name = node.inputs[0]
    shape = model.shapes.get(name)
    if name in model.constants:
        shape = model.constants.shape(name)
    if not shape:
        return None
    axis = int(node.attrs.get("axis", 0)) if node.op in _INDEXED else 0
    axis = 1 if node.op in _CLASSES else axis
    return max(min(shape) if node.op.endswith("ND") else shape[axis % len(shape)], 1)
