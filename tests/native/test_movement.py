"""The collectives that move tensors without computing, against numpy."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from native.ranks import (
    TOKEN,
    collective,
    errors_on_ranks,
    model,
    node,
    on_ranks,
    run,
    session,
)
from onnx import TensorProto, helper

from onnxpar.runtime.ranks.groups import World, thread_worlds

Worlds = Callable[[int], list[World]]

DTYPES = ["f4", "f8", "f2", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"]


def onnx_type(dtype: np.dtype) -> int:
    return int(helper.np_dtype_to_tensor_dtype(dtype))


def numbered(shape: Sequence[int], first: int = 0, dtype: str = "f4") -> np.ndarray:
    values = np.arange(first, first + np.prod(shape, dtype=int)) % 2048  # exact in float16
    return values.reshape(shape).astype(dtype)


def with_extent(shape: Sequence[int], axis: int, extent: int) -> list[int]:
    result = list(shape)
    result[axis] = extent
    return result


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("sizes", [[2], [2, 2], [3, 0], [1, 5, 0], [2, 1, 1, 3]])
def test_all_gather(worlds_of: Worlds, sizes: list[int], axis: int) -> None:
    xs = [numbered(with_extent([2, 3, 4], axis, n), 100 * i) for i, n in enumerate(sizes)]
    proto = collective("AllGather", TensorProto.FLOAT, [None] * 3, axis=axis, sizes=sizes)
    for y in on_ranks(worlds_of(len(sizes)), lambda world: run(world, proto, *xs)):
        np.testing.assert_array_equal(y, np.concatenate(xs, axis))


@pytest.mark.parametrize("name", DTYPES)
def test_all_gather_of_each_type(worlds_of: Worlds, name: str) -> None:
    xs = [numbered([3, n], n, name) for n in (20_000, 1)]
    proto = collective(
        "AllGather", onnx_type(np.dtype(name)), [None, None], axis=1, sizes=[20_000, 1]
    )
    for y in on_ranks(worlds_of(2), lambda world: run(world, proto, *xs)):
        np.testing.assert_array_equal(y, np.concatenate(xs, 1))


def test_all_gather_of_empty_tensors(worlds_of: Worlds) -> None:
    xs = [np.zeros([0, n], "f4") for n in (1, 2)]
    proto = collective("AllGather", TensorProto.FLOAT, [0, None], axis=1, sizes=[1, 2])
    for y in on_ranks(worlds_of(2), lambda world: run(world, proto, *xs)):
        assert y.shape == (0, 3)


@pytest.mark.parametrize("split, concat", [(0, 1), (1, 0), (0, 2), (2, 0), (-1, 1), (1, -1)])
@pytest.mark.parametrize(
    "split_sizes, concat_sizes",
    [([3], [2]), ([2, 2], [3, 3]), ([1, 4], [0, 2]), ([2, 0, 3], [1, 2, 1])],
)
def test_all_to_all(
    worlds_of: Worlds, split_sizes: list[int], concat_sizes: list[int], split: int, concat: int
) -> None:
    whole = numbered(with_extent(with_extent([2, 2, 2], split, sum(split_sizes)), concat, 0))
    whole = numbered(with_extent(whole.shape, concat, sum(concat_sizes)))
    xs = np.split(whole, np.cumsum(concat_sizes)[:-1], concat)
    proto = collective(
        "AllToAll",
        TensorProto.FLOAT,
        [None] * 3,
        split_axis=split,
        concat_axis=concat,
        split_sizes=split_sizes,
        concat_sizes=concat_sizes,
    )
    results = on_ranks(worlds_of(len(split_sizes)), lambda world: run(world, proto, *xs))
    expected = np.split(whole, np.cumsum(split_sizes)[:-1], split)
    for y, part in zip(results, expected, strict=True):
        np.testing.assert_array_equal(y, part)


def test_all_to_all_along_one_axis_changes_the_parts(worlds_of: Worlds) -> None:
    """Parts of 5, 1 and 2 become parts of 3, 3 and 2: member i gives amounts[i][j] to member j."""
    amounts = [[3, 2, 0], [0, 1, 0], [0, 0, 2]]
    whole = numbered([8, 2])
    xs = np.split(whole, [5, 6])

    def each(world: World) -> np.ndarray:
        proto = collective(
            "AllToAll",
            TensorProto.FLOAT,
            [None, 2],
            split_axis=0,
            concat_axis=0,
            split_sizes=amounts[world.rank],
            concat_sizes=[row[world.rank] for row in amounts],
        )
        return run(world, proto, *xs)

    for y, part in zip(on_ranks(worlds_of(3), each), np.split(whole, [3, 6]), strict=True):
        np.testing.assert_array_equal(y, part)


def all_to_all_v(axis: int, rank: int) -> bytes:
    """A model of one AllToAllV: X, sends, receives, t -> Y, s."""
    return model(
        [node("AllToAllV", ["X", "sends", "receives", "t"], ["Y", "s"], axis=axis, tag=1)],
        [
            ("X", TensorProto.FLOAT, [None] * rank),
            *((name, TensorProto.INT64, [None]) for name in ("sends", "receives")),
        ],
        [("Y", TensorProto.FLOAT, None), ("s", TensorProto.BOOL, [0, None])],
    )


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize(
    "amounts",
    [
        [[4]],
        [[3, 2], [0, 1]],
        [[0, 0, 5], [0, 0, 1], [0, 0, 0]],
        [[1, 2, 0, 1], [0, 0, 0, 0], [2, 0, 3, 0], [0, 1, 1, 1]],
        [[0, 0], [0, 0]],
    ],
)
def test_all_to_all_with_sizes_that_data_decide(
    worlds_of: Worlds, amounts: list[list[int]], axis: int
) -> None:
    """Member i sends amounts[i][j] elements to member j. One session runs two of these matrices."""
    count = len(amounts)
    proto = all_to_all_v(axis, 3)
    turned = [list(reversed(row)) for row in reversed(amounts)]

    def each(world: World) -> list[list[np.ndarray]]:
        here = session(world, proto)
        ran = []
        for matrix in (amounts, turned):
            xs = [
                numbered(with_extent([2, 3, 2], axis, sum(row)), 100 * i)
                for i, row in enumerate(matrix)
            ]
            feeds = {
                "X": xs[world.rank],
                "sends": np.array(matrix[world.rank]),
                "receives": np.array([row[world.rank] for row in matrix]),
                "t": TOKEN,
            }
            pieces = [
                np.split(x, np.cumsum(row)[:-1], axis)[world.rank]
                for x, row in zip(xs, matrix, strict=True)
            ]
            ran.append([*here.run(["Y", "s"], feeds), np.concatenate(pieces, axis)])
        return ran

    for rank, ran in enumerate(on_ranks(worlds_of(count), each)):
        for (y, token, expected), matrix in zip(ran, (amounts, turned), strict=True):
            np.testing.assert_array_equal(y, expected)
            others = sum(matrix[rank]) - matrix[rank][rank]
            assert token.shape == (0, others * 12 // [2, 3, 2][axis] * 4)


@pytest.mark.parametrize(
    "sends, receives, reason",
    [
        ([[1, 1], [2, 0]], [[1, 1], [1, 0]], "sends 2 to rank 0"),
        ([[1, 1], [0, 2]], [[1, 0], [0, 2]], "sends 1 to rank 1"),
        ([[2, 1], [0, 2]], [[2, 0], [1, 2]], "the sum of sends=[2, 1] requires 3"),
        ([[3, -1], [0, 2]], [[3, 0], [0, 2]], "sends=[3, -1] has a negative size"),
        ([[1, 1], [0, 2]], [[2, 0], [1, 2]], "give different sizes for the elements that this"),
        ([[2], [0, 2]], [[2], [0, 2]], "sends has shape [1], not [2], a size for each rank of"),
    ],
)
def test_ranks_disagree_on_sizes_that_data_decide(
    fresh_worlds: Worlds, sends: list[list[int]], receives: list[list[int]], reason: str
) -> None:
    """All ranks hear of it within moments."""
    proto = all_to_all_v(0, 1)

    def each(world: World) -> np.ndarray:
        feeds = {
            "X": numbered([2]),
            "sends": np.array(sends[world.rank]),
            "receives": np.array(receives[world.rank]),
            "t": TOKEN,
        }
        return session(world, proto).run(["Y"], feeds)[0]

    for message in errors_on_ranks(fresh_worlds(2), each):
        assert "AllToAllV (tag 1)" in message and reason in message, message


@pytest.mark.parametrize("sources", [[1, 2, 0], [0, 2, 1], [-1, 0, 1], [2, -1, -1], [0, 1, 2]])
@pytest.mark.parametrize("told", [True, False])
def test_collective_permute(worlds_of: Worlds, sources: list[int], told: bool) -> None:
    xs = [numbered([n, 3], 100 * n) for n in (2, 0, 4)]
    shapes = {"shapes": [2, -1, 0, -1, 4, -1]} if told else {}
    proto = collective(
        "CollectivePermute", TensorProto.FLOAT, [None] * 2, sources=sources, **shapes
    )
    ys = on_ranks(worlds_of(3), lambda world: run(world, proto, *xs))
    for y, x, source in zip(ys, xs, sources, strict=True):
        np.testing.assert_array_equal(y, np.zeros_like(x) if source < 0 else xs[source])


@pytest.mark.parametrize("name", DTYPES)
def test_collective_permute_of_each_type(worlds_of: Worlds, name: str) -> None:
    xs = [numbered([300, 700], first, name) for first in (3, 5)]
    dtype = onnx_type(np.dtype(name))
    proto = collective("CollectivePermute", dtype, [300, 700], sources=[1, 0], shapes=[-1, -1])
    ys = on_ranks(worlds_of(2), lambda world: run(world, proto, *xs))
    np.testing.assert_array_equal(ys, xs[::-1])


def test_collective_permute_of_scalars(worlds_of: Worlds) -> None:
    xs = [np.array(value, "f4") for value in (1, 2)]
    proto = collective("CollectivePermute", TensorProto.FLOAT, [], sources=[1, 0])
    ys = on_ranks(worlds_of(2), lambda world: run(world, proto, *xs))
    assert ys == [2, 1]


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"sources": [1]}, "sources=[1] must give"),
        ({"sources": [1, 1]}, "sources=[1, 1] must give"),
        ({"sources": [2, 0]}, "sources=[2, 0] must give"),
        ({"sources": [1, 0], "shapes": [2, 2]}, "X has shape [2, 3], but shapes=[2, 2]"),
        ({"sources": [1, 0], "shapes": [-1]}, "but shapes=[-1] gives another one"),
    ],
)
def test_bad_permutes(attributes: dict[str, list[int]], said: str) -> None:
    worlds = thread_worlds(2)
    xs = [numbered([2, 3])] * 2
    proto = collective("CollectivePermute", TensorProto.FLOAT, [None] * 2, **attributes)
    for error in errors_on_ranks(worlds, lambda world: run(world, proto, *xs)):
        assert said in error
    for world in worlds:
        world.close()


@pytest.mark.parametrize("length", [0, 1, 100, 100_001])
@pytest.mark.parametrize("root", [0, 1, 2, 3])
def test_broadcast(worlds_of: Worlds, root: int, length: int) -> None:
    xs = [numbered([length], 1000 * rank) for rank in range(4)]
    proto = collective("Broadcast", TensorProto.FLOAT, ["n"], root=root)
    for y in on_ranks(worlds_of(4), lambda world: run(world, proto, *xs)):
        np.testing.assert_array_equal(y, xs[root])


def test_a_leaf_of_a_broadcast_need_not_wait_for_another() -> None:
    """It takes its tensor, leaves the world, and that is no error for the rank that comes late."""
    worlds = thread_worlds(3)
    xs = [numbered([5], rank) for rank in range(3)]
    proto = collective("Broadcast", TensorProto.FLOAT, ["n"], root=0)

    def each(world: World) -> np.ndarray:
        time.sleep(0.2 if world.rank == 2 else 0)
        y = run(world, proto, *xs)
        world.close()
        return y

    for y in on_ranks(worlds, each):
        np.testing.assert_array_equal(y, xs[0])


@pytest.mark.parametrize("name", DTYPES)
def test_broadcast_of_each_type(worlds_of: Worlds, name: str) -> None:
    xs = [numbered([2, 3], rank, name) for rank in range(2)]
    proto = collective("Broadcast", onnx_type(np.dtype(name)), [2, 3], root=1)
    for y in on_ranks(worlds_of(2), lambda world: run(world, proto, *xs)):
        np.testing.assert_array_equal(y, xs[1])


def test_send_and_receive_along_a_chain(worlds_of: Worlds) -> None:
    """Each rank takes its predecessor's tensor, adds one, and hands it on."""
    shape = [2, 3]

    def each(world: World) -> np.ndarray:
        one = helper.make_tensor("one", TensorProto.FLOAT, [], [1.0])
        nodes = [helper.make_node("Constant", [], ["one"], value=one)]
        received, token = "X", "t"
        if world.rank > 0:
            nodes.append(node("Recv", ["X", "t"], ["r", "t1"], peer=world.rank - 1, tag=world.rank))
            received, token = "r", "t1"
        nodes.append(helper.make_node("Add", [received, "one"], ["Y"]))
        if world.rank < world.size - 1:
            following = world.rank + 1
            nodes.append(node("Send", ["Y", token], ["t2"], peer=following, tag=following))
        proto = model(nodes, [("X", TensorProto.FLOAT, shape)], [("Y", TensorProto.FLOAT, shape)])
        return run(world, proto, *[np.full(shape, 10 * rank, "f4") for rank in range(4)])

    for rank, y in enumerate(on_ranks(worlds_of(4), each)):
        np.testing.assert_array_equal(y, np.full(shape, rank + 1, "f4"))


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize(
    "extents, before, after",
    [
        ([4], [0], [0]),
        ([4, 4], [0, 1], [1, 0]),
        ([3, 2, 4], [0, 1, 2], [2, 0, 0]),
        ([2, 2, 2, 2], [0, 0, 0, 0], [0, 1, 0, 0]),
        ([1, 3, 0], [0, 1, 3], [3, 0, 0]),
    ],
)
def test_neighbor_exchange(
    worlds_of: Worlds, extents: list[int], before: list[int], after: list[int], axis: int
) -> None:
    xs = [numbered(with_extent([2, 3, 2], axis, n), 100 * i) for i, n in enumerate(extents)]
    proto = collective(
        "NeighborExchange", TensorProto.FLOAT, [None] * 3, axis=axis, before=before, after=after
    )
    results = on_ranks(worlds_of(len(xs)), lambda world: run(world, proto, *xs))
    for i, y in enumerate(results):
        parts = [xs[i]]
        if before[i]:
            end = xs[i - 1].shape[axis]
            parts.insert(0, np.take(xs[i - 1], range(end - before[i], end), axis))
        if after[i]:
            parts.append(np.take(xs[i + 1], range(after[i]), axis))
        np.testing.assert_array_equal(y, np.concatenate(parts, axis))


