"""Adds nodes to a rank's graph that compute its sizes in each run, from the values of symbols that
the session feeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from onnxpar.base.errors import ModelError
from onnxpar.base.names import Names
from onnxpar.layout.shares import Proportion
from onnxpar.layout.symbols import Minimum, Polynomial, Quotient, Variable
from onnxpar.lowering.extents import Extent, OpenArray

SIZES = "onnxpar.sizes"
"""The hidden input: the values of all symbols, in the order of the plan, int64."""


def check_size_names(names: Names) -> None:
    """Errors: ModelError if a tensor of the model has a name that is reserved for the nodes added
    here."""
    if names.free(SIZES) != SIZES or names.root(SIZES, ".") != SIZES:
        raise ModelError(
            f"the model has a tensor whose name begins with {SIZES!r}, as those that compute sizes "
            "in each run do; rename it, or bind all sizes with --dim"
        )


def add_size_input(graph: GraphProto, symbols: Sequence[str]) -> None:
    """Declares the hidden input of the values of all symbols."""
    graph.input.append(helper.make_tensor_value_info(SIZES, TensorProto.INT64, [len(symbols)]))


class SizeGraph:
    """Builds nodes that compute polynomials, as int64 tensors of one element each. Equal
    expressions are built once.

    graph    a rank's graph
    symbols  the symbols (open sizes), in the order of the hidden input
    parts    the starts and sizes of the rank's shards, by the names of variables
    nodes    the nodes so far, in topological order
    """

    def __init__(
        self, graph: GraphProto, symbols: Sequence[str], parts: Mapping[str, Extent]
    ) -> None:
        self.graph = graph
        self.symbols = list(symbols)
        self.parts = parts
        self.nodes: list[NodeProto] = []
        self._names: dict[tuple[Any, ...], str] = {}

    def tensor(self, name: str, array: OpenArray) -> None:
        """Adds nodes that compute the tensor `name` from its polynomials, and removes its
        initializer."""
        others = [t for t in self.graph.initializer if t.name != name]
        del self.graph.initializer[:]
        self.graph.initializer.extend(others)
        if not array.elements:  # the rank's shard of the sizes is empty
            empty = numpy_helper.from_array(np.zeros(array.shape, array.dtype), name)
            self.graph.initializer.append(empty)
            return
        elements = [self._polynomial(e) for e in array.elements]
        flat = self._add("Concat", elements, axis=0) if len(elements) > 1 else elements[0]
        if array.shape:
            last = self._add("Reshape", [flat, self._constant(array.shape)])
        else:  # OpenVINO refuses a Reshape to a scalar
            last = self._add("Squeeze", [flat])
        element = helper.np_dtype_to_tensor_dtype(array.dtype)
        self.nodes.append(helper.make_node("Cast", [last], [name], f"{name}::size", to=element))

    def finish(self) -> None:
        """Puts the new nodes into the graph, before all others."""
        old = list(self.graph.node)
        del self.graph.node[:]
        self.graph.node.extend([*self.nodes, *old])

    def _polynomial(self, polynomial: Polynomial) -> str:
        """Returns the name of a tensor with the value of a polynomial; adds the nodes that compute
        it."""
        below = polynomial.denominator
        terms = []
        for monomial, coefficient in polynomial.terms:
            factors = [self._variable(name) for name in monomial]
            number = int(coefficient * below)
            if number != 1 or not factors:
                factors.append(self._constant([number]))
            terms.append(self._fold("Mul", factors))
        total = self._fold("Add", terms) if terms else self._constant([0])
        return total if below == 1 else self._divided(total, below)

    def _divided(self, total: str, below: int) -> str:
        """Returns the tensor of total / below, rounded down; a Div of integers would round towards
        zero."""
        by = self._constant([below])
        return self._add("Div", [self._add("Sub", [total, self._add("Mod", [total, by])]), by])

    def _variable(self, name: Variable) -> str:
        """Returns the tensor of a variable: a symbol, the start or size of a shard, a quotient or a
        minimum."""
        if isinstance(name, Quotient):
            return self._divided(self._polynomial(name.over), name.below)
        if isinstance(name, Minimum):
            return reduce(self._lesser, map(self._polynomial, name.operands))
        if name in self.parts:
            return self._part(self.parts[name])
        index = self._constant([self.symbols.index(name)])
        return self._add("Gather", [SIZES, index], axis=0)

    def _part(self, part: Extent) -> str:
        """Returns the tensor of the start or size of a shard, as `Extent.value` computes it."""
        whole = self._polynomial(part.size)
        if part.parts is None:
            size, start = self._equal(part, whole)
        else:
            start = self._bound(whole, part.parts, part.place)
            end = self._bound(whole, part.parts, part.place + 1)
            size = self._add("Sub", [end, start])
        if part.is_filled:
            size, start = self._filled(size, start, whole)
        return start if part.is_start else size

    def _equal(self, part: Extent, size: str) -> tuple[str, str]:
        """Returns the tensors of a shard's size and start, if ranks share the whole `size`
        equally."""
        start = self._constant([0])
        for axis, i in zip(part.axes, part.at, strict=True):
            if axis.at is not None:
                start = self._add("Add", [start, size]) if i > axis.at else start
                size = size if i == axis.at else self._constant([0])
                continue
            count = self._constant([axis.size])
            quotient = self._add("Div", [size, count])
            rest = self._add("Sub", [size, self._add("Mul", [quotient, count])])
            here = self._constant([i])
            shift = self._add("Add", [self._add("Mul", [quotient, here]), self._least(rest, i)])
            start = self._add("Add", [start, shift])
            more = self._add("Sub", [self._least(rest, i + 1), self._least(rest, i)])
            size = self._add("Add", [quotient, more])
        return size, start

    def _bound(self, size: str, parts: Proportion, at: int) -> str:
        """Returns the tensor of `Proportion.bound`: where shard number `at` begins."""
        total, before = sum(parts.weights), sum(parts.weights[:at])
        twice = self._add("Mul", [size, self._constant([2 * before])])
        rounded = self._add("Add", [twice, self._constant([total])])
        return self._add("Div", [rounded, self._constant([2 * total])])

    def _filled(self, size: str, start: str, whole: str) -> tuple[str, str]:
        """Returns the tensors of a shard's size and start, with one element in place of an empty
        shard, unless the whole is empty, too."""
        zero, one = self._constant([0]), self._constant([1])
        exists = self._add("Where", [self._add("Less", [zero, whole]), one, zero])
        last = self._add("Sub", [whole, exists])
        start = self._add("Where", [self._add("Less", [last, start]), last, start])
        return self._add("Where", [self._add("Less", [size, exists]), one, size]), start

    def _least(self, a: str, b: int) -> str:
        """Returns the minimum of a tensor and a number."""
        return self._lesser(a, self._constant([b]))

    def _lesser(self, a: str, b: str) -> str:
        """Returns the minimum of the tensors `a` and `b`."""
        return self._add("Where", [self._add("Less", [a, b]), a, b])

    def _fold(self, op: str, operands: Sequence[str]) -> str:
        """Returns the result of a binary op applied to all operands, from left to right."""
        result = operands[0]
        for operand in operands[1:]:
            result = self._add(op, [result, operand])
        return result

    def _add(self, op: str, inputs: Sequence[str], **attrs: Any) -> str:
        key = (op, *inputs, *attrs.items())
        if key not in self._names:
            name = self._names[key] = f"{SIZES}.{op}{len(self._names)}"
            self.nodes.append(helper.make_node(op, list(inputs), [name], name, **attrs))
        return self._names[key]

    def _constant(self, value: Sequence[int]) -> str:
        key = ("", *value, "of", len(value))
        if key not in self._names:
            name = self._names[key] = f"{SIZES}.constant{len(self._names)}"
            array = np.array(value, np.int64)
            self.graph.initializer.append(numpy_helper.from_array(array, name))
        return self._names[key]
