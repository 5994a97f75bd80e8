"""Recognizes the loops that PyTorch's exporters write for `nn.EmbeddingBag`.

An iteration takes one bag: a slice of the ids (legacy exporter) or of the looked-up rows (dynamo),
and the sum, mean or maximum of its rows. The dynamo exporter lets the last bag end with the rows,
in a branch of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, numpy_helper

from onnxpar.ir.stored import FOLD_LIMIT, graphs_of

Array = np.ndarray[Any, Any]
_REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax")
_SAME = ("Identity", "Cast", "CastLike", "Reshape", "Unsqueeze", "Squeeze")
"""Ops that keep the value of a single number."""


@dataclass(frozen=True)
class Bags:
    """The bags of a loop.

    op       the reduction of a bag's rows
    rows     in the loop's body, the rows of a bag
    bounds   in the body, the start and the end of a bag
    offsets  the tensor with the bounds of all bags, one more than there are bags
    count    the number of bags
    nodes    the nodes outside of the body to replace; the result is that of the last
    """

    op: str
    rows: str
    bounds: tuple[str, str]
    offsets: str
    count: int
    nodes: list[NodeProto]


class Names:
    """The nodes and values of a graph and its bodies, by name; names are unique."""

    def __init__(self, graph: GraphProto, opset: int) -> None:
        self.graph, self.opset = graph, opset
        self.made = {name: n for g in graphs_of(graph) for n in g.node for name in n.output if name}
        self.tensors = {t.name: t for g in graphs_of(graph) for t in g.initializer}
        self.inside = {
            name
            for g in graphs_of(graph)
            if g is not graph
            for name in (*(o for n in g.node for o in n.output), *(p.name for p in g.input))
        }
        ports = (*graph.input, *graph.value_info, *graph.output)
        self.types = {p.name: p.type.tensor_type for p in ports}
        self.usual: dict[str, str] = {}
        """By result of an If that the last bag has for itself: that of all other bags."""
        reads = [name for g in graphs_of(graph) for n in g.node for name in n.input]
        self.reads = [*reads, *(p.name for g in graphs_of(graph) for p in g.output)]

    def node(self, name: str, *ops: str) -> NodeProto | None:
        """The node that makes a tensor, if it has one of these ops."""
        node = self.made.get(name)
        is_one = node is not None and node.op_type in ops and node.domain in ("", "ai.onnx")
        return node if is_one else None

    def value(self, name: str) -> Array | None:
        """The value of a small constant."""
        node = self.node(name, "Constant")
        tensor = self.tensors.get(name)
        if node is not None:
            tensor = next((a.t for a in node.attribute if a.name == "value"), None)
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
            copied = self.node(name, "Identity")
            return None if copied is None else self.value(copied.input[0])
        if np.prod(tensor.dims) > FOLD_LIMIT:
            return None
        found: Array = numpy_helper.to_array(tensor)
        return found

    def is_ones(self, name: str) -> bool:
        """True for a constant of ones."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
            return False
        return bool((numpy_helper.to_array(tensor) == 1).all())

    def is_value(self, name: str, *numbers: int) -> bool:
        """True for a constant of these integers."""
        value = self.value(name)
        return value is not None and value.reshape(-1).tolist() == [*numbers]

    def shape(self, name: str) -> list[int] | None:
        """The sizes of a tensor of the graph; None if one of them is unknown."""
        if name in self.tensors:
            return list(self.tensors[name].dims)
        if name not in self.types or not self.types[name].HasField("shape"):
            return None
        dims = self.types[name].shape.dim
        return [d.dim_value for d in dims] if all(d.HasField("dim_value") for d in dims) else None

    def steps(self, name: str, counter: str) -> int | None:
        """The difference between a number in a body and the body's counter; None if unknown."""
        if name == counter:
            return 0
        node = self.node(name, *_SAME)
        if node is not None:
            return self.steps(node.input[0], counter)
        node = self.node(name, "Add")
        if node is None:
            return None
        for one, other in (node.input, node.input[::-1]):
            steps, more = self.steps(one, counter), self.number(other)
            if steps is not None and more is not None:
                return steps + more
        return None

    def number(self, name: str) -> int | None:
        """The value of a constant integer."""
        node = self.node(name, *_SAME)
        value = self.value(name)
        if value is None:
            return None if node is None else self.number(node.input[0])
        return int(value.reshape(-1)[0]) if value.size == 1 and value.dtype.kind == "i" else None

    def bound(self, name: str, counter: str) -> tuple[str, int] | None:
        """The tensor and the position, after the counter, from which a body takes a number."""
        node = self.node(name, *_SAME)
        if node is not None:
            return self.bound(node.input[0], counter)
        node = self.node(name, "Gather", "Slice")
        if node is None or node.input[0] in self.inside:
            return None
        steps = self.steps(node.input[1], counter)
        if node.op_type == "Slice":
            end = self.steps(node.input[2], counter)
            if steps is None or end != steps + 1 or not self.is_plain(node):
                return None
        return None if steps is None else self._shifted(node.input[0], steps)

    def is_plain(self, node: NodeProto) -> bool:
        """True for a Slice along the first dimension, by steps of 1."""
        return all(
            self.is_value(name, wanted)
            for name, wanted in zip(node.input[3:], (0, 1), strict=False)
            if name
        )

    def _shifted(self, name: str, steps: int) -> tuple[str, int]:
        """Follows a Slice that leaves out the first elements."""
        node = self.node(name, "Slice")
        if node is None or not self.is_plain(node):
            return name, steps
        start, shape, whole = (
            self.number(node.input[1]),
            self.shape(name),
            self.shape(node.input[0]),
        )
        if start is None or start < 0 or not shape or not whole or shape[0] + start != whole[0]:
            return name, steps
        return self._shifted(node.input[0], steps + start)


