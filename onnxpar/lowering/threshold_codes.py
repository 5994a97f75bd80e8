"""Builds sums over ranks in which each rank sends two bits per element and keeps the remainder.

A rank adds the remainder of the previous step to its addend. For each element, the rank sends t if
the total is at least t, -t if the total is at most -t, else 0; the difference is the new remainder.
The codes 0, 1 and 2 stand for -t, 0 and t, four to a byte; all ranks gather all bytes and add up
the codes. One more code, a flag, reports elements that are not finite: then the sums are NaN on all
ranks, and the ranks keep their old remainders. MXNet's key-value store has this compression, 2bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto

from onnxpar.base.arrays import Array
from onnxpar.graph.per_rank import PerRank
from onnxpar.graph.reshards import Reshard, reshard_node
from onnxpar.graph.tensors import numpy_dtype
from onnxpar.layout.layout import Factor, Layout, dim_axes
from onnxpar.layout.mesh import Axes, Mesh, in_mesh_order, merge_axes, parts_over

PER_BYTE = 4


@dataclass(frozen=True)
class Sum:
    """A sum over ranks, and its remainders.

    addend  the rank's term
    kept    the remainder of the last step
    result  the sum
    keeps   the remainder of this step
    layout  the layout of the addend, which is partial
    rest    the layout of the result
    """

    addend: gs.Tensor
    kept: gs.Tensor
    result: gs.Tensor
    keeps: gs.Tensor
    layout: Layout
    rest: Layout


def other_axes(layout: Layout, rest: Layout) -> Axes:
    """Returns the mesh axes, beside the axes of the sum, along which ranks send different codes:
    axes that split the addend, and axes over which the result, of the layout `rest`, is still
    partial."""
    axes = {a for d in layout.dims for a in dim_axes(d)} | set(rest.partial)
    return merge_axes(in_mesh_order(tuple(axes)))


@dataclass
class ThresholdBuilder:
    """Builds the nodes of several sums together, which have the same axes, dtype and `other_axes`.

    name      a prefix of the names of nodes
    axes      the mesh axes over which terms are added
    layouts   gets the layouts of the tensors around the gather

    Only the gather is still to be lowered; the other nodes have the sizes of a rank.
    """

    name: str
    sums: Sequence[Sum]
    axes: Axes
    threshold: float
    mesh: Mesh
    per_rank: PerRank
    layouts: dict[str, Layout]
    built: list[gs.Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dtype = numpy_dtype(self.sums[0].addend)
        self.ranks = parts_over(self.axes)
        self.unit = self._number("threshold", self.threshold)

    def build(self) -> list[gs.Node]:
        """Returns the nodes, in order."""
        gradient = self._row("gradient", [s.addend for s in self.sums])
        kept = self._row("kept", [s.kept for s in self.sums])
        total = self._add("Add", [gradient, kept])
        sign = self._sign(total)
        rest = self._add("Sub", [total, self._add("Mul", [sign, self.unit])])
        count, spoils = self._count(self._gather(self._pack(sign, rest)))
        counted = self._add("Cast", [count], to=_element(self.dtype))
        summed = self._add("Mul", [counted, self.unit])
        result = self._add("Where", [spoils, self._number("nan", np.nan), summed])
        self._hand_out(result, [s.result for s in self.sums])
        self._hand_out(self._add("Where", [spoils, kept, rest]), [s.keeps for s in self.sums])
        return self.built

    def _sign(self, total: gs.Tensor) -> gs.Tensor:
        """Returns the tensor of 1, 0 or -1 for each element of `total`: what is sent, in
        thresholds."""
        up = self._add("GreaterOrEqual", [total, self.unit])
        down = self._add("LessOrEqual", [total, self._number("lower", -self.threshold)])
        signs = [self._add("Cast", [t], to=_element(self.dtype)) for t in (up, down)]
        return self._add("Sub", signs)

    def _pack(self, sign: gs.Tensor, rest: gs.Tensor) -> gs.Tensor:
        """Returns the row of bytes to send. Each byte has four codes, one from each quarter of the
        elements: the code from quarter i is in bits 2 i and 2 i + 1. The last code is the flag,
        computed from the remainder `rest`."""
        shifted = self._add("Add", [sign, self._number("one", 1)])
        codes = self._add("Cast", [shifted], to=TensorProto.UINT8)
        length = self._add("ReduceSum", [rest], keepdims=1)
        odd = self._add("IsNaN", [self._add("Sub", [length, length])])
        flag = self._add("Cast", [odd], to=TensorProto.UINT8)
        row = self._add("Concat", [codes, flag], axis=0)
        pads = self._varying("pads", lambda rank: np.array([0, self._padding(rank)]))
        quarters = self._add(
            "Reshape",
            [self._add("Pad", [row, pads]), self._constant("quarters", np.array([PER_BYTE, -1]))],
        )
        weights = self._constant("weights", np.array([[1, 4, 16, 64]], np.uint8))
        packed = self._add("MatMulInteger", [weights, quarters])
        return self._add("Cast", [packed], to=TensorProto.UINT8)

    def _gather(self, packed: gs.Tensor) -> gs.Tensor:
        """Returns the rows of bytes of all ranks, gathered by an ordinary reshard."""
        others = other_axes(self.sums[0].layout, self.sums[0].rest)
        parts = {self.mesh.coordinate(others, r): self._bytes(r) for r in range(self.mesh.size)}
        sizes = tuple(parts[i] for i in range(parts_over(others)))
        row = Factor(sum(sizes), others, sizes) if others else Factor(sizes[0])
        before, after = (Layout((Factor(self.ranks, a), row)) for a in (self.axes, ()))
        codes = gs.Variable(f"{self.name}::codes", np.uint8, list(before.shape))
        rows = gs.Variable(f"{self.name}::gathered", np.uint8, list(after.shape))
        self.built[-1].outputs[0] = codes
        reshard = Reshard("AllGather", self.axes, ((before, after),))
        name = f"AllGather_{codes.name}"
        self.built.append(reshard_node(name, reshard, [codes], [rows]))
        self.layouts |= {codes.name: before, rows.name: after}
        return rows

    def _count(self, rows: gs.Tensor) -> tuple[gs.Tensor, gs.Tensor]:
        """Returns two tensors: for each element, the number of ranks that send t less that of ranks
        that send -t; and True if any rank has an element that is not finite."""
        apart = self._constant("apart", np.array([self.ranks, 1, -1]))
        shifts = self._constant("shifts", np.array([[[0], [2], [4], [6]]], np.uint8))
        moved = self._add(
            "BitShift", [self._add("Reshape", [rows, apart]), shifts], direction="RIGHT"
        )
        codes = self._add("BitwiseAnd", [moved, self._constant("mask", np.array(3, np.uint8))])
        flat = self._add("Reshape", [codes, self._constant("rows", np.array([self.ranks, -1]))])
        ones = self._constant("ones", np.ones((1, self.ranks), np.uint8))
        summed = self._add("MatMulInteger", [ones, flat])
        line = self._add("Reshape", [summed, self._constant("line", np.array([-1]))])
        ends = self._varying(
            "ends", lambda rank: np.array([self._elements(rank), 1, self._padding(rank)])
        )
        results = [gs.Variable(f"{self.name}::{what}") for what in ("sums", "flag", "padding")]
        self.built.append(
            gs.Node("Split", f"{self.name}::ends", {"axis": 0}, [line, ends], results)
        )
        ranks = self._constant("ranks", np.array(self.ranks, np.int32))
        none = self._constant("none", np.array(0, np.int32))
        return (
            self._add("Sub", [results[0], ranks]),
            self._add("Greater", [results[1], none]),
        )

    def _row(self, what: str, tensors: Sequence[gs.Tensor]) -> gs.Tensor:
        """Returns the elements of all tensors, flattened and concatenated. `what` is a part of the
        new names."""
        shape = self._constant(f"{what} row", np.array([-1]))
        flat = [self._add("Reshape", [tensor, shape]) for tensor in tensors]
        return self._add("Concat", flat, axis=0) if len(flat) > 1 else flat[0]

    def _hand_out(self, row: gs.Tensor, results: Sequence[gs.Tensor]) -> None:
        """Splits a row, which has the elements of all sums, into the tensors `results`."""
        pieces = [row]
        if len(results) > 1:
            pieces = [gs.Variable(f"{t.name}::piece", self.dtype) for t in results]
            sizes = self._varying(
                f"{results[0].name} sizes", lambda rank: np.array(self._sizes(rank))
            )
            name = f"{self.name}::{results[0].name}"
            self.built.append(gs.Node("Split", name, {"axis": 0}, [row, sizes], pieces))
        for piece, result, one in zip(pieces, results, self.sums, strict=True):
            shape = self._varying(f"{result.name} shape", _shape(one.layout, self.mesh))
            name = f"{self.name}::Reshape {result.name}"
            self.built.append(gs.Node("Reshape", name, {}, [piece, shape], [result]))

    def _sizes(self, rank: int) -> list[int]:
        """Returns the number of elements of each sum on a rank."""
        shapes = [s.layout.local_shape(self.mesh, rank) for s in self.sums]
        return [int(np.prod(shape, dtype=np.int64)) for shape in shapes]

    def _elements(self, rank: int) -> int:
        return sum(self._sizes(rank))

    def _bytes(self, rank: int) -> int:
        """Returns the number of bytes of a rank's codes, with the flag."""
        return self._elements(rank) // PER_BYTE + 1

    def _padding(self, rank: int) -> int:
        """Returns the number of codes that fill up a rank's last byte."""
        return self._bytes(rank) * PER_BYTE - self._elements(rank) - 1

    def _add(self, op: str, inputs: Sequence[gs.Tensor], **attrs: Any) -> gs.Variable:
        name = f"{self.name}::{op}{len(self.built)}"
        result = gs.Variable(name)
        self.built.append(gs.Node(op, name, attrs, list(inputs), [result]))
        return result

    def _number(self, what: str, value: float) -> gs.Constant:
        return self._constant(what, np.array(value, self.dtype))

    def _constant(self, what: str, value: Array) -> gs.Constant:
        return gs.Constant(f"{self.name}::{what}", value)

    def _varying(self, what: str, value: Callable[[int], Array]) -> gs.Constant:
        constant = self._constant(what, value(0))
        self.per_rank.constants[constant.name] = value
        return constant


def _shape(layout: Layout, mesh: Mesh) -> Callable[[int], Array]:
    return lambda rank: np.array(layout.local_shape(mesh, rank), np.int64)


def _element(dtype: np.dtype[Any]) -> int:
    return TensorProto.DOUBLE if dtype == np.float64 else TensorProto.FLOAT
