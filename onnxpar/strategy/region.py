"""Finds the part of a graph around an embedding table that belongs to the table: from its lookups,
or to its gradient, up to the smallest tensor on the way, where ranks can communicate cheaply."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import numpy_dtype, shape_bytes
from onnxpar.sharding.factors import Links, OpFactors, TensorFactors
from onnxpar.sharding.graph_factors import GraphFactors

Border = tuple[str, int]
"""A tensor at the border of a region: its name, and the index of its leaf that is split inside the
region."""
_JOINS = ("Add", "Sum", "Concat")
_SCATTERS = ("ScatterElements", "ScatterND")
_SMALL = 0.25
"""The most bytes of another operand of a node inside a region, as a share of the tensor that the
region follows: other operands are whole on every rank."""


@dataclass(frozen=True)
class Region:
    """The nodes and tensors of a graph, to walk from tensor to tensor.

    tensors   the factors of each tensor, by name
    touching  the nodes that read or produce each tensor, by name, each with its links of the tensor
    """

    tensors: Mapping[str, TensorFactors]
    touching: Mapping[str, list[tuple[OpFactors, Links]]]

    @staticmethod
    def of(factors: GraphFactors) -> Region:
        """Returns the nodes and tensors of this graph."""
        touching: dict[str, list[tuple[OpFactors, Links]]] = defaultdict(list)
        for op in factors.ops:
            for tensor, links in op.operands():
                if tensor.name in factors.tensors:
                    touching[tensor.name].append((op, links))
        return Region(factors.tensors, touching)

    def readers(self, name: str) -> list[OpFactors]:
        """Returns the nodes that read a tensor; a node is listed once for each operand that is the
        tensor."""
        plain = [op for op, _ in self.touching[name] if not op.bodies]
        return [op for op in plain if any(t.name == name for t in op.node.inputs)]

    def producer(self, name: str) -> OpFactors | None:
        """Returns the node that computes a tensor; None for an input or weight."""
        nodes = (op for op, _ in self.touching[name])
        return next((op for op in nodes if any(t.name == name for t in op.node.outputs)), None)


def border_after(start: Border, region: Region) -> Border:
    """Returns the smallest tensor on the path of nodes after the tensor `start`; of equal ones, the
    nearest. Each node on the path is the only reader of the tensor before it, and has no other
    operand of similar size."""
    best, at = start, start
    least = size = _bytes(start[0], region)
    while True:
        readers = region.readers(at[0])
        step = _through(readers[0], at, size, region) if len(readers) == 1 else None
        if step is None:
            return best
        at = step
        size = _bytes(at[0], region)
        if size < least:
            best, least = at, size


def _through(op: OpFactors, at: Border, size: int, region: Region) -> Border | None:
    """Returns the result of a node that reads the tensor `at`, if the result has the same leaf (a
    part of a dimension); else None. `size` is the bytes of `at`: another operand must be much
    smaller."""
    name, leaf = at
    pairs = zip(op.node.inputs, op.inputs, strict=True)
    links = next(tensor_links for t, tensor_links in pairs if t.name == name)
    link = links[leaf]
    results = [(t, out) for t, out in zip(op.node.outputs, op.outputs, strict=True) if t.name]
    if link is None or len(results) != 1 or link not in results[0][1] or op.bodies:
        return None
    rest = [t for t in op.node.inputs if isinstance(t, gs.Variable) and t.name not in ("", name)]
    if any(_bytes(t.name, region) > _SMALL * size for t in rest if t.name in region.tensors):
        return None
    return results[0][0].name, results[0][1].index(link)


def border_before(end: Border, region: Region) -> list[Border]:
    """Returns the set of tensors with the fewest bytes from which nodes compute the tensor `end`
    along its leaf (a part of a dimension); of equal sets, the nearest. For a sum of gradients, it
    may be the addends."""
    return _cut(end, region)[1]


def _cut(at: Border, region: Region) -> tuple[int, list[Border]]:
    """Returns the bytes of the cheapest set of tensors before the tensor `at`, and this set, as
    `border_before` does."""
    size = _bytes(at[0], region)
    uncut = (size, [at])
    op = region.producer(at[0])
    if op is None:
        return uncut
    number = next(i for i, t in enumerate(op.node.outputs) if t.name == at[0])
    link = op.outputs[number][at[1]]
    if op.bodies:  # in a loop of accumulation, the body adds up gradients
        inner = op.bodies[0]
        is_sum = op.node.op == "Scan" and link is not None and link in inner.outputs[number]
        leaf = inner.outputs[number].index(link) if is_sum else 0
        return _cut((inner.graph.outputs[number].name, leaf), region) if is_sum else uncut
    read = list(_computed(op, region))
    if any(link not in own_links for _, own_links in read):
        return uncut  # these operands would be whole on every rank
    if len(read) > 1 and op.node.op not in (*_JOINS, *_SCATTERS):
        return uncut
    cuts = [_cut((name, own_links.index(link)), region) for name, own_links in read]
    below = sum(size for size, _ in cuts)
    return (below, [border for _, borders in cuts for border in borders]) if below < size else uncut


def _computed(op: OpFactors, region: Region) -> Iterator[tuple[str, Links]]:
    """Yields the names and links of a node's floating-point operands that other nodes compute."""
    for tensor, links in zip(op.node.inputs, op.inputs, strict=True):
        if not tensor.inputs or is_constant(tensor) or tensor.name not in region.tensors:
            continue
        if numpy_dtype(tensor).kind == "f":
            yield tensor.name, links


def is_constant(tensor: gs.Tensor) -> bool:
    """True for a constant, and for a tensor that a node expands from a constant, such as the zeros
    to which a scatter adds."""
    if isinstance(tensor, gs.Constant):
        return True
    expanding = [node for node in tensor.inputs if node.op in ("ConstantOfShape", "Expand")]
    return any(isinstance(node.inputs[0], gs.Constant) for node in expanding)


def _bytes(name: str, region: Region) -> int:
    """Returns the bytes of a whole tensor."""
    factors = region.tensors[name]
    op = next(op for op, _ in region.touching[name])
    tensor = next(t for t, _ in op.operands() if t.name == name)
    return shape_bytes(tensor, tuple(abs(dim.size) for dim in factors.dims))
