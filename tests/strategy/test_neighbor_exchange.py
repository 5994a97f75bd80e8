"""MindSpore's NeighborExchange and NeighborExchangeV2, against NumPy and the documented example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxpar.base.errors import StrategyError
from onnxpar.compiler.plan import Plan
from onnxpar.layout.mesh import Mesh
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.runtime.session.threads import ThreadSession
from onnxpar.strategy.strategy import Strategy

ABOVE = [*[-1] * 4, 1, *[-1] * 3, 0, *[-1] * 7]
"""Rank 1 is below rank 0, so rank 0 is above rank 1."""
PAIR = {"send_rank_ids": ABOVE, "recv_rank_ids": ABOVE}


def run(
    folder: Path,
    ranks: int,
    node: Any,
    inputs: Mapping[str, Sequence[int]],
    outputs: Mapping[str, Sequence[int]],
    feeds: Mapping[str, Any],
    groups: Mapping[str, Any] | None = None,
) -> tuple[Plan, list[list[Any]]]:
    """The plan, and the outputs of each rank, of a program of one exchange."""
    ports = [
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in p.items()]
        for p in (inputs, outputs)
    ]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("onnxpar", 1)]
    graph = helper.make_graph([node], "program", *ports)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), folder / "m.onnx")
    shapes = {**inputs, **outputs}
    tensors = {n: ["r", *[None] * (len(s) - 1)] for n, s in shapes.items()}
    strategy = Strategy.of({"tensors": tensors, "groups": dict(groups or {})})
    how = Options(
        mesh=Mesh.parse(f"r={ranks}"), preset="manual", strategy=strategy, check_layouts=True
    )
    plan = sharder.shard(folder / "m.onnx", folder / "m.par", how)
    with ThreadSession(folder / "m.par", timeout=20) as session:
        found = session.run(None, dict(feeds))
    return plan, [np.split(np.asarray(y), ranks) for y in found]


def exchange(inputs: Sequence[str], outputs: Sequence[str], **attrs: Any) -> Any:
    return helper.make_node(
        "NeighborExchange", list(inputs), list(outputs), "n", domain="onnxpar", **attrs
    )


def grid(**attrs: Any) -> Any:
    return helper.make_node("NeighborExchangeV2", ["x"], ["y"], "n", domain="onnxpar", **attrs)


def normal(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def test_a_ring_in_both_directions(tmp_path: Path) -> None:
    """Each of four ranks sends a to the next rank and b to the one before."""
    there = [(r + step) % 4 for r in range(4) for step in (1, -1)]
    back = [(r - step) % 4 for r in range(4) for step in (1, -1)]
    node = exchange(["a", "b"], ["c", "d"], send_rank_ids=there, recv_rank_ids=back)
    feeds = {"a": normal(8, 3), "b": normal(4, 5)}
    shapes = {"a": [2, 3], "b": [1, 5]}
    plan, (c, d) = run(tmp_path, 4, node, shapes, {"c": [2, 3], "d": [1, 5]}, feeds)
    a, b = (np.split(feeds[n], 4) for n in "ab")
    for r in range(4):
        np.testing.assert_array_equal(c[r], a[(r - 1) % 4])
        np.testing.assert_array_equal(d[r], b[(r + 1) % 4])
    assert [(x.kind, x.bytes) for x in plan.collectives] == [
        ("CollectivePermute", 24),
        ("CollectivePermute", 20),
    ]


def test_any_lists(tmp_path: Path) -> None:
    """Rank 0 sends two tensors to rank 2, rank 1 one to itself; rank 2 sends nothing back."""
    node = exchange(
        ["a", "b"],
        ["c", "d"],
        send_rank_ids=[2, 2, 1, -1, -1, 0],
        recv_rank_ids=[-1, 2, -1, 1, 0, 0],
    )
    feeds = {"a": normal(3, 4), "b": normal(3, 4)[::-1].copy()}
    ports = {"a": [1, 4], "b": [1, 4]}, {"c": [1, 4], "d": [1, 4]}
    _, (c, d) = run(tmp_path, 3, node, *ports, feeds)
    a, b, zero = feeds["a"], feeds["b"], np.zeros(4, np.float32)
    np.testing.assert_array_equal(np.concatenate(c), [zero, zero, a[0]])
    np.testing.assert_array_equal(np.concatenate(d), [b[2], a[1], b[0]])


def test_within_a_group(tmp_path: Path) -> None:
    """Members are counted within the group; rank 1 is in none, and keeps its tensor."""
    node = exchange(["x"], ["y"], send_rank_ids=[1, 0], recv_rank_ids=[1, 0], group="ends")
    x = normal(3, 4)
    shapes = {"x": [1, 4]}, {"y": [1, 4]}
    _, (y,) = run(tmp_path, 3, node, *shapes, {"x": x}, groups={"ends": [0, 2]})
    np.testing.assert_array_equal(np.concatenate(y), x[[2, 1, 0]])


def test_the_example_of_mindspore(tmp_path: Path) -> None:
    """Two ranks, one below the other, with ones and twos: rank 0 prints
    [[[[1. 1.], [1. 1.], [2. 2.]]]]."""
    lens = [0, 1, 0, 0, 1, 0, 0, 0]
    node = grid(**PAIR, send_lens=lens, recv_lens=lens, data_format="NCHW")
    x = np.ones([2, 1, 2, 2], np.float32) * np.array([1, 2], np.float32).reshape(2, 1, 1, 1)
    _, (y,) = run(tmp_path, 2, node, {"x": [1, 1, 2, 2]}, {"y": [1, 1, 3, 2]}, {"x": x})
    np.testing.assert_array_equal(y[0], [[[[1, 1], [1, 1], [2, 2]]]])
    np.testing.assert_array_equal(y[1], [[[[1, 1], [2, 2], [2, 2]]]])


def neighbors(rows: int, columns: int, turns: bool) -> list[int]:
    """The eight neighbours of each rank in a grid, clockwise from the top."""
    steps = [(-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1)]
    found = []
    for row in range(rows):
        for column in range(columns):
            for down, right in steps:
                at = row + down, column + right
                inside = 0 <= at[0] < rows and 0 <= at[1] < columns
                at = at[0] % rows, at[1] % columns
                found.append(at[0] * columns + at[1] if inside or turns else -1)
    return found


@pytest.mark.parametrize("turns", [True, False])
def test_a_grid_of_eight_neighbours(tmp_path: Path, turns: bool) -> None:
    """An image in 3 x 3 parts: with their frames, parts of the image padded round or by zeros."""
    image = normal(1, 2, 12, 15)
    top, bottom, left, right = 2, 1, 3, 2
    parts = [image[:, :, 4 * i : 4 * i + 4, 5 * j : 5 * j + 5] for i in range(3) for j in range(3)]
    ids = neighbors(3, 3, turns)
    node = grid(
        send_rank_ids=ids,
        recv_rank_ids=ids,
        send_lens=[bottom, top, right, left],
        recv_lens=[top, bottom, left, right],
    )
    shapes = {"x": [1, 2, 4, 5]}, {"y": [1, 2, 4 + top + bottom, 5 + left + right]}
    plan, (y,) = run(tmp_path, 9, node, *shapes, {"x": np.concatenate(parts)})
    widths = ((0, 0), (0, 0), (top, bottom), (left, right))
    padded = np.pad(image, widths, mode="wrap" if turns else "constant")
    for rank in range(9):
        i, j = divmod(rank, 3)
        wanted = padded[:, :, 4 * i : 4 * i + 7, 5 * j : 5 * j + 10]
        np.testing.assert_array_equal(y[rank], wanted)
    assert [c.kind for c in plan.collectives] == ["CollectivePermute"] * 8
    sides = {2 * 5 * 2, 1 * 5 * 2, 4 * 3 * 2, 4 * 2 * 2}
    corners = {2 * 3 * 2, 2 * 2 * 2, 1 * 3 * 2, 1 * 2 * 2}
    assert {c.bytes for c in plan.collectives} == {4 * n for n in sides | corners}


RING = {"send_rank_ids": [1, 0], "recv_rank_ids": [1, 0]}
ALONE = {"send_rank_ids": [-1] * 16, "recv_rank_ids": [-1] * 16}
SIDES = {"send_lens": [0, 0, 0, 0], "recv_lens": [0, 0, 0, 0]}
BELOW = [*[-1] * 4, 1, *[-1] * 11]


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (exchange(["x"], ["y"], send_rank_ids=[1], recv_rank_ids=[1]), "has 1 entries; give 2 x 1"),
        (exchange(["x"], ["y"], **{**RING, "send_rank_ids": [2, 0]}), "has 2, but a group has"),
        (
            exchange(["x"], ["y"], send_rank_ids=[1, -1], recv_rank_ids=[-1, -1]),
            "member 0 sends 1 tensors to member 1, which receives 0 from it",
        ),
        (
            exchange(["x"], ["y"], send_rank_ids=[-1, -1], recv_rank_ids=[-1, -1]),
            "no member receives output 0, 'y'",
        ),
        (grid(**ALONE, **SIDES, data_format="NHWC"), "data_format=NHWC: only NCHW is supported"),
        (grid(**ALONE, **{**SIDES, "send_lens": [1, 2]}), r"send_lens=\[1, 2\]: give \[top"),
        (grid(**{**ALONE, "send_rank_ids": BELOW}, **SIDES), "sends to member 1 in direction 4"),
        (grid(**{**ALONE, "recv_rank_ids": BELOW}, **SIDES), "receives from member 1 in direction"),
    ],
)
def test_bad_exchanges(tmp_path: Path, node: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=f"'n': .*{message}"):
        x = {"x": [1, 1, 2, 2]}
        run(tmp_path, 2, node, x, {"y": [1, 1, 2, 2]}, {"x": np.zeros((2, 1, 2, 2), "f4")})


def test_widths_of_two_neighbours_must_agree(tmp_path: Path) -> None:
    node = grid(**PAIR, send_lens=[1, 1, 0, 0], recv_lens=[1, 2, 0, 0])
    with pytest.raises(
        StrategyError, match="receives 2 at its bottom from member 1, which sends 1"
    ):
        x = {"x": [1, 1, 2, 2]}
        run(tmp_path, 2, node, x, {"y": [1, 1, 2, 2]}, {"x": np.zeros((2, 1, 2, 2), "f4")})


@pytest.mark.parametrize(("side", "length"), [(0, 3), (1, 3), (2, 4), (3, 4)])
def test_a_member_sends_no_more_than_it_has(tmp_path: Path, side: int, length: int) -> None:
    """Shorter slices would make the result smaller than the widths say."""
    widths = [0] * 4
    widths[side] = length
    node = grid(**ALONE, send_lens=[0] * 4, recv_lens=widths)
    shape = [1, 1, 2, 3]
    what = "rows" if side < 2 else "columns"
    message = f"{length} at a side, but its input 'x' has {length - 1} {what}"
    with pytest.raises(StrategyError, match=message):
        run(tmp_path, 2, node, {"x": shape}, {"y": shape}, {"x": np.zeros((2, 1, 2, 3), "f4")})
    widths[side] -= 1
    node = grid(**ALONE, send_lens=[0] * 4, recv_lens=widths)
    wanted = [1, 1, 2 + sum(widths[:2]), 3 + sum(widths[2:])]
    plan, _ = run(
        tmp_path, 2, node, {"x": shape}, {"y": wanted}, {"x": np.ones((2, 1, 2, 3), "f4")}
    )
    assert list(plan.outputs[0].shape) == [2, *wanted[1:]]


def test_in_a_body_it_is_refused_by_its_name(tmp_path: Path) -> None:
    inner = exchange(["x"], ["b"], send_rank_ids=[1, 0], recv_rank_ids=[1, 0])
    ports = [helper.make_tensor_value_info("b", TensorProto.FLOAT, [2, 3])]
    body = helper.make_graph([inner], "b", [], ports)
    node = helper.make_node("If", ["k"], ["y"], "if", then_branch=body, else_branch=body)
    with pytest.raises(StrategyError, match="NeighborExchange 'n': is in a body of If 'if'"):
        run(tmp_path, 2, node, {"x": [2, 3], "k": [2]}, {"y": [2, 3]}, {})