def halo_exchange(axis: int, rank: int = 3) -> bytes:
    """A model of one HaloExchange: X, bounds, t -> Y, s."""
    return model(
        [node("HaloExchange", ["X", "bounds", "t"], ["Y", "s"], axis=axis, tag=1)],
        [("X", TensorProto.FLOAT, [None] * rank), ("bounds", TensorProto.INT64, [None])],
        [("Y", TensorProto.FLOAT, None), ("s", TensorProto.BOOL, [0])],
    )


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize(
    "extents, wanted",
    [
        ([5], [(1, 4)]),
        ([3, 3], [(0, 4), (2, 6)]),
        ([4, 0, 1], [(0, 5), (3, 5), (1, 2)]),
        ([0, 0, 6], [(0, 6), (2, 2), (0, 1)]),
        ([1, 1, 1, 1], [(0, 4), (0, 3), (1, 4), (0, 4)]),
        ([2, 3, 2, 1], [(5, 8), (0, 0), (8, 8), (0, 2)]),
        ([0, 0, 0], [(0, 0), (0, 0), (0, 0)]),
    ],
)
def test_halo_exchange(
    worlds_of: Worlds, extents: list[int], wanted: list[tuple[int, int]], axis: int
) -> None:
    """Parts smaller than what others want of them, empty ones, and wishes that cross many."""
    xs = [numbered(with_extent([2, 3, 2], axis, n), 100 * i) for i, n in enumerate(extents)]
    whole, proto = np.concatenate(xs, axis), halo_exchange(axis)

    def each(world: World) -> np.ndarray:
        feeds = {"X": xs[world.rank], "bounds": np.array(wanted[world.rank]), "t": TOKEN}
        return session(world, proto).run(["Y"], feeds)[0]

    for rank, y in enumerate(on_ranks(worlds_of(len(xs)), each)):
        np.testing.assert_array_equal(y, np.take(whole, range(*wanted[rank]), axis))


