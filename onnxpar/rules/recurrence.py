"""Rule of recurrent networks, split by batch, direction or hidden units; split hidden units need an
all-gather of the state in every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_graphsurgeon as gs

from onnxpar.rules import recurrence_lowering
from onnxpar.rules.communicate import communicating
from onnxpar.rules.recurrence_lowering import GATES
from onnxpar.rules.rule import Local, Rule, einsum, given_specs, invalid, rule

_STEP = "every step of the recurrence needs all of it"
_INPUT = "the kernel multiplies it by W; a Scan without the kernel takes longer than to gather it"


@rule("LSTM GRU RNN")
def recurrence(node: gs.Node) -> Rule:
    """Sharding rule of LSTM, GRU, RNN: `s b i, d h + .. i, d h + .. k, d h + .., b, d b h, d b h, d
    h + .. -> s d b h ; d b h ; d b h`: steps s, batch b, features i, directions d, hidden units h.
    If h is split, every step gathers the state.

    Weights have one segment h for each gate. k, the units that a gate reads, stays whole.
    """
    if node.attrs.get("layout", 0):
        sequence, state, result = "b s i", "b d h", "b s d h"
    else:
        sequence, state, result = "s b i", "d b h", "s d b h"
    rows = _segments(GATES[node.op])
    operands = [sequence, f"d {rows} i", f"d {rows} k", f"d {_segments(2 * GATES[node.op])}"]
    operands += ["b", state, state, f"d {_segments(3)}"]
    operands = given_specs(operands, node.inputs)
    results = given_specs([result, state, state], node.outputs)
    whole = {**dict.fromkeys("sik", _STEP), "i": _INPUT}
    if {"activation_alpha", "activation_beta"} & node.attrs.keys():
        whole["d"] = "the slopes of its activations are listed for all directions together"
    units = node.attrs.get("hidden_size")
    if not units:
        raise invalid(node, "no hidden_size, which onnxruntime requires")
    fields = communicating(node, "h", [units], recurrence_lowering.lower)
    return einsum(
        node,
        f"{', '.join(operands)} -> {'; '.join(results)}",
        sizes={"h": units},
        local=_local_direction(node),
        **{**fields, "whole": {**whole, **fields.get("whole", {})}},
    )


def _segments(count: int) -> str:
    """`count` segments h of a dimension, as text of a rule: "h + h + h"."""
    return " + ".join(["h"] * count)


def _local_direction(node: gs.Node) -> dict[str | int, Callable[[Local], Any]]:
    """Returns the attributes, as functions of the rank's view, for a rank that runs only one of two
    directions; none if the node has only one."""
    activations = node.attrs.get("activations")
    one_way = ("forward", "reverse")

    def direction(local: Local) -> str:
        held = local.positions("d")
        return "bidirectional" if len(held) > 1 else one_way[int(held[0])]

    def chosen(local: Local) -> list[str]:
        assert activations is not None
        half = len(activations) // 2
        return [
            activations[i] for d in local.positions("d") for i in range(d * half, (d + 1) * half)
        ]

    if node.attrs.get("direction", "forward") != "bidirectional":
        return {}
    if activations is None:
        return {"direction": direction}
    return {"direction": direction, "activations": chosen}
