"""The integers that an input may hold, from what its readers do with them."""

from __future__ import annotations

import onnx_graphsurgeon as gs

_FOLLOW = frozenset(
    (
        "Reshape",
        "Unsqueeze",
        "Squeeze",
        "Flatten",
        "Transpose",
        "Identity",
        "Expand",
        "Concat",
        "Slice",
        "Split",
        "Cast",
    )
)
_MASK = (0, 2)
"""A mask: what is cast to floating point or bool, compared, or multiplied."""


def integer_ranges(graph: gs.Graph) -> dict[str, tuple[int, int]]:
    """[low, high) for each integer input: rows of the tables it indexes, else a mask's 0 and 1."""
    return {
        tensor.name: _range(tensor, set()) or _MASK
        for tensor in graph.inputs
        if tensor.dtype is not None and "int" in str(tensor.dtype)
    }


def _range(tensor: gs.Tensor, seen: set[str]) -> tuple[int, int] | None:
    """The smallest range that all indexing readers allow; None where nothing indexes with it."""
    seen.add(tensor.name)
    found: list[tuple[int, int]] = []
    for node in tensor.outputs:
        position = next(i for i, t in enumerate(node.inputs) if t is tensor)
        limit = _limit(node, position)
        if limit is not None:
            found.append((0, limit))
        elif (node.op in _FOLLOW and position == 0) or node.op == "Concat":
            for result in node.outputs:
                if result.name not in seen and "float" not in str(result.dtype):
                    inner = _range(result, seen)
                    found += [inner] if inner else []
    return min(found, key=lambda r: r[1], default=None)


def _limit(node: gs.Node, position: int) -> int | None:
    """Rows of the table that a node looks the operand up in, or classes that a loss knows."""
    if node.op in ("Gather", "GatherElements") and position == 1:
        data = node.inputs[0].shape
        size = data[node.attrs.get("axis", 0)] if data else None
        return int(size) if isinstance(size, int) else None
    if node.op in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss") and position == 1:
        size = node.inputs[0].shape[1] if node.inputs[0].shape else None
        return int(size) if isinstance(size, int) else None
    return None