@pytest.mark.parametrize(
    "bounds, reason",
    [
        ([0, 5], "rank 1 requests elements 0 to 5 along axis 0, which has 4 elements"),
        ([-1, 2], "requests elements -1 to 2"),
        ([3, 2], "requests elements 3 to 2"),
        ([1], "bounds has shape [1], not [2]"),
    ],
)
def test_a_halo_that_is_not_there(fresh_worlds: Worlds, bounds: list[int], reason: str) -> None:
    """All ranks hear of it within moments."""
    wanted, proto = [[0, 2], bounds], halo_exchange(0, 1)

    def each(world: World) -> np.ndarray:
        feeds = {"X": numbered([2]), "bounds": np.array(wanted[world.rank]), "t": TOKEN}
        return session(world, proto).run(["Y"], feeds)[0]

    for message in errors_on_ranks(fresh_worlds(2), each):
        assert reason in message


def test_groups_in_their_own_order(worlds_of: Worlds) -> None:
    """A group's parts come in the order in which the group names its ranks."""
    groups = {0: [2, 0], 1: [1, 3], 2: [2, 0], 3: [1, 3]}
    xs = [numbered([rank + 1], 10 * rank) for rank in range(4)]

    def each(world: World) -> np.ndarray:
        group = groups[world.rank]
        proto = collective(
            "AllGather",
            TensorProto.FLOAT,
            ["n"],
            axis=0,
            group=group,
            sizes=[rank + 1 for rank in group],
        )
        return run(world, proto, *xs)

    for rank, y in enumerate(on_ranks(worlds_of(4), each)):
        np.testing.assert_array_equal(y, np.concatenate([xs[member] for member in groups[rank]]))


