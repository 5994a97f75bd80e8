"""Calls as programs for Horovod make them, against NumPy and Horovod's documented results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxpar import hvd
from onnxpar.base.errors import InputError, RankError

Array = np.ndarray


def draw(rank: int, shape: tuple[int, ...] = (5, 3), dtype: str = "f8") -> Array:
    return np.random.default_rng(rank).standard_normal(shape).astype(dtype)


def test_average_as_it_was_before_op() -> None:
    def body() -> list[float]:
        x = np.float64(hvd.rank())
        with pytest.warns(DeprecationWarning, match="use op"):
            mean = hvd.allreduce(x, True)
        with pytest.warns(DeprecationWarning, match="use op"):
            total = hvd.allreduce(x, average=False)
        return [float(mean), float(total), float(hvd.allreduce(x, None, "x"))]

    assert hvd.run_on_threads(body, 1) == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8", "uint64"])
def test_averages_of_integers_are_rounded_towards_0(dtype: str) -> None:
    """As Horovod's division of the sum by the number of ranks."""
    rows = [
        np.array([7, 1, 0, 2], dtype),
        np.array([0, 1, 0, 3], dtype),
        np.array([1, 0, 0, 3], dtype),
    ]
    if dtype[0] != "u":
        rows = [row * np.array([1, -1, 1, -1], dtype) for row in rows]
    expected = np.trunc(sum(row.astype("f8") for row in rows) / 3).astype(dtype)
    for found in hvd.run_on_threads(lambda: hvd.allreduce(rows[hvd.rank()]), 3):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "op,fold",
    [(hvd.Sum, np.sum), (hvd.Average, np.mean), (hvd.Max, np.max), (hvd.Product, np.prod)],
)
@pytest.mark.parametrize("dtype,bound", [("f4", 1e-6), ("f8", 1e-14), ("f2", 4e-3)])
def test_factors_before_and_after(op: hvd.ReduceOp, fold: Any, dtype: str, bound: float) -> None:
    xs = [draw(rank, dtype=dtype) for rank in range(3)]
    scaled = np.stack([x.astype("f8") * 0.25 for x in xs])
    expected = 3.0 * fold(scaled, axis=0)

    def body() -> list[Array]:
        x, how = xs[hvd.rank()], {"op": op, "prescale_factor": 0.25, "postscale_factor": 3.0}
        grouped = hvd.grouped_allreduce([x, x], **how)
        rows = hvd.allgather(hvd.reducescatter(x, **how))
        return [hvd.allreduce(x, **how), *grouped, rows]

    for results in hvd.run_on_threads(body, 3):
        for found in results:
            assert found.dtype == dtype
            np.testing.assert_allclose(found, expected, rtol=bound, atol=bound)


def test_factors_of_integers() -> None:
    def body() -> list[int]:
        return hvd.allreduce(np.array([3, -5]), op=hvd.Sum, prescale_factor=0.5).tolist()

    assert hvd.run_on_threads(body, 2) == [[2, -4]] * 2  # trunc(1.5) + trunc(1.5), ...


@pytest.mark.usefixtures("medium")
def test_ranks_with_different_factors_disagree() -> None:
    def body() -> str:
        with pytest.raises(RankError, match="disagree") as raised:
            hvd.allreduce(np.ones(2), prescale_factor=1.0 + hvd.rank())
        return str(raised.value)

    for message in hvd.run_on_threads(body, 2, timeout=20):
        assert "prescale_factor=2.0" in message


def test_in_place() -> None:
    def body() -> list[bool]:
        x, rank = np.full(3, float(hvd.rank())), hvd.rank()
        same = [hvd.allreduce_(x, op=hvd.Sum) is x and x.tolist() == [3.0] * 3]
        parts = [np.full(2, float(rank)), np.full((2, 2), 2.0 * rank)]
        hvd.grouped_allreduce_(parts, op=hvd.Max)
        same.append(parts[0].tolist() == [2.0, 2.0] and parts[1].tolist() == [[4.0, 4.0]] * 2)
        y = np.full(2, float(rank))
        same.append(hvd.broadcast_(y, 1) is y and y.tolist() == [1.0, 1.0])
        return same

    assert hvd.run_on_threads(body, 3) == [[True] * 3] * 3


