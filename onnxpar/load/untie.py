"""Gives each parameter its own copy of a vector that several nodes read as scale or bias.

Exporters store equal tensors once. In a network that is not trained yet, all scales of
normalizations are ones and all biases are zeros, so one stored tensor stands for many parameters,
which training must be able to change separately.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, numpy_helper

from onnxpar.graph.exported import PARAMETER, call_of, exported_kinds, parameters_of_calls
from onnxpar.graph.stored import nodes_of

_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_PASSING = ("Identity", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Transpose")
_ELEMENTWISE = ("Add", "Sub", "Mul", "Div")
_VECTORS = {
    "LayerNormalization": (1, 2),
    "RMSNormalization": (1,),
    "SimplifiedLayerNormalization": (1,),
    "SkipLayerNormalization": (2, 3, 4),
    "SkipSimplifiedLayerNormalization": (2, 3),
    "BatchNormalization": (1, 2, 3, 4),
    "InstanceNormalization": (1, 2),
    "GroupNormalization": (1, 2),
    "Conv": (2,),
    "ConvTranspose": (2,),
    "DeformConv": (3,),
    "Gemm": (2,),
    "PRelu": (1,),
    "BiasGelu": (1,),
    "FastGelu": (1,),
}
"""Indices of the operands that are a scale, a bias, or statistics of channels, by op."""
_WEIGHTS = {"MatMul": (0, 1), "Gemm": (0, 1), "Conv": (1,), "LSTM": (3,), "GRU": (3,), "RNN": (3,)}
"""Indices of the operands that are weights, by op: if all elements of a weight are equal, it is
shared only by chance."""
_MERGED = 1024
"""Most elements of a tensor that exporters compare with others to store equal ones once."""


@dataclass(frozen=True)
class _Reader:
    """A node that reads a tensor as its operand number `operand`, directly or through other nodes,
    `through`, that only reshape or cast it."""

    node: NodeProto
    operand: int
    through: tuple[NodeProto, ...] = ()


def shared_vectors(graph: GraphProto) -> dict[str, int]:
    """Returns the number of nodes that read each vector as scale or bias, for vectors with several
    readers."""
    return {name: sum(map(len, groups)) for name, groups in _shared(graph)}


def untie(graph: GraphProto, names: Collection[str] | None = None) -> None:
    """Gives each node that reads a vector shared as scale or bias its own copy, in place: the first
    keeps `NAME`, the others read `NAME@1`, `NAME@2`, ... Readers of one parameter, if the file says
    so, share a copy.

    names  the vectors to copy; None: all that are shared
    """
    taken = {t.name for t in graph.initializer}
    taken |= {name for node in nodes_of(graph) for name in (*node.input, *node.output)}
    tensors = {t.name: t for t in graph.initializer}
    inputs = {i.name: i for i in graph.input}
    nodes = list(graph.node)  # keeps the objects alive, so that their ids stay valid
    places = {id(node): place for place, node in enumerate(nodes)}
    added: dict[int, list[NodeProto]] = {}
    for name, groups in list(_shared(graph)):
        if names is not None and name not in names:
            continue
        for number, readers in enumerate(groups[1:], 1):
            own = _free(f"{name}@{number}", taken)
            copy = graph.initializer.add()
            copy.CopyFrom(tensors[name])
            copy.name = own
            if name in inputs:  # initializers are inputs, too, before IR version 4
                port = graph.input.add()
                port.CopyFrom(inputs[name])
                port.name = own
            for reader in readers:
                source = own
                for node in reader.through:
                    clone = NodeProto()
                    clone.CopyFrom(node)
                    clone.input[0] = source
                    source = clone.output[0] = _free(f"{node.output[0]}@{number}", taken)
                    clone.name = clone.name and f"{clone.name}{source[len(node.output[0]) :]}"
                    added.setdefault(places[id(node)], []).append(clone)
                reader.node.input[reader.operand] = source
    if added:
        _insert(graph, added)


def _insert(graph: GraphProto, added: dict[int, list[NodeProto]]) -> None:
    """Inserts nodes into a graph: `added` has, for the position of a node, the nodes to put behind
    it."""
    nodes = []
    for place, node in enumerate(graph.node):
        nodes += [node, *added.get(place, ())]
    kept = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)


def _free(name: str, taken: set[str]) -> str:
    """Returns `name`, with underscores until it is not in `taken`, to which it is added."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _shared(graph: GraphProto) -> Iterator[tuple[str, list[list[_Reader]]]]:
    """Yields the name of each vector that several parameters share, and the nodes that read it as
    scale or bias, in groups: readers of one parameter, if the file says so, are a group."""
    reads: dict[str, list[tuple[NodeProto, int]]] = {}
    for node in nodes_of(graph):
        for i, name in enumerate(node.input):
            reads.setdefault(name, []).append((node, i))
    outer = {id(node) for node in graph.node}
    kinds, targets = exported_kinds(graph), parameters_of_calls(graph)
    for tensor in graph.initializer:
        if tensor.data_type not in _FLOATS or len(reads.get(tensor.name, ())) == 0:
            continue
        wide = sum(size != 1 for size in tensor.dims)
        is_number = wide == 0 and kinds.get(tensor.name) != PARAMETER
        is_filled = wide > 1 and _is_uniform(tensor)
        if is_number or (wide > 1 and not is_filled):
            continue
        readers = [
            r for r in _readers(tensor.name, reads, outer, ()) if _is_vector_of(r, is_filled)
        ]
        groups: dict[object, list[_Reader]] = {}
        for number, reader in enumerate(readers):
            groups.setdefault(_parameters(reader, targets) or number, []).append(reader)
        if len({id(group[0].node) for group in groups.values()}) > 1:
            yield tensor.name, list(groups.values())


def _parameters(reader: _Reader, targets: Collection[str]) -> tuple[object, ...]:
    """Returns a key that is equal for all readers of one parameter: the parameters of a call in
    torch, and the reader's op and operand there. Empty if the file does not say which parameters
    the call has. `targets` are the names of parameters."""
    call = call_of(reader.node)
    names = [name for name in call.tensors if name in targets] if call is not None else []
    return (call.op, *names, reader.node.op_type, reader.operand) if call and names else ()


def _readers(
    name: str,
    reads: dict[str, list[tuple[NodeProto, int]]],
    outer: Collection[int],
    through: tuple[NodeProto, ...],
) -> Iterator[_Reader]:
    """Yields the nodes that read tensor `name`, directly or through nodes of the main graph
    (`outer`) that only forward it.

    reads    the readers of each tensor, with the index of the operand
    through  the nodes passed so far
    """
    for node, i in reads.get(name, ()):
        if node.op_type in _PASSING and i == 0 and id(node) in outer:
            yield from _readers(node.output[0], reads, outer, (*through, node))
        else:
            yield _Reader(node, i, through)


def _is_vector_of(reader: _Reader, is_filled: bool) -> bool:
    """True if a node reads a vector as scale, bias or statistics or, if `is_filled`, a weight: such
    a tensor whose elements are all equal is shared only by chance."""
    op = reader.node.op_type
    weights = _WEIGHTS.get(op, ()) if is_filled else ()
    return op in _ELEMENTWISE or reader.operand in (*_VECTORS.get(op, ()), *weights)


def _is_uniform(tensor: TensorProto) -> bool:
    """True if the tensor is small, not external, and all its elements are equal."""
    size = int(np.prod(tensor.dims, dtype=np.int64))
    if tensor.data_location == TensorProto.EXTERNAL or not 0 < size <= _MERGED:
        return False
    values = numpy_helper.to_array(tensor)
    return bool((values == values.flat[0]).all())
