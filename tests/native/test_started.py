"""Collectives in two ops: a thread of the plugin runs them while onnxruntime computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from native.ranks import TOKEN, errors_on_ranks, model, node, on_ranks, session
from onnx import TensorProto, helper

from onnxpar.runtime.ranks.groups import World

Fresh = Callable[..., list[World]]
FLOAT = TensorProto.FLOAT
KINDS: dict[str, dict[str, Any]] = {
    "AllReduce": {"op": "sum"},
    "AllGather": {"axis": 1},
    "ReduceScatter": {"axis": 0, "op": "max"},
    "AllToAll": {"split_axis": 0, "concat_axis": 1},
}


def in_two(kind: str, name: str = "node", tag: int = 1, **attributes: Any) -> list[onnx.NodeProto]:
    """Start and Complete: X, t -> Y, s."""
    given = {"tag": tag, "name": name, **attributes}
    return [
        node(f"Start{kind}", ["X", "t"], ["P", "u"], **given),
        node("Complete", ["P", "u"], ["Y", "s"], name=f"{name}.end"),
    ]


def loaded(nodes: Sequence[onnx.NodeProto], shape: Sequence[Any]) -> bytes:
    outputs = [("Y", FLOAT, None), ("s", TensorProto.BOOL, None)]
    return model(nodes, [("X", FLOAT, shape)], outputs)


def in_one(kind: str, **attributes: Any) -> list[onnx.NodeProto]:
    return [node(kind, ["X", "t"], ["Y", "s"], tag=1, name="node", **attributes)]


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("width", [0, 3, 70_000])
def test_same_bits_as_in_one_op(kind: str, ranks: int, width: int, fresh_worlds: Fresh) -> None:
    """4 rows over 5 ranks: some have none."""
    draw = np.random.default_rng(0)
    x = [draw.standard_normal((4, width), np.float32) for _ in range(ranks)]
    worlds = fresh_worlds(ranks)

    def run(world: World) -> list[np.ndarray]:
        both = [in_one(kind, **KINDS[kind]), in_two(kind, **KINDS[kind])]
        each = [session(world, loaded(nodes, [4, width])) for nodes in both]
        feeds = {"X": x[world.rank], "t": TOKEN}
        return [s.run(["Y"], feeds)[0] for s in (*each, each[1])]

    for one, *two in on_ranks(worlds, run):
        for y in two:
            assert y.shape == one.shape
            assert y.tobytes() == one.tobytes()


def test_shapes_follow_at_loading(fresh_worlds: Fresh) -> None:
    sizes = {"AllGather": [1, 2], "ReduceScatter": [1, 3]}

    def shapes(world: World) -> list[list[Any]]:
        found = []
        for kind, attributes in KINDS.items():
            more = {"sizes": sizes[kind]} if kind in sizes else {}
            made = loaded(in_two(kind, **attributes, **more), [4, "n"])
            found.append(session(world, made).get_outputs()[0].shape)
        return found

    for rank, (same, gathered, scattered, dealt) in enumerate(on_ranks(fresh_worlds(2), shapes)):
        assert same == [4, "n"]
        assert gathered == [4, 3]
        assert scattered == [1 + 2 * rank, "n"]
        assert dealt[0] != 4


def later(name: str, x: str, y: str) -> onnx.NodeProto:
    return helper.make_node("Identity", [x], [y], name)


def test_the_thread_works_while_onnxruntime_computes(
    monkeypatch: pytest.MonkeyPatch, fresh_worlds: Fresh
) -> None:
    """The token of Complete tells when the thread was at work: before Complete began."""
    monkeypatch.setenv("ONNXPAR_LINK", "latency=50ms")
    between = [helper.make_node("MatMul", ["A", "A"], ["B0"])]
    between += [helper.make_node("MatMul", [f"B{i}", "A"], [f"B{i + 1}"]) for i in range(300)]
    start, end = in_two("AllReduce")
    after = node("After", ["B300", "u"], ["v"], name="after")
    end.input[1] = "v"
    made = model(
        [start, *between, after, end],
        [("X", FLOAT, [3]), ("A", FLOAT, [160, 160])],
        [("Y", FLOAT, None), ("s", TensorProto.BOOL, None)],
    )

    def run(world: World) -> tuple[np.ndarray, tuple[int, ...]]:
        feeds = {"X": np.ones(3, np.float32), "A": np.eye(160, dtype=np.float32), "t": TOKEN}
        y, token = session(world, made).run(["Y", "s"], feeds)
        return y, token.shape

    for y, (none, began, ended) in on_ranks(fresh_worlds(2), run):
        assert y.tolist() == [2, 2, 2]
        assert none == 0
        assert began - ended >= 50_000


def test_ranks_that_disagree_are_named(fresh_worlds: Fresh) -> None:
    def run(world: World) -> None:
        kind, attributes = ("AllReduce", {"op": "sum" if world.rank else "max"})
        made = loaded(in_two(kind, **attributes), [3])
        session(world, made).run(["Y"], {"X": np.ones(3, np.float32), "t": TOKEN})

    for message in errors_on_ranks(fresh_worlds(2), run):
        assert "AllReduce 'node' (tag 1)" in message
        assert "op=max" in message and "op=sum" in message


def test_a_wrong_operand_interrupts_all_ranks_and_the_next_run_is_right(
    fresh_worlds: Fresh,
) -> None:
    def run(world: World, rows: int, made: Any) -> np.ndarray:
        return made.run(["Y"], {"X": np.ones((rows, 2), np.float32), "t": TOKEN})[0]

    worlds = fresh_worlds(3)
    attributes = {"axis": 0, "sizes": [2, 1, 1], "op": "sum"}
    made = {
        w.rank: session(w, loaded(in_two("ReduceScatter", **attributes), ["n", 2])) for w in worlds
    }
    for message in errors_on_ranks(worlds, lambda w: run(w, 4 + (w.rank == 1), made[w.rank])):
        assert "rank 1 cannot run ReduceScatter 'node' (tag 1)" in message
        assert "requires 4" in message
    on_ranks(worlds, lambda w: w.renew())
    for rank, y in enumerate(on_ranks(worlds, lambda w: run(w, 4, made[w.rank]))):
        assert y.tolist() == [[3, 3]] * (2 if rank == 0 else 1)


def fails_between() -> bytes:
    """A Gather fails after the start, and before the completion."""
    start, end = in_two("AllReduce")
    nodes = [start, helper.make_node("Gather", ["X", "I"], ["G"]), end]
    nodes.insert(2, node("After", ["G", "u"], ["v"], name="after"))
    end.input[1] = "v"
    return model(
        nodes,
        [("X", FLOAT, [1_000_000]), ("I", TensorProto.INT64, [1])],
        [("Y", FLOAT, None), ("s", TensorProto.BOOL, None)],
    )


def test_a_run_that_fails_between_start_and_complete(
    monkeypatch: pytest.MonkeyPatch, fresh_worlds: Fresh
) -> None:
    """The thread still works when the run's memory is freed, and when the session ends."""
    monkeypatch.setenv("ONNXPAR_LINK", "latency=100ms")

    def feeds(world: World, index: int) -> dict[str, np.ndarray]:
        x = np.full(1_000_000, world.rank + 1, np.float32)
        return {"X": x, "I": np.array([index]), "t": TOKEN}

    def run(world: World) -> tuple[str, float]:
        failing = session(world, fails_between())
        try:
            failing.run(["Y"], feeds(world, 2_000_000))
        except Exception as error:
            message = str(error)
        del failing
        [y] = session(world, fails_between()).run(["Y"], feeds(world, 5))
        return message, float(y.min())

    for message, least in on_ranks(fresh_worlds(2), run):
        assert "out of data bounds" in message
        assert least == 3


