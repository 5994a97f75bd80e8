"""Compression of gradients: what travels in place of them, and which reductions are theirs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.accumulators import accumulators
from onnxpar.collective import DOMAIN
from onnxpar.errors import StrategyError

NONE, TWO_BIT = "none", "2bit"
HALVES = ("float16", "bfloat16")
KINDS = (NONE, *HALVES, TWO_BIT)
THRESHOLD = 0.001
"""What 2bit sends of an element by default."""
REDUCTIONS = ("AllReduce", "ReduceScatter")

_MOVES = frozenset(
    ("Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Cast", "Add", "Sum")
)
_SCALES = ("Mul", "Div")
"""With a constant; together, the ops between the sums over ranks of a gradient and itself."""


@dataclass(frozen=True)
class Compression:
    """How gradients travel: in a type of 16 bits, or as multiples -1, 0 or 1 of a threshold."""

    kind: str
    threshold: float = THRESHOLD

    @staticmethod
    def parse(text: str) -> Compression | None:
        """`float16`, `bfloat16`, `2bit` or `2bit:0.01`; None for `none`. Errors: StrategyError."""
        kind, colon, rest = text.partition(":")
        if kind not in KINDS or (colon and kind != TWO_BIT):
            raise StrategyError(
                f"compression {text!r}: there are {', '.join(KINDS)} and {TWO_BIT}:THRESHOLD"
            )
        if not colon:
            return None if kind == NONE else Compression(kind)
        try:
            threshold = float(rest)
        except ValueError:
            threshold = math.nan
        if not 0 < threshold < math.inf:
            raise StrategyError(f"compression {text!r}: the threshold must be a number above 0")
        return Compression(kind, threshold)


def gradient_reductions(graph: gs.Graph, gradients: Mapping[str, str]) -> dict[str, str]:
    """The parameter behind each sum over ranks, by the name of the reshard node, that makes nothing
    but a part of a gradient; `gradients` are tensors by parameter.

    A sum may be taken before the last steps to a gradient (a Reshape, an Add of what several uses
    of a parameter give, what the turns of a loop add up to), which only move, add and scale
    elements; behind them begins the update.
    """
    tensors = {t.name: t for node in graph.nodes for t in node.outputs}
    found: dict[str, str] = {}
    for parameter, name in gradients.items():
        todo = [tensors[name]] if name in tensors else []
        while todo:
            tensor = todo.pop()
            for reader in tensor.outputs:
                if reader.domain == DOMAIN and reader.op in REDUCTIONS:
                    found.setdefault(reader.name, parameter)
            for maker in tensor.inputs:
                sums = [s for s in accumulators(maker) if maker.outputs[s.result] is tensor]
                todo += [s.add.inputs[s.term] for s in sums]
                if maker.domain == DOMAIN or maker.op in _MOVES or _scales(maker):
                    todo += [t for t in maker.inputs if t.inputs and len(t.outputs) == 1]
    return found


def _scales(node: gs.Node) -> bool:
    return node.op in _SCALES and any(isinstance(t, gs.Constant) for t in node.inputs)
