"""AllToAllV in two ops: data decide how many rows travel while onnxruntime computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from native.ranks import TOKEN, errors_on_ranks, model, node, on_ranks, session
from onnx import TensorProto, helper

from onnxpar.runtime.ranks.groups import World

Fresh = Callable[..., list[World]]
Matrix = list[list[int]]
"""How many rows member i sends to member j."""
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
SIZES = ("sends", "receives")


def exchange(
    started: bool, *between: onnx.NodeProto, dtype: int = FLOAT, axis: int = 0, **more: Any
) -> bytes:
    """X, sends, receives, t -> Y, s; in two ops, `between` run after the start."""
    how: dict[str, Any] = {"axis": axis, "tag": 1, "name": "node", **more}
    nodes = [node("AllToAllV", ["X", *SIZES, "t"], ["Y", "s"], **how)]
    if started:
        last = "v" if between else "u"
        nodes = [
            node("StartAllToAllV", ["X", *SIZES, "t"], ["P", "u"], **how),
            *between,
            node("Complete", ["P", last], ["Y", "s"], name="end"),
        ]
    inputs = [("X", dtype, ["n", "m"]), *((name, INT64, ["k"]) for name in SIZES)]
    return model(nodes, inputs, [("Y", dtype, None), ("s", TensorProto.BOOL, None)])


def feeds(rank: int, matrix: Matrix, width: int, axis: int = 0, dtype: Any = "f4") -> dict:
    shape = [width, width]
    shape[axis] = sum(matrix[rank])
    x = np.random.default_rng(rank).standard_normal(shape).astype(dtype)
    receives = [row[rank] for row in matrix]
    return {"X": x, "sends": np.array(matrix[rank]), "receives": np.array(receives), "t": TOKEN}


def expected(rank: int, matrix: Matrix, width: int, axis: int = 0, dtype: Any = "f4") -> np.ndarray:
    pieces = []
    for member, row in enumerate(matrix):
        x = feeds(member, matrix, width, axis, dtype)["X"]
        pieces.append(np.split(x, np.cumsum(row)[:-1], axis)[rank])
    return np.concatenate(pieces, axis)


MATRICES: list[Matrix] = [
    [[4]],
    [[3, 2], [0, 1]],
    [[0, 5], [7, 0]],
    [[0, 0, 5], [0, 0, 1], [0, 0, 0]],
    [[2, 0, 0], [0, 3, 0], [0, 0, 1]],
    [[1, 2, 0, 1], [0, 0, 0, 0], [2, 0, 3, 0], [0, 1, 1, 1]],
    [[0, 0], [0, 0]],
]
"""Rows for all, for one alone, of one alone, for the rank itself; ranks that send or get none."""


@pytest.mark.matrix
@pytest.mark.parametrize("matrix", MATRICES, ids=str)
@pytest.mark.parametrize("axis, width", [(0, 3), (1, 3), (0, 20_000)])
@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_each_member_gets_its_rows(
    matrix: Matrix, axis: int, width: int, dtype: str, worlds_of: Fresh
) -> None:
    """One session runs three of these matrices; the token of Complete has the bytes that went to
    others, like that of the collective in one op."""
    kind = FLOAT if dtype == "f4" else TensorProto.FLOAT16
    turned = [list(reversed(row)) for row in reversed(matrix)]
    runs = [matrix, turned, matrix]

    def each(world: World) -> list[tuple[np.ndarray, Sequence[int], Sequence[int]]]:
        one, two = (
            session(world, exchange(started, dtype=kind, axis=axis)) for started in (False, True)
        )
        found = []
        for now in runs:
            given = feeds(world.rank, now, width, axis, dtype)
            y, token = two.run(["Y", "s"], given)
            found.append((y, token.shape, one.run(["s"], given)[0].shape))
        return found

    for rank, found in enumerate(on_ranks(worlds_of(len(matrix)), each)):
        for now, (y, token, plain) in zip(runs, found, strict=True):
            right = expected(rank, now, width, axis, dtype)
            assert (y.dtype, y.shape) == (right.dtype, right.shape)
            assert y.tobytes() == right.tobytes()
            others = sum(now[rank]) - now[rank][rank]
            assert plain == (0, others * width * right.itemsize)
            assert (token[0], *token[3:]) == plain
            assert len(token) == 4


HUGE = 2**61
WRONG: dict[str, tuple[Matrix, Matrix]] = {
    "sends 2 to rank 0": ([[1, 1], [2, 0]], [[1, 1], [1, 0]]),
    "sends 1 to rank 1": ([[1, 1], [0, 2]], [[1, 0], [0, 2]]),
    "the sum of sends=[2, 1] requires 3": ([[2, 1], [0, 2]], [[2, 0], [1, 2]]),
    "sends=[3, -1] has a negative size": ([[3, -1], [0, 2]], [[3, 0], [0, 2]]),
    "receives=[3, -1] has a negative size": ([[1, 1], [0, 2]], [[3, -1], [0, 2]]),
    "give different sizes for the elements that this": ([[1, 1], [0, 2]], [[2, 0], [1, 2]]),
    "sends has shape [1], not [2], a size for each rank": ([[2], [0, 2]], [[2], [0, 2]]),
    "receives has shape [1], not [2], a size for each": ([[1, 1], [0, 2]], [[2], [0, 2]]),
    "cannot have shards of sizes [9223372036854775807, 2]": (
        [[1, 1], [0, 2]], [[1, 0], [2**63 - 1, 2]]),
}  # fmt: skip
"""Sends and receives of two ranks with two rows each, by what the error says."""


@pytest.mark.matrix
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("reason", WRONG)
def test_wrong_sizes(reason: str, started: bool, fresh_worlds: Fresh) -> None:
    """All ranks hear of it within moments, in both forms, and their next run is right."""
    worlds, (sends, receives) = fresh_worlds(2), WRONG[reason]
    made = {world.rank: session(world, exchange(started)) for world in worlds}

    def wrong(world: World) -> np.ndarray:
        sizes = {"sends": sends[world.rank], "receives": receives[world.rank]}
        given = {name: np.array(each, np.int64) for name, each in sizes.items()}
        x = np.ones((2, 3), np.float32)
        return made[world.rank].run(["Y"], {"X": x, "t": TOKEN, **given})[0]

    begin = time.monotonic()
    for message in errors_on_ranks(worlds, wrong):
        assert "AllToAllV 'node' (tag 1)" in message and reason in message, message
    assert time.monotonic() - begin < 25, "only the timeout ended it"
    on_ranks(worlds, lambda world: world.renew() if "disagree" not in message else None)
    if "disagree" in message:  # ranks that do not agree on a plan cannot go on
        return
    matrix = [[1, 2], [0, 1]]
    found = on_ranks(worlds, lambda w: made[w.rank].run(["Y"], feeds(w.rank, matrix, 3))[0])
    for rank, y in enumerate(found):
        np.testing.assert_array_equal(y, expected(rank, matrix, 3))


@pytest.mark.parametrize("started", [False, True])
def test_a_result_that_is_larger_than_memory(started: bool, fresh_worlds: Fresh) -> None:
    """Rank 1 expects so many rows that the size of its result overflows."""
    worlds = fresh_worlds(2)

    def each(world: World) -> Any:
        sizes = [[[1, 1], [1, 0]], [[0, 2], [HUGE, 2]]][world.rank]
        given = {name: np.array(n) for name, n in zip(SIZES, sizes, strict=True)}
        x = np.ones((2, 3), np.float32)
        return session(world, exchange(started)).run(["Y"], {"X": x, "t": TOKEN, **given})

    for message in errors_on_ranks(worlds, each):
        assert "AllToAllV 'node' (tag 1)" in message, message
        assert "rank 1" in message, message


def fails_between() -> bytes:
    """A Gather of a row that there may not be fails after the start, and before the completion."""
    gather = helper.make_node("Gather", ["receives", "sends"], ["G"])
    return exchange(True, gather, node("After", ["G", "u"], ["v"], name="after"))


def one_run(made: ort.InferenceSession, rank: int, matrix: Matrix, width: int) -> str:
    """What a run raises; "" if its result is right."""
    try:
        y = made.run(["Y"], feeds(rank, matrix, width))[0]
    except Exception as error:
        return str(error)
    np.testing.assert_array_equal(y, expected(rank, matrix, width))
    return ""


def test_runs_that_fail_between_start_and_complete(
    monkeypatch: pytest.MonkeyPatch, fresh_worlds: Fresh
) -> None:
    """The thread still sends rows when the run's memory is freed, and when the session ends; other
    rows travel in the next run."""
    monkeypatch.setenv("ONNXPAR_LINK", "latency=50ms")
    large, small = [[0, 2], [2, 0]], [[1, 0], [0, 1]]  # 2 is no index into two sizes

    def run(world: World) -> list[str]:
        made = session(world, fails_between())
        found = [one_run(made, world.rank, m, 300_000) for m in (large, large, small)]
        found.append(one_run(made, world.rank, large, 7))
        del made
        found.append(one_run(session(world, exchange(True)), world.rank, large, 300_000))
        return found

    for found in on_ranks(fresh_worlds(2), run):
        assert ["out of data bounds" in message for message in found] == [1, 1, 0, 1, 0]
        assert (found[2], found[4]) == ("", "")


def test_an_abort_between_start_and_complete(fresh_worlds: Fresh) -> None:
    """A rank that never starts its own interrupts the others, and then sends other rows."""
    worlds, matrix = fresh_worlds(3), [[1, 0, 2], [0, 0, 0], [3, 1, 0]]
    made = {world.rank: session(world, exchange(True)) for world in worlds}

    def run(world: World) -> None:
        if world.rank == 1:
            time.sleep(0.2)
            world.interrupt("rank 1 has had enough")
            raise RuntimeError("rank 1 has had enough")
        made[world.rank].run(["Y"], feeds(world.rank, matrix, 200_000))

    for message in errors_on_ranks(worlds, run):
        assert "rank 1 has had enough" in message
    on_ranks(worlds, lambda world: world.renew())
    other = [[2, 1, 0], [0, 4, 1], [0, 0, 0]]
    assert on_ranks(worlds, lambda w: one_run(made[w.rank], w.rank, other, 5)) == ["", "", ""]


def test_groups_that_cross(fresh_worlds: Fresh) -> None:
    """Rows travel over columns of a mesh of 2 x 2 while rows of it take sums, each in its stream;
    sizes differ by rank and run."""
    worlds = fresh_worlds(4)
    on_ranks(worlds, lambda world: world.open_streams(2))

    def run(world: World) -> None:
        column, row = [world.rank % 2, world.rank % 2 + 2], [world.rank // 2 * 2] * 2
        row[1] += 1
        total = node("AllReduce", ["T", "u"], ["S", "v"], name="sum", tag=2, group=row)
        cast = helper.make_node("Cast", ["sends"], ["T"], to=FLOAT)
        made = session(world, exchange(True, cast, total, stream=1, group=column))
        for number in range(6):
            each = np.random.default_rng(number).integers(0, 4, (2, 2, 2)).tolist()
            matrix, me = each[world.rank % 2], world.rank // 2
            assert one_run(made, me, matrix, [3, 50_000][number % 2]) == ""

    on_ranks(worlds, run)


def test_shapes_follow_at_loading(fresh_worlds: Fresh) -> None:
    """The number of rows is unknown, that of columns is not."""
    made = model(
        [
            node("StartAllToAllV", ["X", *SIZES, "t"], ["P", "u"], axis=0, tag=1),
            node("Complete", ["P", "u"], ["Y", "s"]),
        ],
        [("X", FLOAT, [4, 5]), *((name, INT64, [1]) for name in SIZES)],
        [("Y", FLOAT, None)],
    )
    (shape,) = on_ranks(fresh_worlds(1), lambda w: session(w, made).get_outputs()[0].shape)
    assert shape[0] != 4 and shape[1] == 5
