"""Predicts how much communication a rank hides behind what it computes meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_graphsurgeon as gs

from onnxpar.graph.collectives import COMPLETE, START


def hidden_seconds(
    nodes: Iterable[gs.Node], compute: Mapping[str, float], idle: Mapping[str, float], own: float
) -> float:
    """Seconds of communication in which a rank computes, less what starts and completions take; 0
    if these take longer.

    nodes    those of a rank, in order
    compute  seconds in which each node computes, by name
    idle     seconds in which the link of each collective works and no core does, by name
    own      seconds that all starts and completions take together

    A rank has one link: what is started first is sent first."""
    clock = free = saved = 0.0
    ends: dict[int, float] = {}
    for node in nodes:
        if node.op.startswith(START) and node.name in idle:
            free = max(clock, free) + idle[node.name]
            ends[id(node.outputs[0])] = free
            saved += idle[node.name]
        elif node.op == COMPLETE:
            end = max(clock, ends[id(node.inputs[0])])
            saved -= end - clock
            clock = end
        elif idle.get(node.name, 0.0) > 0.0:  # others run within hosts, in other streams
            saved -= max(free - clock, 0.0)
            clock = free = max(clock, free) + idle[node.name]
        else:
            clock += compute.get(node.name, 0.0)
    return max(saved - own, 0.0)
