"""Unrolls a Scan over a rank's experts.

onnxruntime packs the weight of a product when it loads a model, if the weight is a stored matrix.
In the body of a Scan, the weight of a step is a slice of a stack, and would be packed in each run.
The number of experts may differ by rank, so each rank's file is rewritten separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from onnxpar.graph.patterns import Match, Op, rewrite
from onnxpar.graph.stored import (
    element_bits,
    external_location,
    graphs_of,
    nodes_of,
    subgraphs_of,
)

EXPERTS = "::experts"
"""The end of the name of a Scan over experts."""
MOST = 64
"""The most experts that are unrolled: beyond this number, loading and running so many nodes takes
longer than packing weights."""
_MATRIX = 3
"""The dimensions of a stack of matrices."""


def unroll_experts(graph: GraphProto) -> None:
    """Replaces each Scan over stored weights of experts by the nodes of all its steps, in place,
    also in subgraphs."""
    scans = [at.node for at in rewrite(graph, {Op("Scan"): _unroll})]
    names = {name for node in scans for name in (*node.input, *_read_inside(node))}
    for scope in graphs_of(graph) if scans else ():
        _drop_unread(scope, names)


def _unroll(at: Match) -> bool:
    if not _is_over_experts(at.node, at.scope.stored):
        return False
    at.nodes = _Unrolled(at.scope.graph, at.node, at.scope.stored).nodes()
    return True


def _is_over_experts(node: NodeProto, stored: Mapping[str, TensorProto]) -> bool:
    """True for a Scan over experts with one result, a sum, and with a stored stack of matrices in
    which each matrix begins at a byte boundary."""
    if node.op_type != "Scan" or not node.name.endswith(EXPERTS) or len(node.output) != 1:
        return False
    stacks = [stored[name] for name in node.input[1:] if name in stored]
    whole = all(prod(s.dims[1:]) * element_bits(s.data_type) % 8 == 0 for s in stacks)
    return whole and any(len(s.dims) == _MATRIX and 0 < s.dims[0] <= MOST for s in stacks)


def _read_inside(node: NodeProto) -> Iterator[str]:
    for body in subgraphs_of(node):
        for inner in nodes_of(body):
            yield from inner.input


def _drop_unread(graph: GraphProto, names: set[str]) -> None:
    """Removes the initializers in `names` that no node reads any more."""
    read = {name for node in nodes_of(graph) for name in node.input}
    read |= {port.name for port in graph.output}
    remaining = [t for t in graph.initializer if t.name not in names or t.name in read]
    if len(remaining) < len(graph.initializer):
        del graph.initializer[:]
        graph.initializer.extend(remaining)


@dataclass
class _Unrolled:
    """Builds the nodes that replace a Scan of a graph. `stored` are all initializers that the Scan
    can read, to which steps add more."""

    graph: GraphProto
    scan: NodeProto
    stored: dict[str, TensorProto]
    added: list[NodeProto] = field(default_factory=list)

    def nodes(self) -> list[NodeProto]:
        """The nodes of each step; their names end with its number."""
        (body,) = subgraphs_of(self.scan)
        self.graph.initializer.extend(body.initializer)
        self.matrices = frozenset(self._matrices(body))
        stacks = [self.stored[n] for n in self.scan.input[1:] if n in self.stored]
        count = next(s.dims[0] for s in stacks if len(s.dims) == _MATRIX)
        total = self.scan.input[0]
        for step in range(count):
            result = self.scan.output[0] if step == count - 1 else ""
            total = self._step(body, step, total, result)
        return self.added

    def _matrices(self, body: GraphProto) -> Iterator[str]:
        """Names of the body's tensors [1, row, column] that are an expert's matrix, if only
        products read them. Without the first dimension, onnxruntime packs such a matrix."""
        elements = zip(body.input[1:], self.scan.input[1:], strict=True)
        stacks = {port.name for port, name in elements if name in self.stored}
        flips = {n.input[0]: n for n in body.node if n.op_type == "Transpose"}
        for node in body.node:
            if node.op_type != "Unsqueeze" or node.input[0] not in stacks:
                continue
            (name,) = node.output
            flip = flips.get(name)
            read = [name] if flip is None else [name, flip.output[0]]
            readers = [n for n in body.node if not set(read).isdisjoint(n.input) and n is not flip]
            if all(n.op_type == "MatMul" and n.input[0] not in read for n in readers):
                yield from read

    def _step(self, body: GraphProto, step: int, total: str, result: str) -> str:
        """Adds the nodes of one expert; returns the name of the sum up to this expert: `result`,
        unless that is empty."""
        names = {body.input[0].name: total}
        for port, name in zip(body.input[1:], self.scan.input[1:], strict=True):
            names[port.name] = self._element(name, step)
        for node in body.node:
            copy = NodeProto()
            copy.CopyFrom(node)
            copy.name = f"{node.name}@{step}"
            copy.input[:] = [names.get(name, name) for name in node.input]
            if node.output[0] in self.matrices and node.op_type == "Unsqueeze":
                names[node.output[0]] = copy.input[0]
                continue
            if node.output[0] in self.matrices:
                del copy.attribute[:]
                copy.attribute.append(helper.make_attribute("perm", [1, 0]))
            names |= {name: f"{name}@{step}" for name in node.output}
            if result and body.output[0].name in node.output:
                names[body.output[0].name] = result
            copy.output[:] = [names[name] for name in node.output]
            self.added.append(copy)
        return names[body.output[0].name]

    def _element(self, stack: str, step: int) -> str:
        """The name of one expert's part of a stack: a new initializer or the result of a Gather."""
        if stack in self.stored:
            name = f"{stack}@{step}"
            if name not in self.stored:
                self.stored[name] = _part(self.stored[stack], name, step)
                self.graph.initializer.append(self.stored[name])
            return name
        name = f"{self.scan.name}/{stack}@{step}"
        index = numpy_helper.from_array(np.array(step, np.int64), f"{name}/index")
        self.graph.initializer.append(index)
        operands = [stack, index.name]
        self.added.append(helper.make_node("Gather", operands, [name], f"{name}/Gather", axis=0))
        return name


def _part(stack: TensorProto, name: str, step: int) -> TensorProto:
    """One tensor of a stack; the part of a stack in a file refers to that file."""
    part = TensorProto(name=name, data_type=stack.data_type, dims=stack.dims[1:])
    size = prod(part.dims) * element_bits(stack.data_type) // 8
    if stack.data_location == TensorProto.EXTERNAL:
        location, offset, _ = external_location(stack)
        part.data_location = TensorProto.EXTERNAL
        for key, value in (
            ("location", location),
            ("offset", offset + step * size),
            ("length", size),
        ):
            part.external_data.add(key=key, value=str(value))
    elif stack.HasField("raw_data"):
        part.raw_data = stack.raw_data[step * size : (step + 1) * size]
    else:
        part.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(stack)[step], name))
    return part