@pytest.mark.usefixtures("medium")
def test_everything_can_run_in_the_background() -> None:
    def body() -> None:
        x = draw(hvd.rank(), (6, 2))
        pairs: list[tuple[Any, Callable[[], Any]]] = [
            (hvd.allreduce_async(x, name="a"), lambda: hvd.allreduce(x)),
            (hvd.grouped_allreduce_async([x, x[0]]), lambda: hvd.grouped_allreduce([x, x[0]])),
            (hvd.allgather_async(x[: hvd.rank()]), lambda: hvd.allgather(x[: hvd.rank()])),
            (hvd.grouped_allgather_async([x, x]), lambda: hvd.grouped_allgather([x, x])),
            (hvd.broadcast_async(x, 1), lambda: hvd.broadcast(x, 1)),
            (hvd.alltoall_async(x, [1, 2, 3]), lambda: hvd.alltoall(x, [1, 2, 3])),
            (hvd.reducescatter_async(x), lambda: hvd.reducescatter(x)),
            (hvd.grouped_reducescatter_async([x]), lambda: hvd.grouped_reducescatter([x])),
        ]
        for handle, waiting in pairs:
            expected = waiting()
            assert hvd.poll(handle)
            found = hvd.synchronize(handle)
            if isinstance(expected, Array):
                found, expected = [found], [expected]
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, other)
        received = hvd.synchronize(hvd.alltoall_async(x))[1]
        assert received.tolist() == [2, 2, 2] and received.dtype == np.int32
        assert hvd.alltoall(x, np.array([6, 0, 0]))[1].dtype == np.int64

    hvd.run_on_threads(body, 3)


