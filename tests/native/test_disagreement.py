"""Ranks that disagree about a collective all get an error that names both sides, at once."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from native.ranks import TOKEN, collective, errors_on_ranks, on_ranks, run, session
from onnx import TensorProto

from onnxpar.runtime.ranks.groups import World

Worlds = Callable[..., list[World]]

FLOAT, DOUBLE, INT32 = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT32


def errors(worlds: list[World], protos: list[bytes], xs: list[np.ndarray]) -> list[str]:
    begun = time.monotonic()
    messages = errors_on_ranks(worlds, lambda world: run(world, protos[world.rank], *xs))
    assert time.monotonic() - begun < 5, "that was the timeout, not a diagnosis"
    return messages


def ones(*shape: int, dtype: str = "f4") -> np.ndarray:
    return np.ones(shape, dtype)


# (op, attributes of rank 0 and of rank 1, X of rank 0 and of rank 1, what the error must name)
DISAGREEMENTS: dict[str, tuple[str, list[dict[str, Any]], list[np.ndarray], list[str]]] = {
    "shapes": ("AllReduce", [{}, {}], [ones(2, 3), ones(2, 4)], ["float32[2, 3]", "float32[2, 4]"]),
    "one shape, other dims": (
        "AllReduce",
        [{}, {}],
        [ones(2, 3), ones(3, 2)],
        ["float32[2, 3]", "float32[3, 2]"],
    ),
    "large shapes": (
        "AllReduce",
        [{}, {}],
        [ones(1, 50_000), ones(1, 50_001)],
        ["float32[1, 50000]", "float32[1, 50001]"],
    ),
    "types": ("AllReduce", [{}, {}], [ones(2, 3), ones(2, 3, dtype="i4")], ["float32", "int32"]),
    "types in a gather": (
        "AllGather",
        [{"axis": 0, "sizes": [2, 2]}] * 2,
        [ones(2, 3), ones(2, 3, dtype="i4")],
        ["float32", "int32"],
    ),
    "reductions": (
        "AllReduce",
        [{"op": "sum"}, {"op": "max"}],
        [ones(2, 2)] * 2,
        ["op=sum", "op=max"],
    ),
    "tags": ("AllReduce", [{"tag": 7}, {"tag": 8}], [ones(2, 2)] * 2, ["(tag 7)", "(tag 8)"]),
    "roots": ("Broadcast", [{"root": 0}, {"root": 1}], [ones(2, 2)] * 2, ["root=0", "root=1"]),
    "sizes": (
        "AllGather",
        [{"axis": 0, "sizes": [2, 3]}, {"axis": 0, "sizes": [1, 2]}],
        [ones(2, 2)] * 2,
        ["sizes=[2, 3]", "sizes=[1, 2]"],
    ),
    "axes": (
        "ReduceScatter",
        [{"axis": 0, "sizes": [1, 1]}, {"axis": 1, "sizes": [1, 1]}],
        [ones(2, 2)] * 2,
        ["axis=0", "axis=1"],
    ),
    "parts along one axis": (
        "AllToAll",
        [
            {"split_axis": 0, "concat_axis": 0, "split_sizes": [2, 1], "concat_sizes": [2, 0]},
            {"split_axis": 0, "concat_axis": 0, "split_sizes": [0, 2], "concat_sizes": [2, 2]},
        ],
        [ones(3, 2), ones(2, 2)],
        ["sends 1 to rank 1", "expects 2"],
    ),
    "an empty part along one axis": (
        "AllToAll",
        [
            {"split_axis": 0, "concat_axis": 0, "split_sizes": [3, 0], "concat_sizes": [3, 0]},
            {"split_axis": 0, "concat_axis": 0, "split_sizes": [0, 2], "concat_sizes": [2, 2]},
        ],
        [ones(3, 2), ones(2, 2)],
        ["sends 0 to rank 1", "expects 2"],
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_two_ranks_disagree(fresh_worlds: Worlds, case: str) -> None:
    kind, attributes, xs, named = DISAGREEMENTS[case]
    types = {np.dtype("f4"): FLOAT, np.dtype("i4"): INT32}
    protos = [
        collective(kind, types[x.dtype], [None] * x.ndim, **each)
        for x, each in zip(xs, attributes, strict=True)
    ]
    for message in errors(fresh_worlds(2), protos, xs):
        assert "the ranks disagree" in message
        for name in ["rank 0", "rank 1", *named]:
            assert name in message, message


def test_two_ranks_run_different_ops(fresh_worlds: Worlds) -> None:
    protos = [
        collective("AllReduce", FLOAT, ["n"], tag=1, name="a"),
        collective("Broadcast", FLOAT, ["n"], tag=2, name="b", root=0),
    ]
    for message in errors(fresh_worlds(2), protos, [ones(2), ones(2)]):
        assert "AllReduce 'a' (tag 1)" in message
        assert "Broadcast 'b' (tag 2)" in message


def test_one_of_three_disagrees_and_none_hangs(fresh_worlds: Worlds) -> None:
    proto = collective("AllReduce", FLOAT, ["n"])
    for message in errors(fresh_worlds(3), [proto] * 3, [ones(4), ones(4), ones(5)]):
        assert "the ranks disagree" in message
        assert "rank 2" in message


def test_a_leaf_of_a_broadcast_disagrees(fresh_worlds: Worlds) -> None:
    """The other leaf has its tensor already; it hears of the failure at its next collective."""
    worlds = fresh_worlds(3)
    proto = collective("Broadcast", FLOAT, ["n"], root=0)
    xs = [ones(4), ones(4), ones(5)]

    def twice(world: World) -> None:
        for _ in range(2):
            run(world, proto, *xs)

    for message in errors_on_ranks(worlds, twice):
        assert "the ranks disagree" in message


def test_only_one_rank_changes_its_shape(fresh_worlds: Worlds) -> None:
    """Earlier runs in which all agreed do not hide a later disagreement."""
    worlds = fresh_worlds(2)
    proto = collective("AllReduce", FLOAT, ["n"])
    sessions = on_ranks(worlds, lambda world: session(world, proto))

    def run_with(length: Callable[[int], int]) -> Callable[[World], np.ndarray]:
        def each(world: World) -> np.ndarray:
            feeds = {"X": ones(length(world.rank)), "t": TOKEN}
            [y] = sessions[world.rank].run(["Y"], feeds)
            return y

        return each

    for n in (3, 3, 5):
        on_ranks(worlds, run_with(lambda _, n=n: n))
    for message in errors_on_ranks(worlds, run_with(lambda rank: 5 + rank)):
        assert "float32[5]" in message
        assert "float32[6]" in message


def test_slow_ranks_do_not_disagree(fresh_worlds: Worlds) -> None:
    """Each has waited for the other, in one collective after another; that is only slow."""
    worlds = fresh_worlds(2)
    protos = [collective("AllReduce", FLOAT, ["n"], tag=tag) for tag in range(4)]

    def each(world: World) -> list[np.ndarray]:
        sessions = [session(world, proto) for proto in protos]
        results = []
        for tag, rank_session in enumerate(sessions):
            time.sleep(0.06 if tag % 2 == world.rank else 0)
            [y] = rank_session.run(["Y"], {"X": ones(2), "t": TOKEN})
            results.append(y)
        return results

    for results in on_ranks(worlds, each):
        np.testing.assert_array_equal(results, np.full([4, 2], 2, "f4"))


def test_a_cycle_of_groups_is_told_at_the_timeout(fresh_worlds: Worlds) -> None:
    """Three ranks that begin three overlapping pairs in three orders wait for each other."""
    worlds = fresh_worlds(3, timeout=0.5)
    pairs = [[0, 1], [1, 2], [0, 2]]
    protos = [collective("AllReduce", FLOAT, ["n"], group=pair, tag=pair[0]) for pair in pairs]
    for message in errors(worlds, protos, [ones(2)] * 3):
        assert re.search(
            r"has waited for 0.5 s: rank \d \(pid \d+\) has not arrived, "
            r"it is in AllReduce 'node' \(tag \d\) over ranks \[\d, \d\] on float32\[2\]",
            message,
        ), message


def test_a_failed_world_stays_failed(fresh_worlds: Worlds) -> None:
    worlds = fresh_worlds(2)
    proto = collective("AllReduce", FLOAT, ["n"])
    first = errors(worlds, [proto] * 2, [ones(4), ones(5)])
    assert errors(worlds, [proto] * 2, [ones(4), ones(4)]) == first


@pytest.mark.parametrize(
    "kind, attributes, x, reason",
    [
        (
            "AllGather",
            {"axis": 1, "sizes": [2, 3]},
            ones(2, 3),
            "X has shape [2, 3], that is 3 along axis 1, but sizes=[2, 3] requires 2",
        ),
        ("AllGather", {"axis": 2, "sizes": [2, 3]}, ones(2, 3), "axis 2 is out of range"),
        (
            "ReduceScatter",
            {"axis": 0, "sizes": [2, 3]},
            ones(2, 3),
            "X has shape [2, 3], that is 2 along axis 0, but the sum of sizes=[2, 3] requires 5",
        ),
        (
            "AllToAll",
            {"split_axis": 0, "concat_axis": 1, "split_sizes": [1, 2], "concat_sizes": [3, 1]},
            ones(2, 3),
            "but the sum of split_sizes=[1, 2] requires 3",
        ),
        (
            "NeighborExchange",
            {"axis": 0, "before": [0, 3], "after": [0, 0]},
            ones(2, 3),
            "rank 1 requests 3 elements along axis 0, but rank 0 has X of shape [2, 3]",
        ),
    ],
)
def test_a_rank_whose_tensor_does_not_fit(
    fresh_worlds: Worlds, kind: str, attributes: dict[str, Any], x: np.ndarray, reason: str
) -> None:
    """The rank itself says what is wrong; the others, who fit, hear it within moments."""
    protos = [
        collective(kind, FLOAT, [None, None], **attributes),
        collective("AllReduce", FLOAT, [None, None]),
    ]
    for message in errors(fresh_worlds(2), protos, [x, x]):
        assert f"rank 0 cannot run {kind} 'node' (tag 1)" in message
        assert reason in message


def test_strings_are_no_tensors_to_reduce(fresh_worlds: Worlds) -> None:
    proto = collective("AllReduce", TensorProto.STRING, ["n"])
    xs = [np.array(["a"], dtype=object)] * 2
    for message in errors(fresh_worlds(2), [proto] * 2, xs):
        assert "collectives cannot send elements of type string" in message


@pytest.mark.parametrize(
    "kind, attributes, reason",
    [
        ("AllReduce", {"op": "mean"}, "op='mean' is not a reduction; use sum, max, min or prod"),
        ("AllReduce", {"group": [0, 0]}, "group [0, 0] names a rank twice"),
        ("AllReduce", {"group": [0, 2]}, "names rank 2, but the world has ranks 0 to 1"),
        ("AllReduce", {"group": [1]}, "does not name this rank, 0; is this the graph of another"),
        ("NeighborExchange", {"axis": 0, "before": [0, 0]}, "'before' and 'after' (ints)"),
        ("AllGather", {"sizes": [1, 1]}, "attribute 'axis' (an int) is missing"),
        ("AllGather", {"axis": 0, "sizes": [1]}, "must give a size >= 0 for each of the 2 ranks"),
        ("AllGather", {"axis": 0, "sizes": [1, -1]}, "must give a size >= 0"),
        ("Broadcast", {"root": 2}, "root=2 is not an index into group [0, 1]"),
        (
            "NeighborExchange",
            {"axis": 0, "before": [1, 0], "after": [0, 0]},
            "before=[1, 0] must begin with 0, and after=[0, 0] must end with 0",
        ),
        ("Recv", {"peer": 0}, "peer=0 is this rank itself"),
        ("Recv", {"peer": 5}, "names rank 5"),
    ],
)
def test_wrong_attributes_fail_when_the_session_is_made(
    worlds_of: Worlds, kind: str, attributes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Exception, match=re.escape(reason)) as raised:
        session(worlds_of(2)[0], collective(kind, FLOAT, [2], **attributes))
    assert f"{kind} 'node'" in str(raised.value)