def test_overlapping_groups_in_one_order(worlds_of: Worlds) -> None:
    """Three ranks in three overlapping pairs, again and again, and then all together."""
    pairs = [[0, 1], [1, 2], [0, 2]]

    def each(world: World) -> list[np.ndarray]:
        nodes, value, token = [], "X", "t"
        for tag, group in enumerate([*pairs, [0, 1, 2]]):
            if world.rank in group:
                outputs = [f"y{tag}", f"t{tag}"]
                nodes.append(
                    node("AllReduce", [value, token], outputs, tag=tag, group=group, op="sum")
                )
                value, token = outputs
        nodes.append(helper.make_node("Identity", [value], ["Y"]))
        vector = ("X", TensorProto.FLOAT, [7])
        ranks_session = session(world, model(nodes, [vector], [("Y", TensorProto.FLOAT, [7])]))
        x = np.full([7], world.rank + 1, "f4")
        return [ranks_session.run(["Y"], {"X": x, "t": TOKEN})[0] for _ in range(50)]

    ones = {0: 1.0, 1: 2.0, 2: 3.0}
    for pair in pairs:
        total = sum(ones[rank] for rank in pair)
        ones |= dict.fromkeys(pair, total)
    for results in on_ranks(worlds_of(3), each):
        for y in results:
            np.testing.assert_array_equal(y, np.full([7], sum(ones.values()), "f4"))


