"""Replaces a sequence by a Split if nodes only pick single elements of it: unlike a sequence, the
results of a Split have layouts and gradients.

torch's dynamo exporter writes `split` and `unbind` as sequences unless it optimizes the model.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.subgraphs import scopes
from onnxpar.graph.tensors import constant

_MOST_PARTS = 1 << 12
"""Most elements of a sequence that becomes a Split, which has a result for each element."""


def split_sequences(graph: gs.Graph) -> None:
    """Replaces a SplitToSequence by a Split, in place, if each of its readers picks one element at
    a constant position. Requires static shapes."""
    for scope in scopes(graph):
        for node in list(scope.nodes):
            if node.op == "SplitToSequence":
                _replace(scope, node)


def _replace(graph: gs.Graph, node: gs.Node) -> None:
    """Replaces a SplitToSequence by a Split, if all its readers pick single elements."""
    sequence, x = node.outputs[0], node.inputs[0]
    readers = list(sequence.outputs)
    here = {id(n) for n in graph.nodes}
    sizes = _sizes(node)
    picked = [_place(r, len(sizes)) for r in readers]
    places = [place for place in picked if place is not None]
    is_read_here = all(id(r) in here for r in readers) and sequence.name not in {
        t.name for t in graph.outputs
    }
    if not is_read_here or not sizes or len(places) < len(picked):
        return
    axis, rank = node.attrs.get("axis", 0), len(x.shape)
    whole = node.attrs.get("keepdims", 1)
    parts = [gs.Variable(f"{node.name}::{i}", x.dtype, list(x.shape)) for i in range(len(sizes))]
    for part, size in zip(parts, sizes, strict=True):
        part.shape[axis] = size
    for reader, place in zip(readers, places, strict=True):
        part = parts[place]
        axes = [] if whole else [_integers(f"{reader.name}::axes", [axis % rank])]
        reader.inputs = [part, *axes]
        reader.op, reader.attrs = "Identity" if whole else "Squeeze", {}
    node.inputs = [x, _integers(f"{node.name}::sizes", sizes)]
    node.op, node.attrs, node.outputs = "Split", {"axis": axis}, parts


def _place(reader: gs.Node, count: int) -> int | None:
    """Returns the position, from 0 to count - 1, of the element that `reader` picks from a sequence
    of `count` elements; None if it does anything else, or if the position is no constant."""
    number = constant(reader.inputs[1]) if reader.op == "SequenceAt" else None
    place = count if number is None or number.shape else int(number)
    return place % count if -count <= place < count else None


def _sizes(node: gs.Node) -> list[int]:
    """Returns the sizes of the elements of a SplitToSequence along its axis; none if they are
    data-dependent or too many."""
    shape, axis = node.inputs[0].shape, node.attrs.get("axis", 0)
    if shape is None or not all(isinstance(s, (int, np.integer)) for s in shape):
        return []
    if not -len(shape) <= axis < len(shape):  # onnxruntime says so in a run
        return []
    size = int(shape[axis])
    if len(node.inputs) < 2:
        return [1] * size if size <= _MOST_PARTS else []
    split = constant(node.inputs[1])
    if split is None or not node.attrs.get("keepdims", 1):  # only onnxruntime heeds keepdims
        return []
    if split.ndim:
        return [int(s) for s in split]
    step = int(split)
    if step < 1 or size // step > _MOST_PARTS:
        return []
    return [min(step, size - at) for at in range(0, size, step)]


def _integers(name: str, values: list[int]) -> gs.Constant:
    return gs.Constant(name, np.array(values, np.int64))
