"""A graph with loops of bags (see `bag_loops.py`), by the names of its tensors, and the description
of the bags of a loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, numpy_helper

from onnxpar.graph.stored import FOLD_LIMIT, graphs_of

Array = np.ndarray[Any, Any]
REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax")
_SAME = ("Identity", "Cast", "CastLike", "Reshape", "Unsqueeze", "Squeeze")
"""Ops that keep the value of a single number."""


@dataclass(frozen=True)
class Padding:
    """Ids whose rows a bag leaves out (`padding_idx`).

    ids     the tensor of the ids of all rows
    one     the id to leave out
    height  the number of rows of the table; a negative id counts from its end
    """

    ids: str
    one: int
    height: int


@dataclass(frozen=True)
class Bags:
    """The bags that a loop reduces.

    op       the reduction: ReduceSum, ReduceMean or ReduceMax
    rows     the tensor in the loop's body that has the rows of one bag
    bounds   the tensors in the body that have the start and the end of one bag
    offsets  the tensor with the bounds of all bags, one more than there are bags
    count    the number of bags
    nodes    the nodes outside of the body to replace; the result is that of the last
    padding  the ids to leave out, or None; if there are any, `rows` is outside of the body
    """

    op: str
    rows: str
    bounds: tuple[str, str]
    offsets: str
    count: int
    nodes: list[NodeProto]
    padding: Padding | None = None


class Names:
    """The nodes and values of a graph and its bodies (of loops and branches), by the names of
    tensors, which are unique. Methods with a parameter `counter` get the name of the body's input
    that has the number of the iteration."""

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
        """By result of an If that treats the last bag apart: the result of all other bags."""
        reads = [name for g in graphs_of(graph) for n in g.node for name in n.input]
        self.reads = [*reads, *(p.name for g in graphs_of(graph) for p in g.output)]

    def node(self, name: str, *ops: str) -> NodeProto | None:
        """Returns the node that makes tensor `name`, if its op is one of `ops`; else None."""
        node = self.made.get(name)
        is_one = node is not None and node.op_type in ops and node.domain in ("", "ai.onnx")
        return node if is_one else None

    def value(self, name: str) -> Array | None:
        """Returns the value of a small constant; None for any other tensor."""
        node = self.node(name, "Constant")
        tensor = self.tensors.get(name)
        if node is not None:
            tensor = next((a.t for a in node.attribute if a.name == "value"), None)
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
            copied = self.node(name, "Identity")
            return None if copied is None else self.value(copied.input[0])
        if np.prod(tensor.dims) > FOLD_LIMIT:
            return None
        array: Array = numpy_helper.to_array(tensor)
        return array

    def is_ones(self, name: str) -> bool:
        """True for a stored tensor whose elements are all 1."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
            return False
        return bool((numpy_helper.to_array(tensor) == 1).all())

    def is_value(self, name: str, *numbers: int) -> bool:
        """True for a constant with exactly these integers."""
        value = self.value(name)
        return value is not None and value.reshape(-1).tolist() == [*numbers]

    def shape(self, name: str) -> list[int] | None:
        """Returns the sizes of a tensor; None if any of them is unknown."""
        if name in self.tensors:
            return list(self.tensors[name].dims)
        if name not in self.types or not self.types[name].HasField("shape"):
            return None
        dims = self.types[name].shape.dim
        return [d.dim_value for d in dims] if all(d.HasField("dim_value") for d in dims) else None

    def steps(self, name: str, counter: str) -> int | None:
        """Returns n if the number `name` in a body is `counter` + n; None if it is any other
        number."""
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
        """Returns the value of a constant integer, through Casts and Reshapes; None for any other
        tensor."""
        node = self.node(name, *_SAME)
        value = self.value(name)
        if value is None:
            return None if node is None else self.number(node.input[0])
        return int(value.reshape(-1)[0]) if value.size == 1 and value.dtype.kind == "i" else None

    def bound(self, name: str, counter: str) -> tuple[str, int] | None:
        """Returns (tensor, n) if the number `name` in a body is element `counter` + n of a tensor
        outside of the body; else None."""
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
        """True for a Slice along the first dimension by steps of 1."""
        return all(
            self.is_value(name, wanted)
            for name, wanted in zip(node.input[3:], (0, 1), strict=False)
            if name
        )

    def _shifted(self, name: str, steps: int) -> tuple[str, int]:
        """Returns (tensor, position) of element `steps` of the tensor `name`. If `name` is a Slice
        that only leaves out the first elements, the tensor is the operand of the Slice."""
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


def offsets_of(
    start: tuple[str, int], end: tuple[str, int], count: int, names: Names
) -> str | None:
    """Returns the tensor with the `count` + 1 bounds of all bags, where bag i goes from element i
    to element i + 1. None if there is no such tensor.

    start, end  (tensor, position) of the start and of the end of bag 0
    """
    if start[0] == end[0]:
        shape = names.shape(start[0])
        return start[0] if (start[1], end[1]) == (0, 1) and shape == [count + 1] else None
    first, last = (names.value(name) for name, _ in (start, end))
    if first is None or last is None:
        return None
    starts, ends = first[start[1] :][:count], last[end[1] :][:count]
    is_one = len(first) == count + 1 and start[1] == 0 and np.array_equal(first[1:], ends)
    return start[0] if is_one and len(starts) == count else None


def results_of(choice: NodeProto) -> dict[str, str]:
    """Returns the first result of each branch of an If, by the name of the branch's attribute."""
    return {a.name: str(a.g.output[0].name) for a in choice.attribute}