def bags_of(node: NodeProto, names: Names) -> Bags | None:
    """The bags that a loop adds up; None for another node."""
    if node.op_type != "Loop" or not names.is_value(node.input[1], 1):
        return None
    body = next(a.g for a in node.attribute if a.name == "body")
    if len(node.input) == 2 and len(node.output) == 1:
        return _bags_of_ids(node, body, names)
    if len(node.input) == 4 and len(node.output) == 2:
        return _bags_of_rows(node, body, names)
    return None


def _bags_of_ids(node: NodeProto, body: GraphProto, names: Names) -> Bags | None:
    """The bags of a loop of the legacy exporter, which stacks the reduced rows."""
    count = names.number(node.input[0]) if node.input[0] else None
    counter, last = body.input[0].name, names.node(body.output[1].name, *_REDUCTIONS)
    if count is None or last is None or not names.is_value(body.output[0].name, 1):
        return None
    return _found(last, 0, counter, count, [node], names)


def _bags_of_rows(node: NodeProto, body: GraphProto, names: Names) -> Bags | None:
    """The bags of a loop of the dynamo exporter, which inserts the reduced rows into a sequence."""
    sequence, at = body.input[2].name, body.input[3].name
    more = names.node(body.output[0].name, "Less")
    grown = names.node(body.output[1].name, "SequenceInsert")
    joined = [n for n in names.graph.node if node.output[0] in n.input]
    is_read_once = names.reads.count(node.output[0]) == 1 and node.output[1] not in names.reads
    if (
        more is None
        or grown is None
        or node.input[0]
        or len(grown.input) != 2
        or grown.input[0] != sequence
        or names.node(node.input[2], "SequenceEmpty") is None
        or names.number(node.input[3]) != 0
        or names.steps(more.input[0], at) != 1
        or names.steps(body.output[2].name, at) != 1
        or not is_read_once
        or [n.op_type for n in joined] != ["ConcatFromSequence"]
        or any(a.i != 0 for a in joined[0].attribute)
    ):
        return None
    count = names.number(more.input[1])
    choice = names.node(grown.input[1], "If")
    if count is None or count < 1 or choice is None:
        return None
    branches = _results(choice)
    reduced = branches["else_branch"]
    last = names.node(_usual(reduced, at, count, names), *_REDUCTIONS)
    if last is not None:
        _usual(last.input[0], at, count, names)
    zeros = names.value(branches["then_branch"])
    is_empty = names.node(choice.input[0], "Equal")
    if last is None or zeros is None or zeros.any() or is_empty is None:
        return None
    found = _found(last, 1, at, count, [node, joined[0]], names)
    if found is None or {*is_empty.input} != {*found.bounds}:
        return None
    is_apart = reduced in names.usual or last.input[0] in names.usual
    return None if is_apart and not _end_with_rows(found, names) else found


def _found(
    last: NodeProto, keepdims: int, counter: str, count: int, nodes: list[NodeProto], names: Names
) -> Bags | None:
    """The bags, given the node that reduces the rows of one."""
    attributes = {a.name: a for a in last.attribute}
    axes = list(attributes["axes"].ints) if "axes" in attributes else []
    is_first = axes == [0] or (len(last.input) > 1 and names.is_value(last.input[1], 0))
    kept = attributes["keepdims"].i if "keepdims" in attributes else 1
    bounds = {*_slices(last.input[0], names)}
    if not is_first or kept != keepdims or len(bounds) != 1:
        return None
    (pair,) = bounds
    start, end = (names.bound(name, counter) for name in pair)
    if start is None or end is None:
        return None
    offsets = _offsets(start, end, count, names)
    if offsets is None:
        return None
    return Bags(last.op_type, last.input[0], pair, offsets, count, nodes)


