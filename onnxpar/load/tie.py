"""Merges the copies of a parameter that an exporter has stored.

Exporters compute the transpose of a constant when they export. So the table of a language model
that is also its head, or a Linear that is called several times, is in the file once for each call,
and training would move the copies apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from onnx import GraphProto, TensorProto, helper

from onnxpar.base.arrays import Array
from onnxpar.graph.exported import TorchName
from onnxpar.graph.stored import read_stored, rename_reads

_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_Members = list[tuple[str, bool]]
"""Names of equal matrices; True for a transpose of the first."""


def tie(graph: GraphProto, named: Mapping[str, TorchName], folder: Path) -> dict[str, TorchName]:
    """Merges copies of a matrix, in place: nodes that read a copy read the first one, or a
    Transpose of it. Returns the names of the remaining tensors in torch.

    named   the names of tensors in torch, as far as they are known
    folder  has the model's external data

    Copies are matrices with equal bits, perhaps transposed, unless the file says that they are
    different parameters.
    """
    groups = [
        group
        for alike in _alike(graph, named)
        for equal in _equal(alike, folder)
        for group in _of_one_parameter(equal, named)
        if len(group) > 1
    ]
    _replace(graph, groups)
    remaining = dict(named)
    for (first, _), *copies in groups:
        members = [remaining.pop(name, TorchName((name,))) for name in (first, *dict(copies))]
        names = dict.fromkeys(name for member in members for name in member.names)
        is_certain = all(member.is_certain for member in members)
        stored = {first: False, **dict(copies)}
        remaining[first] = TorchName(tuple(names), members[0].transposed, is_certain, stored)
    return remaining


def names_in_torch(tensor: str, named: Mapping[str, TorchName]) -> tuple[str, ...]:
    """Returns the names in torch of the parameter that a stored tensor holds: several if copies
    were merged, or the tensor's own name if `named` does not have it."""
    return named[tensor].names if tensor in named else (tensor,)


def _alike(graph: GraphProto, named: Mapping[str, TorchName]) -> Iterator[list[TensorProto]]:
    """Yields groups of matrices among which there may be copies: of one type, with the same two
    sizes in either order. Matrices that an exporter has transposed come last in a group."""
    by_size: dict[tuple[int, ...], list[TensorProto]] = defaultdict(list)
    outputs = {port.name for port in graph.output}
    for tensor in graph.initializer:
        is_matrix = len(tensor.dims) == 2 and min(tensor.dims) > 0
        if is_matrix and tensor.data_type in _FLOATS and tensor.name not in outputs:
            by_size[(tensor.data_type, *sorted(tensor.dims))].append(tensor)
    for tensors in by_size.values():
        names = [names_in_torch(t.name, named)[:1] for t in tensors]
        is_open = any(t.name in named and not named[t.name].is_certain for t in tensors)
        if is_open or len(set(names)) < len(names):
            yield sorted(tensors, key=lambda t: t.name in named)


def _equal(tensors: Iterable[TensorProto], folder: Path) -> Iterator[_Members]:
    """Yields groups of equal matrices, also if one is the transpose of the other. Leaves out
    matrices whose elements are all one number: they are equal by chance."""
    by_corners: dict[bytes, list[tuple[TensorProto, _Members]]] = defaultdict(list)
    for tensor in tensors:
        value = _bits(tensor, folder)
        corners = [value[0, 0], value[-1, -1], *sorted((value[0, -1], value[-1, 0]))]
        known = by_corners[np.array(corners).tobytes()]
        for first, members in known:
            other = _bits(first, folder)
            if np.array_equal(other, value) or np.array_equal(other.T, value):
                members.append((tensor.name, not np.array_equal(other, value)))
                break
        else:
            if (value != value[0, 0]).any():
                known.append((tensor, [(tensor.name, False)]))
    for each in by_corners.values():
        yield from (members for _, members in each)


def _bits(tensor: TensorProto, folder: Path) -> Array:
    """Returns the elements of a stored matrix as unsigned integers, so that NaN equals NaN."""
    value = read_stored(tensor, folder)
    return value.view(f"u{value.itemsize}")


def _of_one_parameter(members: _Members, named: Mapping[str, TorchName]) -> list[_Members]:
    """Returns groups of equal matrices, each of one parameter: a single group, unless the file says
    with certainty that some are different parameters."""
    groups: dict[tuple[str, ...], _Members] = defaultdict(list)
    for name, is_transposed in members:
        if name not in named or named[name].is_certain:
            groups[names_in_torch(name, named)[:1]].append((name, is_transposed))
    if len(groups) < 2:
        return [members]
    return [[(name, t != group[0][1]) for name, t in group] for group in groups.values()]


def _replace(graph: GraphProto, groups: Sequence[_Members]) -> None:
    """Lets nodes that read a copy read the first matrix of its group, or a Transpose of it, which
    takes the name of one of the copies."""
    new: dict[str, str] = {}
    gone: set[str] = set()
    for (first, _), *copies in groups:
        gone.update(name for name, _ in copies)
        turned = [name for name, is_transposed in copies if is_transposed]
        new |= {name: turned[0] if is_transposed else first for name, is_transposed in copies}
        if turned:
            name = turned[0]
            node = helper.make_node("Transpose", [first], [name], f"{name}/tied", perm=[1, 0])
            graph.node.insert(0, node)
    rename_reads(graph, new)
    for field in (graph.initializer, graph.input):
        for entry in [each for each in field if each.name in gone]:
            field.remove(entry)