@pytest.mark.parametrize("group", [None, [3, 1]])
def test_rank_and_group_size(worlds_of: Worlds, group: list[int] | None) -> None:
    attributes = {} if group is None else {"group": group}
    members = group or [0, 1, 2, 3]
    proto = model(
        [node("Rank", [], ["r"], **attributes), node("GroupSize", [], ["n"], **attributes)],
        [],
        [("r", TensorProto.INT64, []), ("n", TensorProto.INT64, [])],
    )
    for member, rank in enumerate(members):
        world = worlds_of(4)[rank]
        assert session(world, proto).run(["r", "n"], {"t": TOKEN}) == [member, len(members)]


def test_the_token_is_empty(worlds_of: Worlds) -> None:
    proto = collective("AllReduce", TensorProto.FLOAT, [2])

    def each(world: World) -> np.ndarray:
        [token] = session(world, proto).run(["s"], {"X": np.zeros([2], "f4"), "t": TOKEN})
        return token

    for token in on_ranks(worlds_of(2), each):
        assert (token.dtype, token.shape) == (np.dtype(bool), (0,))


def test_sizes_that_only_the_run_knows(worlds_of: Worlds) -> None:
    """Without sizes, members contribute what they have, and get parts as equal as can be."""
    three = worlds_of(3)
    dynamic: list[int | str | None] = ["a", "b"]
    gather = collective("AllGather", TensorProto.FLOAT, dynamic, axis=1)
    exchange = collective("AllToAll", TensorProto.FLOAT, dynamic, split_axis=0, concat_axis=1)
    gathers = on_ranks(three, lambda world: session(world, gather))
    exchanges = on_ranks(three, lambda world: session(world, exchange))
    for widths in [(2, 3, 0), (1, 1, 1), (0, 7, 4)]:
        whole = numbered([5, sum(widths)])
        xs = np.split(whole, np.cumsum(widths)[:-1], 1)

        def each(world: World, xs: list[np.ndarray] = xs) -> list[np.ndarray]:
            feeds = {"X": xs[world.rank], "t": TOKEN}
            return [kind[world.rank].run(["Y"], feeds)[0] for kind in (gathers, exchanges)]

        rows = np.split(whole, [2, 4])
        for (gathered, exchanged), row in zip(on_ranks(three, each), rows, strict=True):
            np.testing.assert_array_equal(gathered, whole)
            np.testing.assert_array_equal(exchanged, row)