def _offsets(start: tuple[str, int], end: tuple[str, int], count: int, names: Names) -> str | None:
    """The tensor with the bounds of all bags."""
    if start[0] == end[0]:
        shape = names.shape(start[0])
        return start[0] if (start[1], end[1]) == (0, 1) and shape == [count + 1] else None
    first, last = (names.value(name) for name, _ in (start, end))
    if first is None or last is None:
        return None
    starts, ends = first[start[1] :][:count], last[end[1] :][:count]
    is_one = len(first) == count + 1 and start[1] == 0 and np.array_equal(first[1:], ends)
    return start[0] if is_one and len(starts) == count else None


def _usual(name: str, counter: str, count: int, names: Names) -> str:
    """Returns the result that all bags but the last have, and records it, if a tensor is that of an
    If for the last bag, and both results are equal where bags end with the rows; else the tensor
    itself."""
    choice = names.node(name, "If")
    is_last = names.node(choice.input[0], "Equal") if choice is not None else None
    if choice is None or is_last is None:
        return name
    branches = _results(choice)
    last, other = branches["then_branch"], branches["else_branch"]
    at = names.steps(is_last.input[0], counter), names.number(is_last.input[1])
    if at != (0, count - 1):
        return name
    if _are_equal_slices(last, other, names) or _are_equal_means(last, other, names):
        names.usual[name] = other
    return names.usual.get(name, name)


def _results(choice: NodeProto) -> dict[str, str]:
    """The results of an If, by branch."""
    return {a.name: str(a.g.output[0].name) for a in choice.attribute}


def _are_equal_slices(last: str, other: str, names: Names) -> bool:
    """True for a slice up to the end of all rows, and one that begins at the same row."""
    one, two = names.node(last, "Slice"), names.node(other, "Slice")
    if one is None or two is None or one.input[:2] != two.input[:2]:
        return False
    shape = names.shape(one.input[0])
    is_whole = shape is not None and names.number(one.input[2]) == shape[0]
    return is_whole and names.is_plain(one) and names.is_plain(two)


def _are_equal_means(last: str, other: str, names: Names) -> bool:
    """True for a mean, and the sum of the same rows over the number of rows up to the end."""
    mean, choice = names.node(other, "ReduceMean"), names.node(last, "If")
    is_some = names.node(choice.input[0], "Greater") if choice is not None else None
    if mean is None or choice is None or is_some is None or names.number(is_some.input[1]) != 0:
        return False
    branches = _results(choice)
    ratio = names.node(branches["then_branch"], "Div")
    rows, count = names.node(mean.input[0], "Slice"), names.node(is_some.input[0], "Sub")
    if ratio is None or rows is None or count is None:
        return False
    total, divisor = names.node(ratio.input[0], "ReduceSum"), names.node(ratio.input[1], "Cast")
    shape = names.shape(rows.input[0])
    return (
        total is not None
        and divisor is not None
        and shape is not None
        and divisor.input[0] == is_some.input[0]
        and total.input[0] == mean.input[0]
        and names.is_value(total.input[1], 0)
        and count.input[1] == rows.input[1]
        and names.number(count.input[0]) == shape[0]
    )


def _end_with_rows(bags: Bags, names: Names) -> bool:
    """True if the last bag ends with the last row."""
    node = names.node(names.usual.get(bags.rows, bags.rows), "Slice")
    shape = None if node is None else names.shape(node.input[0])
    known, joined = names.value(bags.offsets), names.node(bags.offsets, "Concat")
    if shape is None:
        return False
    if known is not None:
        return bool(known[-1] == shape[0])
    return joined is not None and names.is_value(joined.input[-1], shape[0])


def _slices(name: str, names: Names) -> Iterator[tuple[str, str]]:
    """Yields the bounds of each slice from which a body computes rows; an empty pair for a node
    that does not compute each row from the same row."""
    node = names.made.get(names.usual.get(name, name))
    if node is None or name not in names.inside:
        yield "", ""
    elif node.op_type == "Slice" and node.input[0] not in names.inside and names.is_plain(node):
        yield node.input[1], node.input[2]
    elif node.op_type == "Gather" and node.input[0] not in names.inside:
        yield ("", "") if any(a.i for a in node.attribute) else next(_slices(node.input[1], names))
    elif node.op_type == "Mul":
        for operand in node.input:
            yield from _slices(operand, names)
    elif node.op_type == "Unsqueeze" and names.is_value(node.input[1], 1):
        yield from _slices(node.input[0], names)
    else:
        yield "", ""
