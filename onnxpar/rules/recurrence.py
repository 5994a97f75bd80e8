"""Recurrent networks: the batch passes."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxpar.rules.rule import Rule, einsum, rule


@rule("LSTM GRU RNN")
def recurrence(node: gs.Node) -> Rule:
    """`s b i, d g i, d g h, d e, b, d b h, d b h, _ -> s d b h ; d b h ; d b h`, only b passes."""
    if node.attrs.get("layout", 0):
        sequence, state, result = "b s i", "b d h", "b s d h"
    else:
        sequence, state, result = "s b i", "d b h", "s d b h"
    operands = [sequence, "d g i", "d g h", "d e", "b", state, state, "d f"]
    operands = [o if t.name else "_" for o, t in zip(operands, node.inputs, strict=False)]
    results = [result, state, state]
    results = [r if t.name else "_" for r, t in zip(results, node.outputs, strict=False)]
    used = {c for text in operands + results for c in text}
    reason = "every step of the recurrence needs all of it"
    return einsum(
        node,
        f"{', '.join(operands)} -> {'; '.join(results)}",
        whole={f: reason for f in "sidghef" if f in used},
    )