def test_a_session_that_fails_again_and_again_keeps_nothing(fresh_worlds: Fresh) -> None:
    def run(world: World) -> list[float]:
        made = session(world, fails_between())
        found = []
        for index in (2_000_000, 2_000_000, 7):
            feeds = {"X": np.ones(1_000_000, np.float32), "I": np.array([index]), "t": TOKEN}
            try:
                found.append(float(made.run(["Y"], feeds)[0].max()))
            except Exception:
                found.append(-1.0)
        return found

    assert on_ranks(fresh_worlds(2), run) == [[-1, -1, 2]] * 2


def test_an_interrupt_between_start_and_complete(fresh_worlds: Fresh) -> None:
    """A rank that never starts its own tells the others, whose started collective fails."""
    worlds = fresh_worlds(2)

    def run(world: World) -> None:
        if world.rank == 1:
            time.sleep(0.2)
            world.interrupt("rank 1 has had enough")
            raise RuntimeError("rank 1 has had enough")
        session(world, loaded(in_two("AllReduce"), [3])).run(
            ["Y"], {"X": np.ones(3, np.float32), "t": TOKEN}
        )

    for message in errors_on_ranks(worlds, run):
        assert "rank 1 has had enough" in message
    on_ranks(worlds, lambda w: w.renew())
    made = loaded(in_two("AllReduce"), [3])
    for y in on_ranks(
        worlds, lambda w: session(w, made).run(["Y"], {"X": np.ones(3, np.float32), "t": TOKEN})[0]
    ):
        assert y.tolist() == [2, 2, 2]


