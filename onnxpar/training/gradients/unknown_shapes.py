"""Errors for gradients that need an unknown size; they name the node that causes it."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.errors import ModelError


def has_shape(tensor: gs.Tensor) -> bool:
    """True if every size of a tensor is known."""
    return tensor.shape is not None and all(isinstance(s, (int, np.integer)) for s in tensor.shape)


def shape_error(tensor: gs.Tensor) -> ModelError:
    """Returns the error for a tensor of unknown shape that a gradient needs; it names the first
    node on the path to the tensor whose result has an unknown shape."""
    first, maker = _origin(tensor)
    needed = f"the gradient needs the shape of {tensor.name!r} ({_shape_text(tensor)})"
    if maker is None:
        return ModelError(
            f"the input {first.name!r} has open sizes, and {needed}; set its symbols with --dim "
            "NAME=SIZE, or, in a program per rank, give all ranks shards of equal size"
        )
    return ModelError(
        f"{maker.op} '{maker.name}' makes data-dependent sizes, and {needed}; export the model so "
        "that the shapes of its inputs decide all sizes (pad, then mask), leave out the weights "
        "before this node with --frozen, or, in a program per rank, give all ranks shards of equal "
        "size"
    )


def _origin(tensor: gs.Tensor) -> tuple[gs.Tensor, gs.Node | None]:
    """Returns (the first tensor of unknown shape on a path to this tensor, the node that computes
    it; None for an input)."""
    passed: set[str] = set()
    while tensor.inputs:
        maker = tensor.inputs[0]
        passed.add(tensor.name)
        before = [t for t in maker.inputs if t.name not in passed and _lacks_shape(t)]
        if not before:
            return tensor, maker
        tensor = before[0]
    return tensor, None


def _lacks_shape(tensor: gs.Tensor) -> bool:
    """True if an operand is a tensor of unknown shape; False for sequences and missing operands."""
    makes_sequence = any(node.op.startswith("Sequence") for node in tensor.inputs)
    return bool(tensor.name) and not makes_sequence and not has_shape(tensor)


def _shape_text(tensor: gs.Tensor) -> str:
    """Returns a shape as text, such as [4, ?]."""
    if tensor.shape is None:
        return "of unknown rank"
    return f"[{', '.join(str(s) if s is not None else '?' for s in tensor.shape)}]"
