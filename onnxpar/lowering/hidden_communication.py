"""Predicts how many seconds of communication a rank hides behind compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_graphsurgeon as gs

from onnxpar.graph.collectives import COMPLETE, START


def hidden_seconds(
    nodes: Iterable[gs.Node], compute: Mapping[str, float], idle: Mapping[str, float], own: float
) -> float:
    """Returns the seconds of communication that compute hides, less the time of starts and
    completions; 0 if these take longer.

    nodes    the nodes of a rank, in order
    compute  the compute time of each node in seconds, by name
    idle     seconds in which a collective occupies the link but no core, by name of the collective
    own      the time of all starts and completions together, in seconds

    A rank has one link, which serves collectives in the order of their starts.
    """
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
        elif idle.get(node.name, 0.0) > 0.0:  # without idle time: within a host, in another stream
            saved -= max(free - clock, 0.0)
            clock = free = max(clock, free) + idle[node.name]
        else:
            clock += compute.get(node.name, 0.0)
    return max(saved - own, 0.0)
