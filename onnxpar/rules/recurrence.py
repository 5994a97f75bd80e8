"""Recurrent networks: the batch passes, and each direction may run on a rank of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_graphsurgeon as gs

from onnxpar.rules.rule import Local, Rule, einsum, rule

_STEP = "every step of the recurrence needs all of it"


@rule("LSTM GRU RNN")
def recurrence(node: gs.Node) -> Rule:
    """`s b i, d g i, d g h, d e, b, d b h, d b h, _ -> s d b h ; d b h ; d b h`: b and d pass.

    Hidden units stay whole: each step would gather the state.
    """
    if node.attrs.get("layout", 0):
        sequence, state, result = "b s i", "b d h", "b s d h"
    else:
        sequence, state, result = "s b i", "d b h", "s d b h"
    operands = [sequence, "d g i", "d g h", "d e", "b", state, state, "d f"]
    operands = [o if t.name else "_" for o, t in zip(operands, node.inputs, strict=False)]
    results = [result, state, state]
    results = [r if t.name else "_" for r, t in zip(results, node.outputs, strict=False)]
    used = {c for text in operands + results for c in text}
    whole = {f: _STEP for f in "sighef" if f in used}
    if {"activation_alpha", "activation_beta"} & node.attrs.keys():
        whole["d"] = "the slopes of its activations are listed for all directions together"
    return einsum(
        node,
        f"{', '.join(operands)} -> {'; '.join(results)}",
        whole=whole,
        local=_local_direction(node),
    )


def _local_direction(node: gs.Node) -> dict[str | int, Callable[[Local], Any]]:
    """The attributes of one of two directions, where a rank runs only that one."""
    activations = node.attrs.get("activations")
    one_way = ("forward", "reverse")

    def direction(local: Local) -> str:
        held = local.positions("d")
        return "bidirectional" if len(held) > 1 else one_way[int(held[0])]

    def chosen(local: Local) -> list[str]:
        assert activations is not None
        each = len(activations) // 2
        return [
            activations[i] for d in local.positions("d") for i in range(d * each, (d + 1) * each)
        ]

    if node.attrs.get("direction", "forward") != "bidirectional":
        return {}
    if activations is None:
        return {"direction": direction}
    return {"direction": direction, "activations": chosen}
