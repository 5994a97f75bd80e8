"""Ranks that would wait for each other, or for a rank that does not come, are found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from onnx import helper

from onnxpar.equivalence.order import Disorder, check_order
from onnxpar.equivalence.program import Constants, Program, read_node
from onnxpar.equivalence.stored import WeightFiles

Send = tuple[int, Sequence[int]]


def rank(*sends: Send, op: str = "AllReduce", chained: bool = True) -> Program:
    """A rank with all-reduces, each of a tag and a group, in the order of their tokens."""
    token, nodes = "token", []
    for tag, group in sends:
        inputs = ["x", token if chained else "token"]
        node = helper.make_node(op, inputs, [f"y{tag}", f"t{tag}"], f"sum {tag}", domain="onnxpar")
        for name, value in (("tag", tag), ("group", list(group))):
            node.attribute.append(helper.make_attribute(name, value))
        nodes.append(read_node(node))
        token = f"t{tag}"
    return Program(Path(), nodes, [], [], Constants({}, Path(), WeightFiles()), {})


BOTH = (0, 1)


def test_the_same_order_everywhere() -> None:
    assert check_order([rank((1, BOTH), (2, BOTH)), rank((1, BOTH), (2, BOTH))]) == 2


def test_groups_of_some_ranks() -> None:
    ranks = [rank((1, (0, 1)), (3, (0, 2))), rank((1, (0, 1))), rank((3, (0, 2)))]
    assert check_order(ranks) == 2


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([rank((1, BOTH), (2, BOTH)), rank((2, BOTH), (1, BOTH))], "in a circle"),
        ([rank((1, BOTH)), rank()], "waits in 'sum 1' for rank 1, which lacks it"),
        ([rank((1, BOTH)), rank((1, (1, 0)))], "other groups"),
        ([rank((1, BOTH)), rank((1, BOTH), op="AllGather")], "is AllReduce 'sum 1' on rank 0"),
        ([rank((1, BOTH), (2, BOTH), chained=False)] * 2, "no token orders"),
        (
            [
                rank((1, (0, 1)), (3, (0, 2))),
                rank((2, (1, 2)), (1, (0, 1))),
                rank((3, (0, 2)), (2, (1, 2))),
            ],
            "in a circle",
        ),
    ],
)
def test_ranks_that_would_wait(ranks: list[Program], text: str) -> None:
    with pytest.raises(Disorder, match=text):
        check_order(ranks)
