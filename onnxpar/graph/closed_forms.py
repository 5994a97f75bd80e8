"""Computes closed forms (polynomials of symbols) of a graph's sizes, and of tensors that nodes
compute from sizes, as far as they follow from the definitions of ops."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import NodeProto, TypeProto

from onnxpar.graph.kernel_sizes import known_sizes
from onnxpar.graph.result_sizes import (
    Divide,
    Operands,
    Sizes,
    positions,
    product,
    result_sizes,
)
from onnxpar.graph.shape_inference import Walk
from onnxpar.graph.size_arithmetic import Forms, NotFollowed, constants, follow
from onnxpar.graph.stored import reads_of
from onnxpar.layout.symbols import Polynomial

MOST = 64
"""Tensors with more elements are not followed."""


class ClosedForms:
    """The known closed forms of a graph: `sizes` and `values` by name of a tensor. `varies` are the
    names of tensors whose values depend on open sizes.

    dims   the open dimensions (input, axis) and their closed forms
    types  the types of inputs, by name
    opset  the version of ONNX's own ops
    """

    def __init__(
        self,
        dims: Mapping[tuple[str, int], Polynomial],
        types: Mapping[str, TypeProto],
        opset: int,
    ) -> None:
        self.opset = opset
        self.sizes: dict[str, list[Polynomial | None]] = {}
        self.values: dict[str, Forms] = {}
        self.varies: set[str] = set()
        for name in {name for name, _ in dims}:
            sizes = known_sizes(types.get(name)) or ()
            self.sizes[name] = [dims.get((name, i), _number(s)) for i, s in enumerate(sizes)]

    def size(self, walk: Walk, name: str) -> Sizes | None:
        """Returns the closed forms of a tensor's sizes, with None for each unknown size; None if
        not even the number of dimensions is known. `walk` has the sizes inferred at one set of
        sample sizes."""
        if name in self.sizes:
            return self.sizes[name]
        sizes = walk.sizes(name)
        return None if sizes is None else [_number(s) for s in sizes]

    def value(self, walk: Walk, name: str) -> Forms | None:
        """Returns the elements of a tensor in closed form; None if they are unknown, or more than
        MOST."""
        if name in self.values:
            return self.values[name]
        array = walk.values.get(name)
        if array is None or name in self.varies or np.size(array) > MOST:
            return None
        try:
            return constants(array)
        except NotFollowed:
            return None

    def follow(self, walk: Walk, node: NodeProto) -> list[Forms]:
        """Returns the elements of a node's results in closed form, one array for each result.
        Errors: NotFollowed if there is none."""
        if node.domain not in ("", "ai.onnx"):
            raise NotFollowed
        if node.op_type in ("Shape", "Size"):
            return [self._shape(walk, node)]
        operands = [self.value(walk, name) if name else None for name in node.input]
        if any(name and forms is None for name, forms in zip(node.input, operands, strict=True)):
            raise NotFollowed
        dtypes = [walk.values[name].dtype if name else None for name in node.input]
        return follow(node, operands, dtypes, self.opset)

    def _shape(self, walk: Walk, node: NodeProto) -> Forms:
        sizes = self.size(walk, node.input[0])
        if sizes is None or None in sizes:
            raise NotFollowed
        if node.op_type == "Size":
            return np.array(product(sizes), object)
        bounds = {a.name: a.i for a in node.attribute}
        wanted = sizes[bounds.get("start", 0) : bounds.get("end", len(sizes))]
        forms = np.empty(len(wanted), object)
        forms[:] = wanted
        return forms

    def results(self, walk: Walk, node: NodeProto, divide: Divide) -> list[Sizes] | None:
        """Returns the sizes of a node's results, for ops whose result sizes depend on values of
        operands, such as Slice; None for other ops. `divide` finds quotients of sizes. Errors:
        NotFollowed if there is no closed form."""
        return result_sizes(self._operands(walk, node, divide))

    def positions(self, walk: Walk, node: NodeProto) -> list[Polynomial]:
        """Returns the positions in an operand that a Slice or Gather computes from values, in
        closed form; empty if there is none."""
        try:
            return list(positions(self._operands(walk, node, lambda over, below: None)))
        except NotFollowed:
            return []

    def _operands(self, walk: Walk, node: NodeProto, divide: Divide) -> Operands:
        sizes = [self.size(walk, name) if name else None for name in node.input]
        values = [self.value(walk, name) if name else None for name in node.input]
        return Operands(node, sizes, values, self.opset, divide, self._is_size)

    def _is_size(self, form: Polynomial) -> bool:
        return any(form in sizes for sizes in self.sizes.values())

    def is_open(self, walk: Walk, node: NodeProto) -> bool:
        """True if a size or value that the node (or one of its bodies) reads depends on symbols, or
        is unknown."""
        names = reads_of(node)
        if any(name in self.varies for name in names):
            return True
        each = [self.size(walk, name) for name in names if name]
        return any(s is None or any(x is None or x.variables for x in s) for s in each)


def _number(size: int | None) -> Polynomial | None:
    return None if size is None else Polynomial.constant(size)
