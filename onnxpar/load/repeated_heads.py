"""Finds keys and values as they are before a model copies them, in attention in which several query
heads share a key head (grouped queries)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import constant, tensor_shape

_MOVES = ("Reshape", "Transpose", "Expand", "Unsqueeze", "Identity")
_SCALES = ("Mul", "Div")
_Atom = tuple[str, int]
_Dims = list[list[_Atom]]


@dataclass
class Unrepeated:
    """Keys or values before a model copies them for query heads.

    source  the tensor, (batch, key heads, positions, width)
    scales  nodes that multiply or divide them by a number, each with the number
    nodes   all nodes that copy and scale them
    """

    source: gs.Tensor
    scales: list[tuple[gs.Node, gs.Tensor]]
    nodes: list[gs.Node]

    @property
    def heads(self) -> int:
        """The number of key heads."""
        shape = tensor_shape(self.source) or (0, 0)
        return shape[1] or 0


def find_unrepeated(tensor: gs.Tensor, is_turned: bool) -> Unrepeated | None:
    """Returns the keys or values that `tensor` repeats for each query head; None if it has no
    copies. `tensor` is (batch, heads, width, positions) if `is_turned`, as keys are, else (batch,
    heads, positions, width)."""
    chain: list[gs.Node] = []
    at = tensor
    while at.inputs and (node := at.inputs[0]).op in (*_MOVES, *_SCALES) and not node.domain:
        is_scale = node.op in _SCALES
        if is_scale and (constant(node.inputs[1]) is None or tensor_shape(node.inputs[1]) != ()):
            return None
        chain.insert(0, node)
        at = node.inputs[0]
        shape = tensor_shape(at) or ()
        is_source = len(shape) == 4 and None not in shape and any(n.op == "Expand" for n in chain)
        if is_source and _repeats(chain, [s or 0 for s in shape], is_turned):
            scales = [(n, n.inputs[1]) for n in chain if n.op in _SCALES]
            return Unrepeated(at, scales, chain)
    return None


def _repeats(chain: list[gs.Node], shape: list[int], is_turned: bool) -> bool:
    """True if these nodes copy each head several times in a row, and otherwise only scale numbers
    and, if `is_turned`, exchange the last two dimensions. `shape` is that before the nodes."""
    batch, heads, positions, width = ([(name, s)] for name, s in zip("bktd", shape, strict=True))
    dims: _Dims | None = [batch, heads, positions, width]
    for number, node in enumerate(chain):
        if dims is not None and node.op not in (*_SCALES, "Identity"):
            dims = _moved(dims, node, number)
    if dims is None or len(dims) != 4:
        return False
    atoms = [[a for a in dim if a[1] != 1] for dim in dims]
    copies = [a for a in atoms[1] if a[0] not in "bktd"]
    rows, columns = (width, positions) if is_turned else (positions, width)
    wanted = [batch, [*heads, *copies], rows, columns]
    return bool(copies) and atoms == [[a for a in dim if a[1] != 1] for dim in wanted]


def _moved(dims: _Dims, node: gs.Node, number: int) -> _Dims | None:
    """Returns the dimensions of a node's result, each as a list of factors, from the dimensions of
    its operand (`dims`). A factor (an "atom") has a name and a size: heads copied twice are [("k",
    4), ("copy0.2", 2)]. None if a dimension would end within a factor. `number` names the copies
    that an Expand makes."""
    shape = tensor_shape(node.outputs[0])
    if shape is None or None in shape:
        return None
    if node.op == "Transpose":
        return [dims[i] for i in node.attrs["perm"]] if "perm" in node.attrs else dims[::-1]
    if node.op == "Expand":
        sizes = [math.prod(size for _, size in dim) for dim in dims]
        padded: _Dims = [[] for _ in range(len(shape) - len(dims))]
        padded += dims
        sizes = [1] * (len(shape) - len(sizes)) + sizes
        return [
            dim if old == new else [(f"copy{number}.{i}", new or 0)]
            for i, (dim, old, new) in enumerate(zip(padded, sizes, shape, strict=True))
        ]
    flat = [atom for dim in dims for atom in dim if atom[1] != 1]
    moved: _Dims = []
    for size in shape:
        taken: list[_Atom] = []
        while flat and math.prod(s for _, s in taken) < (size or 0):
            taken.append(flat.pop(0))
        if math.prod(s for _, s in taken) != size:
            return None
        moved.append(taken)
    return moved if not flat else None
