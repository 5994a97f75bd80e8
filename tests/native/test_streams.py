"""Collectives of several streams run at once, and a failure in one of them ends all of them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from native.ranks import TOKEN, errors_on_ranks, model, node, on_ranks, session
from onnx import TensorProto

from onnxpar.base.errors import RankError
from onnxpar.runtime.ranks.groups import World

Fresh = Callable[..., list[World]]
FLOAT = TensorProto.FLOAT
Step = tuple[str, str, dict[str, Any]]
"""start, complete or run; the name of a collective; the attributes of start and run."""


def steps(*order: Step) -> bytes:
    """Collectives of X in this order, with the results Y of `a` and Z of `b`."""
    nodes: list[onnx.NodeProto] = []
    token = "t"
    for i, (what, name, attributes) in enumerate(order):
        attributes = {"tag": ord(name), "name": name, **attributes}
        if what == "start":
            nodes.append(node("StartAllReduce", ["X", token], [f"{name}.p", f"t{i}"], **attributes))
        elif what == "complete":
            inputs = [f"{name}.p", token]
            nodes.append(node("Complete", inputs, [name, f"t{i}"], name=f"{name}.end"))
        else:
            nodes.append(node("AllReduce", ["X", token], [name, f"t{i}"], **attributes))
        token = f"t{i}"
    shape = ["n"]
    return model(nodes, [("X", FLOAT, shape)], [(name, FLOAT, None) for name in ("a", "b")])


def results(world: World, made: bytes, size: int = 3) -> list[list[float]]:
    x = np.full(size, 10**world.rank, np.float32)
    return [y.tolist() for y in session(world, made).run(["a", "b"], {"X": x, "t": TOKEN})]


def opened(fresh_worlds: Fresh, ranks: int, count: int = 2, timeout: float = 30) -> list[World]:
    worlds = fresh_worlds(ranks, timeout)
    on_ranks(worlds, lambda world: world.open_streams(count))
    return worlds


def in_opposite_orders(world: World) -> bytes:
    """Rank 0 starts `a` before `b`, and rank 1 after it: with one stream, they would wait for each
    other for ever."""
    start, end = ("start", "a", {"stream": 1}), ("complete", "a", {})
    run = ("run", "b", {"op": "max"})
    return steps(start, run, end) if world.rank == 0 else steps(run, start, end)


@pytest.mark.slow
def test_streams_do_not_wait_for_each_other(fresh_worlds: Fresh) -> None:
    worlds = opened(fresh_worlds, 2)
    for size in (3, 40_000, 400_000):
        for a, b in on_ranks(worlds, lambda w: results(w, in_opposite_orders(w), size)):  # noqa: B023
            assert (a, b) == ([11] * size, [10] * size)


@pytest.mark.slow
def test_a_world_of_one_stream_has_one_order(fresh_worlds: Fresh) -> None:
    """The number of a stream counts modulo those that there are."""
    worlds = fresh_worlds(2, timeout=1)
    for message in errors_on_ranks(worlds, lambda w: results(w, in_opposite_orders(w))):
        assert "has waited for 1 s: rank " in message
        assert "has not arrived, it is in AllReduce" in message


@pytest.mark.slow
def test_groups_that_cross(fresh_worlds: Fresh) -> None:
    """A mesh of 2 x 2: sums over columns are under way while rows take maxima, again and again."""
    columns, rows = [[0, 2], [1, 3]], [[0, 1], [2, 3]]

    def of(groups: Sequence[Sequence[int]], rank: int) -> list[int]:
        return next(list(g) for g in groups if rank in g)

    def run(world: World) -> list[list[list[float]]]:
        down = {"stream": 1, "group": of(columns, world.rank)}
        across = {"group": of(rows, world.rank), "op": "max"}
        made = steps(("start", "a", down), ("run", "b", across), ("complete", "a", {}))
        return [results(world, made, size) for size in (5, 300_000) for _ in range(4)]

    for rank, found in enumerate(on_ranks(opened(fresh_worlds, 4), run)):
        total, most = (101, 1010)[rank % 2], (10, 1000)[rank // 2]
        for a, b in found:
            assert (set(a), set(b)) == ({total}, {most})


@pytest.mark.matrix
@pytest.mark.parametrize("stream", [0, 1])
def test_ranks_that_disagree_while_another_stream_works(stream: int, fresh_worlds: Fresh) -> None:
    """Rank 2 comes late to `b`, so all are at work in both streams."""
    worlds = opened(fresh_worlds, 3)

    def run(world: World) -> None:
        a: dict[str, Any] = {
            "stream": stream,
            "group": [0, 1],
            "op": "sum" if world.rank else "max",
        }
        b = ("start", "b", {"stream": 1 - stream})
        ends = (("complete", "a", {}), ("complete", "b", {}))
        if world.rank < 2:
            results(world, steps(("start", "a", a), b, *ends))
        time.sleep(0.5)
        results(world, steps(("run", "a", {"group": [2]}), b, ends[1]))

    for message in errors_on_ranks(worlds, run)[:2]:
        assert "the ranks disagree: rank 0" in message
        assert "AllReduce 'a' (tag 97)" in message
        assert "op=max" in message and "op=sum" in message
        assert ("stream=1" in message) == (stream == 1)


@pytest.mark.slow
def test_a_late_rank_says_what_it_does_in_all_streams(fresh_worlds: Fresh) -> None:
    """Rank 1 never starts `a`: it waits for rank 2 in two streams."""
    worlds = opened(fresh_worlds, 3, 3, timeout=1)
    others = {"group": [1, 2]}

    def run(world: World) -> None:
        if world.rank == 0:
            a = ("start", "a", {"stream": 1, "group": [0, 1]})
            results(world, steps(a, ("run", "b", {"group": [0]}), ("complete", "a", {})))
        time.sleep(0.5 if world.rank == 1 else 3)
        results(world, steps(("start", "b", {"stream": 2, **others}), ("run", "a", others),
                             ("complete", "b", {})))  # fmt: skip

    message = errors_on_ranks(worlds, run)[0]
    late = r"AllReduce 'a' \(tag 97\) has waited for 1 s: rank 1 \(pid \d+\) has not arrived, it is"
    assert re.search(rf"{late} in AllReduce 'a' .* and in AllReduce 'b' ", message), message


def test_a_rank_that_leaves_before_a_collective_of_another_stream(fresh_worlds: Fresh) -> None:
    worlds = opened(fresh_worlds, 2)

    def run(world: World) -> None:
        if world.rank == 1:
            results(world, steps(("run", "a", {"group": [1]}), ("run", "b", {})))
            world.close()
            raise RankError("rank 1 has left")
        results(
            world, steps(("start", "a", {"stream": 1}), ("run", "b", {}), ("complete", "a", {}))
        )

    message = errors_on_ranks(worlds, run)[0]
    assert "rank 1 (pid " in message and "left the world before AllReduce 'a' (tag 97)" in message


def test_an_interrupt_ends_all_streams_and_the_next_run_is_right(fresh_worlds: Fresh) -> None:
    worlds = opened(fresh_worlds, 2)
    order = [("start", "a", {"stream": 1}), ("start", "b", {"op": "max"})]
    order += [("complete", "a", {}), ("complete", "b", {})]

    def run(world: World) -> None:
        if world.rank == 1:
            time.sleep(0.1)
            world.interrupt("rank 1 has had enough")
            raise RuntimeError("rank 1 has had enough")
        results(world, steps(*order))

    for _ in range(2):
        for message in errors_on_ranks(worlds, run):
            assert "rank 1 has had enough" in message
        on_ranks(worlds, lambda w: w.renew())
        assert on_ranks(worlds, lambda w: results(w, steps(*order))) == [[[11] * 3, [10] * 3]] * 2


def test_a_stream_that_there_is_not(fresh_worlds: Fresh) -> None:
    made = steps(("run", "a", {"stream": 64}), ("run", "b", {}))
    for message in errors_on_ranks(fresh_worlds(2), lambda w: results(w, made)):
        assert "AllReduce 'a': stream=64 must be from 0 to 63" in message
