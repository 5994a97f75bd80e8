"""The seconds of communication that a rank hides, on a clock that moves from node to node."""

from __future__ import annotations

import onnx_graphsurgeon as gs
import pytest

from onnxpar.lowering.hidden_communication import hidden_seconds

COMPUTE = {"a": 3.0, "b": 4.0, "c": 2.0}


def hidden(order: str, own: float = 0.0, **idle: float) -> float:
    """`a`: a node; `x+`: the start of a collective; `x-`: its completion; `x`: it is in one op."""
    pending = {name: gs.Variable(f"{name}::pending") for name in idle}
    nodes = []
    for word in order.split():
        name = word.rstrip("+-")
        if word.endswith("-"):
            nodes.append(gs.Node("Complete", f"{name}::complete", {}, [pending[name]]))
        else:
            op = "StartAllReduce" if word.endswith("+") else "AllReduce" if name in idle else "Exp"
            nodes.append(gs.Node(op, name, {}, [], [pending[name]] if name in idle else []))
    return hidden_seconds(nodes, COMPUTE, idle, own)


@pytest.mark.parametrize(
    ("order", "idle", "expected"),
    [
        ("a x b c", {"x": 5.0}, 0.0),
        ("a x+ b c x-", {"x": 5.0}, 5.0),
        ("a x+ b x- c", {"x": 5.0}, 4.0),
        ("a x+ x- b c", {"x": 5.0}, 0.0),
        (
            "x+ a y+ b x- y- c",
            {"x": 5.0, "y": 4.0},
            7.0,
        ),  # y is sent from 5 to 9; a rank waits from 7
        ("x+ a y b x- c", {"x": 5.0, "y": 4.0}, 3.0),  # y waits for the link until 5
        ("x+ a y b x- c", {"x": 9.0, "y": 4.0}, 3.0),
        ("x+ a y b x- c", {"x": 5.0, "y": 0.0}, 5.0),  # y stays within a host
    ],
)
def test_what_is_hidden(order: str, idle: dict[str, float], expected: float) -> None:
    assert hidden(order, **idle) == expected
    assert hidden(order, own=0.5, **idle) == max(expected - 0.5, 0.0)
