"""Compression of gradients that ranks send: its kinds, and which reductions it applies to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.graph.clone import needed
from onnxpar.graph.collectives import KINDS as COLLECTIVES
from onnxpar.graph.reshards import is_reshard
from onnxpar.graph.subgraphs import all_nodes, scopes
from onnxpar.sharding.accumulators import accumulators, source

NONE, TWO_BIT = "none", "2bit"
HALVES = ("float16", "bfloat16")
KINDS = (NONE, *HALVES, TWO_BIT)
THRESHOLD = 0.1
"""Default threshold of 2bit: an element is sent as this value, its negative, or 0."""
LEAST_BYTES = 1024
"""Gradients of fewer bytes per rank are sent as they are: for them, latency dominates."""

_MOVES = frozenset(
    (
        *("Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Cast"),
        *("Slice", "Split", "Pad", "Concat", "Add", "Sum"),
    )
)
_SCALES = ("Mul", "Div")
"""Ops that scale by a constant. Only ops of `_MOVES` and `_SCALES` may stand between a reduction
and its gradient."""


@dataclass(frozen=True)
class Compression:
    """The form in which ranks send gradients.

    kind       "float16", "bfloat16", or "2bit": each element is sent as -1, 0 or 1 times a
               threshold
    threshold  that of 2bit
    """

    kind: str
    threshold: float = THRESHOLD

    @staticmethod
    def parse(text: str) -> Compression | None:
        """Returns the compression that a text names: `float16`, `bfloat16`, `2bit` or `2bit:0.01`;
        None for `none`. Errors: StrategyError for any other text."""
        kind, colon, number = text.partition(":")
        if kind not in KINDS or (colon and kind != TWO_BIT):
            raise StrategyError(
                f"compression {text!r} is unknown; choose {', '.join(KINDS)} or {TWO_BIT}:THRESHOLD"
            )
        if not colon:
            return None if kind == NONE else Compression(kind)
        try:
            threshold = float(number)
        except ValueError:
            threshold = math.nan
        if not 0 < threshold < math.inf:
            raise StrategyError(f"compression {text!r}: the threshold must be a positive number")
        return Compression(kind, threshold)


def gradient_reductions(graph: gs.Graph, gradients: Mapping[str, str]) -> dict[str, str]:
    """Returns the reductions of gradients over ranks: the name of each reshard node, with the
    parameter whose gradient it reduces. `gradients` has the tensor of each parameter's gradient.

    Only ops that move, add and scale elements may stand between a reduction and the gradient: a
    Reshape, an Add over several uses of a parameter, a loop's sum over iterations. A reduction
    whose result the backward pass reads further on is left out.
    """
    named = {tensor: parameter for parameter, tensor in gradients.items()}
    backward = {node.name for node in needed(graph, list(named))}
    parts = _parts(graph, named)
    reductions: dict[str, str] = {}
    for node in all_nodes(graph):
        if is_reshard(node) and COLLECTIVES[node.op].reduces:
            parameter = parts.get(node.outputs[0].name)
            if node.name not in backward:
                parameter = parameter or named.get(source(node.inputs[0]).name)
            if parameter:
                reductions[node.name] = parameter
    return reductions


def gradient_tensors(graph: gs.Graph, gradients: Mapping[str, str]) -> set[str]:
    """Returns the names of the gradients, and of tensors that serve only to compute gradients."""
    named = {tensor: parameter for parameter, tensor in gradients.items()}
    return {*named, *_parts(graph, named)}


def _parts(graph: gs.Graph, named: Mapping[str, str]) -> dict[str, str]:
    """Returns the tensors that become a gradient by moves, additions, scalings and reshards alone,
    each with the parameter of the gradient. `named` has the parameter of each gradient."""
    carried = {s.back.name: n.outputs[s.result] for n in graph.nodes for s in accumulators(n)}
    parts: dict[str, str] = {}
    for scope in scopes(graph):
        for node in reversed(scope.nodes):
            for tensor in node.outputs:
                becomes = [t for reader in tensor.outputs for t in reader.outputs]
                becomes += [carried[tensor.name]] if tensor.name in carried else []
                owners = [named.get(t.name) or parts.get(t.name) for t in becomes]
                parameters = [parameter for parameter in owners if parameter]
                if (
                    parameters
                    and len(parameters) == len(owners)
                    and all(map(_moves, tensor.outputs))
                ):
                    parts[tensor.name] = parameters[0]
    return parts


def _moves(node: gs.Node) -> bool:
    """True for a node that only moves, adds or scales elements, or reshards."""
    scales = node.op in _SCALES and any(isinstance(t, gs.Constant) for t in node.inputs)
    return is_reshard(node) or node.op in _MOVES or scales