def test_one_in_one_op_waits_for_those_that_were_started(
    monkeypatch: pytest.MonkeyPatch, fresh_worlds: Fresh
) -> None:
    """Ranks run all of them in one order, which the tokens give."""
    monkeypatch.setenv("ONNXPAR_LINK", "latency=20ms")
    start, end = in_two("AllReduce", "first", 1)
    middle = node("AllReduce", ["X", "u"], ["Z", "v"], tag=2, name="second", op="max")
    end.input[1] = "v"
    outputs = [("Y", FLOAT, None), ("Z", FLOAT, None)]
    made = model([start, middle, end], [("X", FLOAT, [2])], outputs)

    def run(world: World) -> list[list[float]]:
        x = np.full(2, world.rank + 1, np.float32)
        return [y.tolist() for y in session(world, made).run(["Y", "Z"], {"X": x, "t": TOKEN})]

    assert on_ranks(fresh_worlds(3), run) == [[[6, 6], [3, 3]]] * 3


def test_complete_without_start(fresh_worlds: Fresh) -> None:
    made = model(
        [node("Complete", ["X", "t"], ["Y", "s"], name="end")],
        [("X", FLOAT, [0, "n", 2])],
        [("Y", FLOAT, None), ("s", TensorProto.BOOL, None)],
    )

    def run(world: World) -> None:
        session(world, made).run(["Y"], {"X": np.zeros((0, 99_999, 2), np.float32), "t": TOKEN})

    (message,) = errors_on_ranks(fresh_worlds(1), run)
    assert "names no started collective" in message


@pytest.mark.parametrize("text", ["fast", "latency=3", "bandwidth=-1GB/s", "ranks_per_host=0.5"])
def test_a_link_that_is_not_understood(
    text: str, monkeypatch: pytest.MonkeyPatch, fresh_worlds: Fresh
) -> None:
    monkeypatch.setenv("ONNXPAR_LINK", text)
    with pytest.raises(Exception, match=f"ONNXPAR_LINK='{text}': '{text}' is not understood"):
        fresh_worlds(2)


@pytest.mark.parametrize("kind", ["ReduceScatter", "AllToAll"])
def test_sizes_that_only_a_run_knows(kind: str, fresh_worlds: Fresh) -> None:
    """The sizes of shards are an operand, other ones in each run of a session."""
    outputs = [("Y", FLOAT, None), ("s", TensorProto.BOOL, None)]
    inputs = [("X", FLOAT, ["n", 2]), ("sizes", TensorProto.INT64, [3])]
    protos = []
    for nodes in (in_one(kind, **KINDS[kind]), in_two(kind, **KINDS[kind])):
        nodes[0].input.append("sizes")
        protos.append(model(nodes, inputs, outputs))
    worlds = fresh_worlds(3)

    def run(world: World) -> list[list[np.ndarray]]:
        one, two = (session(world, proto) for proto in protos)
        found = []
        for sizes in ([3, 0, 2], [0, 0, 7], [1, 2, 1], [0, 0, 0]):
            x = np.random.default_rng(world.rank).standard_normal((sum(sizes), 2), np.float32)
            feeds = {"X": x, "t": TOKEN, "sizes": np.array(sizes, np.int64)}
            found.append([each.run(["Y"], feeds)[0] for each in (one, two)])
            assert found[-1][0].shape[0] == sizes[world.rank]
        return found

    for pairs in on_ranks(worlds, run):
        for one, two in pairs:
            np.testing.assert_array_equal(one, two)