def adasum(xs: list[Array]) -> Array:
    """The formula of Horovod's documentation, for pairs, then for pairs of pairs."""
    if len(xs) == 1:
        return xs[0]
    a, b = adasum(xs[: len(xs) // 2]), adasum(xs[len(xs) // 2 :])
    dot = np.sum(a * b)
    return (1 - dot / (2 * np.sum(a * a))) * a + (1 - dot / (2 * np.sum(b * b))) * b


@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_adasum(ranks: int) -> None:
    xs = [draw(rank) for rank in range(ranks)]
    others = [draw(10 + rank, (7,)) for rank in range(ranks)]

    def body() -> list[Array]:
        mine = [xs[hvd.rank()], others[hvd.rank()]]
        return [hvd.allreduce(mine[0], op=hvd.Adasum), *hvd.grouped_allreduce(mine, op=hvd.Adasum)]

    for alone, *grouped in hvd.run_on_threads(body, ranks):
        np.testing.assert_allclose(alone, adasum(xs), rtol=1e-12)
        np.testing.assert_array_equal(grouped[0], alone)  # apart from its neighbour in the buffer
        np.testing.assert_allclose(grouped[1], adasum(others), rtol=1e-12)


def test_adasum_of_equal_and_of_orthogonal_gradients() -> None:
    def body() -> list[list[float]]:
        x = np.zeros(2)
        x[hvd.rank()] = 3.0
        return [hvd.allreduce(v, op=hvd.Adasum).tolist() for v in (np.ones(2), x, np.zeros(2))]

    assert hvd.run_on_threads(body, 2) == [[[1.0, 1.0], [3.0, 3.0], [0.0, 0.0]]] * 2


def test_adasum_needs_a_power_of_2() -> None:
    def body() -> None:
        with pytest.raises(InputError, match="must be a power of 2, but it is 3"):
            hvd.allreduce(np.ones(2), op=hvd.Adasum)

    hvd.run_on_threads(body, 3)


def test_process_sets() -> None:
    xs = [draw(rank, (4, 2)) for rank in range(4)]
    both = (xs[1] + xs[3]) / 2

    def body() -> None:
        rank, odd = hvd.rank(), hvd.ProcessSet([3, 1])
        assert odd.size() is None and odd.rank() is None
        assert hvd.add_process_set(odd) is odd
        even = hvd.add_process_set([0, 2])
        assert (odd.process_set_id, even.process_set_id) == (1, 2)
        assert odd.ranks == [1, 3] and odd.size() == 2
        assert odd.included() is (rank in (1, 3))
        own, x = (odd if odd.included() else even), xs[rank]
        assert own.rank() == rank // 2
        found = hvd.allreduce(x, process_set=own)
        if own is odd:
            np.testing.assert_array_equal(found, both)
            np.testing.assert_array_equal(hvd.grouped_allreduce([x], process_set=odd)[0], both)
            np.testing.assert_array_equal(hvd.broadcast(x, 3, process_set=odd), xs[3])
            gathered = hvd.allgather(x, process_set=odd)
            np.testing.assert_array_equal(gathered, np.concatenate([xs[1], xs[3]]))
            part = hvd.reducescatter(x, process_set=odd)
            np.testing.assert_array_equal(part, both[:2] if rank == 1 else both[2:])
            rows, counts = hvd.alltoall(x, [1, 3], process_set=odd)
            assert counts.tolist() == ([1, 1] if rank == 1 else [3, 3])
            assert hvd.broadcast_object(rank, 1, process_set=odd) == 1
            assert rows.shape == (int(counts.sum()), 2)
            np.testing.assert_array_equal(
                hvd.allreduce(x, op=hvd.Adasum, process_set=odd), adasum([xs[1], xs[3]])
            )
            with pytest.raises(InputError, match=r"root_rank=0 must be one of \[1, 3\]"):
                hvd.broadcast(x, 0, process_set=odd)
            hvd.barrier(odd)
        other = even if own is odd else odd
        with pytest.raises(InputError, match=rf"allreduce: rank {rank} is not in ProcessSet\("):
            hvd.allreduce(x, process_set=other)
        assert hvd.global_process_set.ranks == [0, 1, 2, 3]
        assert hvd.global_process_set.rank() == rank
        with pytest.raises(InputError, match=r"of the ranks \[0, 2\] exists already"):
            hvd.add_process_set([2, 0])
        assert hvd.remove_process_set(even) and not hvd.remove_process_set(even)
        assert not hvd.remove_process_set(hvd.global_process_set)
        with pytest.raises(InputError, match="is not registered"):
            hvd.allreduce(x, process_set=even)
        np.testing.assert_allclose(hvd.allreduce(x), np.mean(xs, 0), rtol=1e-14)

    hvd.run_on_threads(body, 4)


@pytest.mark.parametrize(
    "ranks,message",
    [
        ([0, 5], "must be different ranks from 0 to 1"),
        ([], "must be different"),
        ([0, 0], "must be"),
    ],
)
def test_process_sets_that_cannot_be(ranks: list[int], message: str) -> None:
    def body() -> float:
        with pytest.raises(InputError, match=message):
            hvd.add_process_set(ranks)
        return float(hvd.allreduce(np.float64(1.0)))

    assert hvd.run_on_threads(body, 2) == [1.0, 1.0]


def test_process_sets_that_differ() -> None:
    def body() -> None:
        with pytest.raises(InputError, match=r"rank 0 adds \[0\], but rank 1 adds \[1\]"):
            hvd.add_process_set([hvd.rank()])
        with pytest.raises(InputError, match="mpi4py are not supported"):
            hvd.ProcessSet(object())  # type: ignore[arg-type]

    hvd.run_on_threads(body, 2)


def slices(rank: int) -> hvd.IndexedSlices:
    return hvd.IndexedSlices(draw(rank, (3, 2)), np.array([rank, 2, rank]), (5, 2))


def test_sparse_tensors_gather_their_rows() -> None:
    dense = [np.zeros((5, 2)) for _ in range(3)]
    for rank in range(3):
        np.add.at(dense[rank], slices(rank).indices, slices(rank).values)

    def body() -> list[Array]:
        mine = slices(hvd.rank())
        handle = hvd.sparse_allreduce_async(mine, "s", hvd.Sum)
        average, total = hvd.allreduce(mine), handle()
        assert average.indices.tolist() == [0, 2, 0, 1, 2, 1, 2, 2, 2]
        assert average.merged().indices.tolist() == [0, 1, 2]
        return [average.dense(), total.dense(), total.merged().dense()]

    for average, total, merged in hvd.run_on_threads(body, 3):
        np.testing.assert_allclose(average, np.mean(dense, 0), rtol=1e-14)
        np.testing.assert_allclose(total, np.sum(dense, 0), rtol=1e-14)
        np.testing.assert_allclose(merged, np.sum(dense, 0), rtol=1e-14)


def test_sparse_tensors_that_cannot_be_reduced() -> None:
    def body() -> None:
        good, values = slices(0), np.ones((2, 3))
        for wrong, how, message in [
            (good, {"op": hvd.Max}, "only be reduced by hvd.Sum and hvd.Average"),
            (good, {"prescale_factor": 2.0}, "need a dense tensor"),
            (hvd.IndexedSlices(values, np.array([1])), {}, "do not number the rows"),
            (hvd.IndexedSlices(values, np.array([1.0, 2])), {}, "do not number the rows"),
        ]:
            with pytest.raises(InputError, match=message):
                hvd.allreduce(wrong, **how)
        with pytest.raises(InputError, match="has an index outside of it"):
            hvd.IndexedSlices(values, np.array([0, 9]), (5, 3)).dense()

    hvd.run_on_threads(body, 1)


def test_parameters_in_lists() -> None:
    def body() -> list[float]:
        a, b = np.full(2, float(hvd.rank())), np.full(1, 2.0 * hvd.rank())
        hvd.broadcast_parameters([("b", b), ("a", a)], root_rank=1)
        c = np.full(1, 7.0 * hvd.rank())
        hvd.broadcast_parameters([c], 1)
        with pytest.raises(InputError, match="two parameters are called 'a'"):
            hvd.broadcast_parameters([("a", a), ("a", b)], 0)
        return [*a.tolist(), *b.tolist(), *c.tolist()]

    assert hvd.run_on_threads(body, 2) == [[1.0, 1.0, 2.0, 7.0]] * 2


def test_a_compressor_of_ones_own() -> None:
    class Halves:
        @staticmethod
        def compress(tensor: Array) -> tuple[Array, Any]:
            return (tensor / 2).astype("f4"), tensor.dtype

        @staticmethod
        def decompress(tensor: Array, ctx: Any) -> Array:
            return 2 * tensor.astype(ctx)

    def body() -> list[Array]:
        x = np.array([1.0, 4.0]) * (1 + hvd.rank())
        one = hvd.allreduce(x, compression=Halves)
        many = hvd.grouped_allreduce([x, x], compression=Halves)
        return [one, *many]

    for results in hvd.run_on_threads(body, 2):
        for found in results:
            assert found.dtype == np.float64 and found.tolist() == [1.5, 6.0]


def test_a_timeline(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"

    def body() -> None:
        hvd.start_timeline(str(file), mark_cycles=True)
        handle = hvd.allreduce_async(np.ones(4), name="a")
        hvd.synchronize(handle)
        hvd.grouped_allreduce([np.ones(2), np.ones(3)], name="g")
        hvd.allgather(np.ones(2))
        hvd.stop_timeline()
        hvd.allreduce(np.ones(4), name="later")

    hvd.run_on_threads(body, 2)
    events = json.loads(file.read_text())
    names = {
        e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name" and e["pid"]
    }
    assert sorted(names.values()) == ["a", "allgather.noname.0", "g.0", "g.1"]
    of = {name: [e for e in events if e["pid"] == pid and "ts" in e] for pid, name in names.items()}
    assert [(e["ph"], e["name"]) for e in of["a"]] == [
        ("B", "QUEUE"),
        ("E", "QUEUE"),
        ("B", "ALLREDUCE"),
        ("E", "ALLREDUCE"),
    ]
    inner = [e["name"] for e in of["g.1"] if e["ph"] == "B"]
    assert inner == ["QUEUE", "ALLREDUCE", "MEMCPY_IN_FUSION_BUFFER", "GLOO_ALLREDUCE"]
    assert [e["name"] for e in events if e["ph"] == "i"] == ["CYCLE_START"] * 3
    assert all(a["ts"] <= b["ts"] for a, b in zip(of["a"], of["a"][1:], strict=False))


def test_a_timeline_that_cannot_be_written(tmp_path: Path) -> None:
    def body() -> None:
        with pytest.raises(InputError, match="the timeline cannot be written to"):
            hvd.start_timeline(str(tmp_path / "none" / "timeline.json"))

    hvd.run_on_threads(body, 1)