def test_reduce_scatter_into_default_parts(worlds_of: Worlds) -> None:
    xs = [numbered([5, 2], 100 * rank) for rank in range(3)]
    proto = collective("ReduceScatter", TensorProto.FLOAT, ["n", 2], axis=0)
    results = on_ranks(worlds_of(3), lambda world: run(world, proto, *xs))
    for y, part in zip(results, np.split(sum(xs), [2, 4]), strict=True):
        np.testing.assert_array_equal(y, part)


def cut_model(kind: str, **attributes: object) -> bytes:
    """A model of one collective that takes the sizes of shards as an operand: X, t, sizes -> Y."""
    return model(
        [node(kind, ["X", "t", "sizes"], ["Y", "s"], tag=1, name="node", **attributes)],
        [("X", TensorProto.FLOAT, ["n", "m"]), ("sizes", TensorProto.INT64, ["k"])],
        [("Y", TensorProto.FLOAT, None), ("s", TensorProto.BOOL, [0])],
    )


def test_cuts_of_sizes_that_are_known_in_a_run(worlds_of: Worlds) -> None:
    """One session cuts into shards of other sizes in each run."""
    three = worlds_of(3)
    scatters = [session(w, cut_model("ReduceScatter", axis=0)) for w in three]
    exchanges = [session(w, cut_model("AllToAll", split_axis=0, concat_axis=1)) for w in three]
    for sizes in ([3, 0, 2], [1, 1, 1], [0, 7, 0], [0, 0, 0]):
        xs = [numbered([sum(sizes), 2], 100 * rank) for rank in range(3)]
        ends = np.cumsum(sizes)[:-1]

        def each(world: World, xs: list = xs, sizes: list = sizes) -> list[np.ndarray]:
            feeds = {"X": xs[world.rank], "t": TOKEN, "sizes": np.array(sizes, np.int64)}
            return [kind[world.rank].run(["Y"], feeds)[0] for kind in (scatters, exchanges)]

        sums = np.split(sum(xs), ends)
        rows = [np.concatenate([np.split(x, ends)[i] for x in xs], 1) for i in range(3)]
        for (scattered, exchanged), a, b in zip(on_ranks(three, each), sums, rows, strict=True):
            np.testing.assert_array_equal(scattered, a)
            np.testing.assert_array_equal(exchanged, b)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([[3, 2], [2, 3]], "disagree|differ"),
        ([[3, 1], [3, 1]], "requires 4"),
        ([[6, -1], [6, -1]], "negative"),
        ([[5], [5]], r"not \[2\]"),
    ],
)
def test_sizes_that_do_not_fit(worlds_of: Worlds, sizes: list[list[int]], message: str) -> None:
    proto = cut_model("ReduceScatter", axis=0)

    def each(world: World) -> object:
        given = np.array(sizes[world.rank], np.int64)
        feeds = {"X": numbered([5, 2]), "t": TOKEN, "sizes": given}
        return session(world, proto).run(["Y"], feeds)

    for error in errors_on_ranks(worlds_of(2), each):
        assert re.search(message, error), error
