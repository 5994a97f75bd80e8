"""Replaces the loops that PyTorch's exporters write for `nn.EmbeddingBag` by lookups and
reductions.

A loop cannot be split. Where all bags (groups of rows, see `bag_loops.py`) have the same size, a
Reshape and a reduction replace it; otherwise a ScatterElements adds each row to its bag, or takes
the maximum. Rows of a `padding_idx` are replaced by zeros, or by minus infinity for a maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxpar.graph.stored import nodes_before, onnx_opset
from onnxpar.load.bag_loops import bags_of
from onnxpar.load.bag_names import Array, Bags, Names

Grouped = Callable[[str, int, bool, str], str]
"""Adds nodes that reduce the rows of each bag. Arguments: the rows; their width; True for the
maximum, False for the sum; a name for the result."""


def add_up_bags(model: ModelProto) -> bool:
    """Replaces the loops over bags, in place; returns True if there was one. Requires a model whose
    sizes are inferred. Offsets must ascend, as PyTorch requires."""
    opset = onnx_opset(model)
    graph = Names(model.graph, opset)
    replacements: dict[str, list[NodeProto]] = {}
    gone: set[str] = set()
    for node in model.graph.node:
        bags = bags_of(node, graph)
        nodes = [] if bags is None else _Sums(graph, bags).nodes()
        if bags is not None and nodes:
            replacements[bags.nodes[-1].output[0]] = nodes
            gone |= {n.output[0] for n in bags.nodes}
    if replacements:
        kept: list[NodeProto] = []
        for node in model.graph.node:
            first = node.output[0] if node.output else ""
            kept += replacements.get(first, [] if first in gone else [node])
        kept = nodes_before(kept, (port.name for port in model.graph.output))
        del model.graph.node[:]
        model.graph.node.extend(kept)
    return bool(replacements)


class _Sums:
    """Makes the nodes that replace the loop of `bags`."""

    def __init__(self, names: Names, bags: Bags) -> None:
        self.names, self.bags = names, bags
        self.made: list[NodeProto] = []
        self.result = bags.nodes[-1].output[0]
        self.lifted: dict[str, str] = {}

    def nodes(self) -> list[NodeProto]:
        """Returns the nodes, in order; none if the sizes of the bags' rows are not known."""
        bags, names = self.bags, self.names
        source, width = self._sizes()
        if source is None or width is None:
            return []
        size = source // bags.count
        bounds = np.arange(bags.count + 1, dtype=np.int64) * size
        known = names.value(bags.offsets)
        fits = bool(size) and size * bags.count == source
        is_even = known is not None and fits and np.array_equal(known, bounds)
        if is_even and not bags.padding:
            rows = self._add("Reshape", [self._lift(bags.rows), [bags.count, size, width]])
            self._reduce(bags.op, rows, self.result)
        elif is_even:
            self._combine(lambda *given: self._even(size, *given), source, width)
        else:
            number = self._numbers(source)
            self._combine(lambda *given: self._scattered(number, source, *given), source, width)
        return self.made

    def _sizes(self) -> tuple[int | None, int | None]:
        """Returns the number of all rows, and their width; None for a size that is not known."""
        if self.bags.padding:
            shape = self.names.shape(self.bags.rows) or []
            return (shape[0], shape[1]) if len(shape) == 2 else (None, None)
        source = table = None
        todo = [self.bags.rows]
        while todo:
            name = todo.pop()
            node = self.names.made[self.names.usual.get(name, name)]
            if node.op_type == "Slice":
                shape = self.names.shape(node.input[0]) or []
                source = shape[0] if shape else None
                table = shape[1] if len(shape) == 2 and table is None else table
            elif node.op_type == "Gather":
                shape = self.names.shape(node.input[0]) or []
                table = shape[1] if len(shape) == 2 else None
                todo.append(node.input[1])
            else:
                todo += node.input[: 2 if node.op_type == "Mul" else 1]
        return source, table

    def _lift(self, name: str) -> str:
        """Returns the rows of all bags, for the tensor `name` of the rows of one bag in the loop's
        body: copies the nodes that compute them, without the Slice."""
        node = self.names.made[self.names.usual.get(name, name)]
        if node.op_type == "Slice":
            return self._weighted(node.input[0])
        if name not in self.lifted:
            copy = NodeProto()
            copy.CopyFrom(node)
            rows = {t: self._lift(t) for t in self._rows_of(node)}
            copy.input[:] = [rows.get(t, t) for t in node.input]
            copy.output[:] = [f"{self.result}/{node.output[0]}"]
            copy.name = f"{self.result}/{node.name}"
            self.made.append(copy)
            self.lifted[name] = copy.output[0]
        return self.lifted[name]

    def _weighted(self, rows: str) -> str:
        """Returns the tensor that `rows` multiplies by ones; `rows` itself if it is no such
        product. The dynamo exporter multiplies by ones where `nn.EmbeddingBag` has no weights, and
        training would change them."""
        product = self.names.node(rows, "Mul")
        ones = [] if product is None else [n for n in product.input if self.names.is_ones(n)]
        if product is None or len(ones) != 1 or (self.names.shape(ones[0]) or [])[1:] != [1]:
            return rows
        return next(str(name) for name in product.input if name != ones[0])

    def _rows_of(self, node: NodeProto) -> Sequence[str]:
        """Returns the operands of a node that have a row for each row of its result."""
        if node.op_type == "Gather":
            return list(node.input[1:2])
        return list(node.input[: 2 if node.op_type == "Mul" else 1])

    def _reduce(self, op: str, rows: str, result: str = "") -> str:
        return self._add(op, [rows, [1]], result, keepdims=0)

    def _combine(self, grouped: Grouped, source: int, width: int) -> None:
        """Makes the nodes that reduce all bags (by sum, mean or maximum) to the loop's result; a
        bag without rows gives zero.

        grouped  reduces the rows of each bag
        source   the number of all rows
        width    the columns of a row
        """
        op, largest = self.bags.op, self.bags.op == "ReduceMax"
        rows = self._weighted(self.bags.rows) if self.bags.padding else self._lift(self.bags.rows)
        kept = self._kept() if self.bags.padding else None
        if kept is not None:
            filler = self._like(-np.inf if largest else 0, rows)
            rows = self._add("Where", [kept, rows, filler])
        if op == "ReduceSum":
            grouped(rows, width, False, self.result)
            return
        total = grouped(rows, width, largest, "")
        if kept is None:
            sizes = self._add("Unsqueeze", [self._sizes_of_bags(), [1]])
        else:
            sizes = grouped(self._add("Cast", [kept], to=TensorProto.INT64), 1, False, "")
        if largest:
            is_some = self._add("Less", [[0], sizes])
            self._add("Where", [is_some, total, self._like(0, rows)], self.result)
            return
        sizes = self._add("CastLike", [self._add("Max", [sizes, [1]]), rows])
        self._add("Div", [total, sizes], self.result)

    def _even(self, size: int, rows: str, width: int, largest: bool, result: str) -> str:
        """Reduces the rows of bags that all have `size` rows of `width` elements: to their sums, or
        with `largest` their maxima, in the tensor `result`."""
        apart = self._add("Reshape", [rows, [self.bags.count, size, width]])
        return self._reduce("ReduceMax" if largest else "ReduceSum", apart, result)

    def _scattered(
        self, number: str, source: int, rows: str, width: int, largest: bool, result: str
    ) -> str:
        """Reduces the rows of bags of different sizes: to their sums, or with `largest` their
        maxima, in the tensor `result`.

        number  the number of the bag of each row, [source, 1]
        source  the number of all rows
        width   the number of elements of a row
        """
        count = self.bags.count
        number = self._add("Expand", [number, [source, width]])
        start = np.full((count + 1, width), -np.inf if largest else 0, np.float32)
        how = "max" if largest else "add"
        sums = self._add("CastLike", [start, rows])
        sums = self._add("ScatterElements", [sums, number, rows], axis=0, reduction=how)
        return self._add("Slice", [sums, [0], [count], [0]], result)

    def _numbers(self, source: int) -> str:
        """Returns the number of the bag of each row, [source, 1]. Rows before the first bag and
        after the last one are in one more bag, which is sliced off later."""
        count, offsets = self.bags.count, self.bags.offsets
        ones = np.ones(count + 1, np.int64)
        starts = self._add(
            "ScatterElements", [[0] * (source + 1), offsets, ones], axis=0, reduction="add"
        )
        number = self._add("CumSum", [starts, np.array(0, np.int64)])
        number = self._add("Slice", [number, [0], [source], [0]])
        number = self._add("Sub", [number, [1]])
        is_before = self._add("Less", [number, [0]])
        number = self._add("Where", [is_before, [count], number])
        return self._add("Unsqueeze", [number, [1]])

    def _sizes_of_bags(self) -> str:
        """Returns the number of rows of each bag, [bags]."""
        count, offsets = self.bags.count, self.bags.offsets
        ends = self._add("Slice", [offsets, [1], [count + 1], [0]])
        return self._add("Sub", [ends, self._add("Slice", [offsets, [0], [count], [0]])])

    def _kept(self) -> str:
        """Returns a mask of the rows whose ids are not the padding, [rows, 1]."""
        padding = self.bags.padding
        assert padding is not None
        ids = padding.ids
        shifted = self._add("Add", [ids, self._like(padding.height, ids)])
        is_below = self._add("Less", [ids, self._like(0, ids)])
        ids = self._add("Where", [is_below, shifted, ids])
        is_one = self._add("Equal", [ids, self._like(padding.one, ids)])
        return self._add("Unsqueeze", [self._add("Not", [is_one]), [1]])

    def _like(self, value: float, tensor: str) -> str:
        """Returns a constant of one element, in the type of `tensor`."""
        dtype = np.int64 if isinstance(value, int) else np.float32
        return self._add("CastLike", [np.array([value], dtype), tensor])

    def _add(
        self, op: str, inputs: Sequence[str | Sequence[int] | Array], result: str = "", **attrs: Any
    ) -> str:
        """Makes a node, and returns the name of its result, `result` or a new one. Operands that
        are no names become constants."""
        name = f"{self.result}/bags.{len(self.made)}"
        operands = []
        for i, operand in enumerate(inputs):
            if isinstance(operand, str):
                operands.append(operand)
                continue
            value = operand if isinstance(operand, np.ndarray) else np.array(operand, np.int64)
            operands.append(f"{name}.{i}")
            self.names.graph.initializer.append(numpy_helper.from_array(value, operands[-1]))
        result = result or name
        self.made.append(helper.make_node(op, operands, [result], name, **attrs))
        return result
