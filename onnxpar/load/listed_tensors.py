"""Replaces a sequence that lists tensors by the tensors themselves, where a node joins them or
picks one of them: unlike a sequence, tensors have layouts and gradients."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto

from onnxpar.graph.patterns import Known, Match, Op, attributes, rewrite
from onnxpar.graph.stored import onnx_opset

_AXES_BY_OPERAND = 13
"""The opset since which an operand of Unsqueeze gives the axes."""
_LIST = Op("SequenceConstruct", name="list")


def read_listed(model: ModelProto) -> None:
    """Replaces ConcatFromSequence of a SequenceConstruct by a Concat of its tensors, and SequenceAt
    at a constant position by the tensor, in place; from opset 13 on."""
    if onnx_opset(model) >= _AXES_BY_OPERAND:
        table = {
            Op("ConcatFromSequence", _LIST): _join,
            Op("SequenceAt", _LIST, Known("place")): _pick,
        }
        rewrite(model.graph, table)


def _join(at: Match) -> None:
    """Replaces a ConcatFromSequence of listed tensors by a Concat of them, with a new axis if the
    node makes one."""
    attrs, tensors = attributes(at.node), list(at["list"].input)
    if attrs.get("new_axis"):
        axis = at.constant(np.array([attrs["axis"]]), "axis")
        tensors = [at.add("Unsqueeze", [t, axis], str(i)) for i, t in enumerate(tensors)]
    at.add("Concat", tensors, axis=attrs["axis"])


def _pick(at: Match) -> bool:
    """Replaces a SequenceAt of listed tensors by an Identity of the tensor; False if the position
    is out of range, so that the node stays."""
    tensors, place = at["list"].input, at["place"]
    if place.ndim or not -len(tensors) <= place < len(tensors):
        return False
    at.add("Identity", [tensors[int(place)]])
    return True
