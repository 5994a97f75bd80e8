"""Sums that a loop carries stay pending to its end, wherever they begin."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bodies import FLOAT, agree, graph, kinds, node, save, values

SPLIT = {"shard": {"product": [[None, "tp"], ["tp", None]]}}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("start", ["fed", "zero", "one"])
def test_one_reduction_for_all_turns(start: str, ranks: int, tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "w"], ["p"], "product"), node("Add", ["s", "p"], ["t"])]
    body = graph(
        "body", nodes, [("s", FLOAT, [4, 6]), ("x", FLOAT, [4, 8])], [("t", FLOAT, [4, 6])]
    )
    fed = {"xs": values(5, 4, 8), "s0": values(4, 6)}
    weights = {"w": values(8, 6)}
    if start != "fed":
        weights["s0"] = np.full_like(fed.pop("s0"), start == "one")
    main = graph(
        "g",
        [node("Scan", ["s0", "xs"], ["y"], "scan", body=body, num_scan_inputs=1)],
        [(name, FLOAT, list(value.shape)) for name, value in fed.items()],
        [("y", FLOAT, [4, 6])],
        weights,
    )
    plan = agree(save(tmp_path / "m.onnx", main), [fed], f"tp={ranks}", SPLIT)
    assert kinds(plan) == ["AllReduce"]
    assert plan.collectives[0].tensor == "y"


def test_a_sum_that_each_turn_reads_is_reduced_in_each(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["p"], "product"),
        node("Add", ["s", "p"], ["t"]),
        node("Relu", ["t"], ["r"]),
    ]
    body = graph(
        "body",
        nodes,
        [("s", FLOAT, [4, 6]), ("x", FLOAT, [4, 8])],
        [("t", FLOAT, [4, 6]), ("r", FLOAT, [4, 6])],
    )
    main = graph(
        "g",
        [node("Scan", ["s0", "xs"], ["y", "rs"], "scan", body=body, num_scan_inputs=1)],
        [("xs", FLOAT, [5, 4, 8])],
        [("y", FLOAT, [4, 6]), ("rs", FLOAT, [5, 4, 6])],
        {"w": values(8, 6), "s0": values(4, 6)},
    )
    feeds = [{"xs": values(5, 4, 8)}]
    plan = agree(save(tmp_path / "m.onnx", main), feeds, "tp=2", SPLIT)
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("AllReduce", 5 * 4 * 6 * 4)]
