"""Each collective on threads as ranks, against NumPy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

from onnxpar import hvd
from onnxpar.base.errors import InputError, RankError

pytestmark = pytest.mark.usefixtures("medium")

RANKS = [1, 2, 3, 4]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
DTYPES = [*FLOATS, "int32", "int64", "uint8", "bool"]
FOLDS: dict[hvd.ReduceOp, np.ufunc] = {
    hvd.Sum: np.add,
    hvd.Min: np.minimum,
    hvd.Max: np.maximum,
    hvd.Product: np.multiply,
}


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def values(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int) -> np.ndarray:
    drawn = 3 * np.random.default_rng(seed).standard_normal(shape)
    return drawn > 0 if dtype.kind == "b" else drawn.astype(dtype)


def folded(op: hvd.ReduceOp, xs: list[np.ndarray]) -> np.ndarray:
    """In the order of the ranks; 16-bit floats are rounded once."""
    dtype = xs[0].dtype
    wide = [x.astype(np.float32) if dtype.itemsize == 2 else x for x in xs]
    result = wide[0]
    for x in wide[1:]:
        result = FOLDS[hvd.Sum if op is hvd.Average else op](result, x)
    if op is hvd.Average:
        result = result / result.dtype.type(len(xs))
    return result.astype(dtype)


@pytest.mark.parametrize("ranks", RANKS)
def test_allreduce_of_all_dtypes(ranks: int) -> None:
    dtypes = [dtype_of(name) for name in DTYPES]
    cases = [(d, op) for d in dtypes for op in [*FOLDS, hvd.Average]]
    cases = [(d, op) for d, op in cases if d.name in FLOATS or op is not hvd.Average]
    xs = {d: [values(d, (3, 5), rank) for rank in range(ranks)] for d in dtypes}

    def body() -> list[np.ndarray]:
        return [hvd.allreduce(xs[d][hvd.rank()], op=op) for d, op in cases]

    for results in hvd.run_on_threads(body, ranks):
        for (dtype, op), found in zip(cases, results, strict=True):
            assert found.dtype == dtype
            np.testing.assert_array_equal(found, folded(op, xs[dtype]), str((dtype, op)))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", FLOATS)
def test_allreduce_of_a_large_array_is_the_average(name: str, ranks: int) -> None:
    xs = [values(dtype_of(name), (300_001,), rank) for rank in range(ranks)]
    for found in hvd.run_on_threads(lambda: hvd.allreduce(xs[hvd.rank()]), ranks):
        np.testing.assert_array_equal(found, folded(hvd.Average, xs))


def test_an_average_does_not_overflow() -> None:
    x = np.full(3, 60_000, np.float16)
    for found in hvd.run_on_threads(lambda: hvd.allreduce(x), 4):
        np.testing.assert_array_equal(found, x)


@pytest.mark.parametrize(
    "x",
    [
        np.float32(1.5),
        np.zeros((0, 3)),
        np.arange(12.0).reshape(3, 4).T,
        np.arange(10.0)[::2],
        np.arange(4, dtype=">f8"),
        [1.0, 2.0],
    ],
    ids=["a scalar", "empty", "transposed", "strided", "big-endian", "a list"],
)
def test_allreduce_of_any_array(x: Any) -> None:
    for found in hvd.run_on_threads(lambda: hvd.allreduce(x, op=hvd.Sum), 2):
        assert found.shape == np.shape(x)
        np.testing.assert_array_equal(found, 2 * np.asarray(x))


def test_results_are_new_arrays() -> None:
    def body() -> bool:
        x = np.ones(4)
        results = [
            hvd.allreduce(x),
            hvd.broadcast(x, 0),
            hvd.allgather(x),
            hvd.alltoall(x, [4])[0],
            hvd.reducescatter(x),
            *hvd.grouped_allreduce([x]),
        ]
        return any(np.shares_memory(x, result) for result in results)

    assert hvd.run_on_threads(body, 1) == [False]


@pytest.mark.parametrize("ranks", RANKS)
def test_allgather_of_uneven_rows(ranks: int) -> None:
    xs = {name: [rows(name, (3 * rank) % 4, rank) for rank in range(ranks)] for name in DTYPES}

    def body() -> list[np.ndarray]:
        return [hvd.allgather(xs[name][hvd.rank()], name=name) for name in DTYPES]

    for results in hvd.run_on_threads(body, ranks):
        for name, found in zip(DTYPES, results, strict=True):
            assert found.dtype == dtype_of(name)
            np.testing.assert_array_equal(found, np.concatenate(xs[name]))


def rows(name: str, count: int, seed: int) -> np.ndarray:
    return values(dtype_of(name), (count, 2), seed)


@pytest.mark.parametrize("ranks", RANKS)
def test_alltoall_of_uneven_rows(ranks: int) -> None:
    splits = [[(2 * to + rank) % 3 for to in range(ranks)] for rank in range(ranks)]
    xs = {name: [rows(name, sum(splits[r]), r) for r in range(ranks)] for name in DTYPES}

    def body() -> list[tuple[np.ndarray, np.ndarray]]:
        return [hvd.alltoall(xs[name][hvd.rank()], splits[hvd.rank()]) for name in DTYPES]

    for rank, results in enumerate(hvd.run_on_threads(body, ranks)):
        for name, (found, received) in zip(DTYPES, results, strict=True):
            ends = [np.cumsum(each) for each in splits]
            parts = [
                xs[name][r][ends[r][rank] - splits[r][rank] : ends[r][rank]] for r in range(ranks)
            ]
            assert received.tolist() == [each[rank] for each in splits]
            assert found.dtype == dtype_of(name)
            np.testing.assert_array_equal(found, np.concatenate(parts))


@pytest.mark.parametrize("ranks", [2, 3])
def test_alltoall_in_equal_parts(ranks: int) -> None:
    """Each rank may have another number of rows, as long as it divides."""

    def body() -> np.ndarray:
        return hvd.alltoall(np.repeat(hvd.rank(), ranks * (1 + hvd.rank())))

    expected = [rank for rank in range(ranks) for _ in range(1 + rank)]
    for found in hvd.run_on_threads(body, ranks):
        assert found.tolist() == expected


@pytest.mark.parametrize("ranks", RANKS)
def test_reducescatter(ranks: int) -> None:
    """7 rows: the first ranks have one more."""
    xs = [values(np.dtype("f4"), (7, 2), rank) for rank in range(ranks)]
    for op in (hvd.Average, hvd.Sum, hvd.Max):

        def body(op: hvd.ReduceOp = op) -> np.ndarray:
            return hvd.reducescatter(xs[hvd.rank()], op=op)

        parts = hvd.run_on_threads(body, ranks)
        sizes = [len(part) for part in np.array_split(xs[0], ranks)]
        assert [len(part) for part in parts] == sizes
        np.testing.assert_array_equal(np.concatenate(parts), folded(op, xs))


@pytest.mark.parametrize("ranks", RANKS)
def test_broadcast(ranks: int) -> None:
    xs = {n: [values(dtype_of(n), (2, 3), rank) for rank in range(ranks)] for n in DTYPES}
    root = ranks - 1

    def body() -> list[np.ndarray]:
        return [hvd.broadcast(xs[name][hvd.rank()], root) for name in DTYPES]

    for results in hvd.run_on_threads(body, ranks):
        for name, found in zip(DTYPES, results, strict=True):
            assert found.dtype == dtype_of(name)
            np.testing.assert_array_equal(found, xs[name][root])


@pytest.mark.parametrize("ranks", RANKS)
def test_no_rank_leaves_a_barrier_before_all_have_come(ranks: int) -> None:
    lock, come = threading.Lock(), [0]

    def body() -> list[int]:
        seen = []
        for _ in range(5):
            with lock:
                come[0] += 1
            hvd.barrier()
            seen.append(come[0])
            hvd.barrier()
        return seen

    expected = [ranks * (i + 1) for i in range(5)]
    assert hvd.run_on_threads(body, ranks) == [expected] * ranks


def test_what_has_begun_runs_in_order() -> None:
    def body() -> list[list[float]]:
        begun = [hvd.allreduce_async(np.full(1000, i), name=f"x{i}", op=hvd.Sum) for i in range(20)]
        last = hvd.allreduce(np.ones(2), op=hvd.Sum)
        assert all(hvd.poll(handle) for handle in begun)
        return [[float(hvd.synchronize(handle)[0]) for handle in begun], last.tolist()]

    expected = [[2.0 * i for i in range(20)], [2.0, 2.0]]
    assert hvd.run_on_threads(body, 2) == [expected] * 2


def errors(body: Callable[[], Any], ranks: int = 2) -> list[str]:
    """The message of the RankError that `body` raises on each rank."""

    def catching() -> str:
        with pytest.raises(RankError) as raised:
            body()
        return str(raised.value)

    return hvd.run_on_threads(catching, ranks, timeout=20)


def mine(*of_ranks: Any) -> Any:
    return of_ranks[hvd.rank()]


DISAGREEMENTS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "shapes": (
        lambda: hvd.allreduce(np.ones(mine((2, 3), (3, 2))), name="g"),
        ["AllReduce 'g'", "float64[2, 3]", "float64[3, 2]"],
    ),
    "dtypes": (
        lambda: hvd.broadcast(np.ones(4, mine("f4", "i4")), 0),
        ["Broadcast", "float32[4]", "int32[4]"],
    ),
    "reductions": (
        lambda: hvd.allreduce(np.ones(3), op=mine(hvd.Sum, hvd.Average)),
        ["op=sum", "op=mean"],
    ),
    "names": (
        lambda: hvd.allreduce(np.ones(3), name=mine("a", "b")),
        ["AllReduce 'a'", "AllReduce 'b'"],
    ),
    "roots": (lambda: hvd.broadcast(np.ones(3), mine(0, 1)), ["root=0", "root=1"]),
    "rows": (
        lambda: hvd.allgather(np.ones(mine((1, 3), (2, 4)))),
        ["AllGather", "[1, 3]", "[2, 4]"],
    ),
    "parts": (
        lambda: hvd.alltoall(np.ones(mine((2, 3), (2, 4)))),
        ["AllToAll", "[2, 3]", "[2, 4]"],
    ),
    "scatters": (
        lambda: hvd.reducescatter(np.ones(mine(3, 4))),
        ["ReduceScatter", "float64[3]", "float64[4]"],
    ),
    "calls": (
        lambda: mine(hvd.barrier, lambda: hvd.allreduce(np.ones(3)))(),
        ["Barrier", "AllReduce"],
    ),
    "compression": (
        lambda: hvd.allreduce(
            np.ones(3), compression=mine(hvd.Compression.none, hvd.Compression.fp16)
        ),
        ["float64[3]", "float16[3]"],
    ),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree(what: str) -> None:
    body, parts = DISAGREEMENTS[what]
    for message in errors(body):
        assert "disagree" in message
        assert all(part in message for part in parts), message


def test_after_a_failure_every_call_says_why() -> None:
    def body() -> None:
        with pytest.raises(RankError):
            hvd.allreduce(np.ones(1 + hvd.rank()))
        hvd.barrier()

    for message in errors(body):
        assert message.startswith("Barrier: ")
        assert "AllReduce" in message and "float64[1]" in message


def test_a_rank_that_leaves_early() -> None:
    def body() -> str:
        if hvd.rank() == 1:
            return "left"
        with pytest.raises(RankError) as raised:
            hvd.allreduce(np.ones(3), name="g")
        return str(raised.value)

    messages = hvd.run_on_threads(body, 3)
    for message in (messages[0], messages[2]):
        assert "AllReduce 'g'" in message and "rank 1" in message
        assert "left the world" in message


@pytest.mark.slow
def test_a_rank_that_is_late() -> None:
    done = threading.Event()

    def body() -> str:
        if hvd.rank() == 1:
            done.wait(20)
            return ""
        with pytest.raises(RankError) as raised:
            hvd.allgather(np.ones(3), name="g")
        done.set()
        return str(raised.value)

    message = hvd.run_on_threads(body, 2, timeout=2)[0]
    assert "AllGather 'g' has waited for 2 s: rank 1" in message
    assert "has not arrived, it is not in a collective" in message


def test_a_rank_that_fails_is_what_is_raised() -> None:
    heard: list[str] = []
    ready = threading.Barrier(3)

    def body() -> None:
        ready.wait()  # before that, the others' initialization may be what fails
        if hvd.rank() == 1:
            raise ZeroDivisionError("too small")
        with pytest.raises(RankError) as raised:
            hvd.barrier()
        heard.append(str(raised.value))

    with pytest.raises(ZeroDivisionError, match="too small"):
        hvd.run_on_threads(body, 3)
    assert heard == ["Barrier: rank 1 failed: ZeroDivisionError: too small"] * 2


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an average of bools": (
        lambda: hvd.reducescatter(np.ones(3, bool), name="n"),
        "reducescatter 'n': an array of bool cannot be averaged or scaled",
    ),
    "a scaled array of bool": (
        lambda: hvd.allreduce(np.ones(3, bool), op=hvd.Max, prescale_factor=2.0),
        "an array of bool cannot be averaged or scaled",
    ),
    "one in a group": (
        lambda: hvd.grouped_allreduce([np.ones(3), np.ones(3, bool)]),
        r"grouped_allreduce\[1\]: an array of bool",
    ),
    "an op in the place of average": (
        lambda: hvd.allreduce(np.ones(3), cast(Any, hvd.Sum)),
        "average=ReduceOp.SUM must be True or False; give op=ReduceOp.SUM",
    ),
    "both op and average": (
        lambda: hvd.allreduce(np.ones(3), average=True, op=hvd.Sum),
        "op replaces average; give only one of them",
    ),
    "an Adasum of integers": (
        lambda: hvd.allreduce(np.ones(3, np.int64), op=hvd.Adasum),
        "Adasum needs an array of floats, not of int64",
    ),
    "a scattered Adasum": (
        lambda: hvd.reducescatter(np.ones(4), op=hvd.Adasum),
        "Adasum is a reduction of allreduce alone",
    ),
    "a tensor that cannot be overwritten": (
        lambda: hvd.allreduce_(cast(Any, [1.0, 2.0])),
        "allreduce_: the tensor is not a writable array",
    ),
    "a complex array": (
        lambda: hvd.allreduce(np.ones(3, complex)),
        "dtype complex128 cannot be exchanged; use one of float32,",
    ),
    "strings": (lambda: hvd.allgather(np.array(["a"])), "cannot be exchanged"),
    "no reduction": (
        lambda: hvd.allreduce(np.ones(3), op=cast(Any, "sum")),
        "op='sum' is not a reduction",
    ),
    "a root that is no rank": (
        lambda: hvd.broadcast(np.ones(3), 2),
        "root_rank=2 must be from 0 to 1",
    ),
    "a scalar's rows": (lambda: hvd.allgather(np.float32(1)), "allgather: the array is a scalar"),
    "rows that do not divide": (
        lambda: hvd.alltoall(np.ones(3)),
        "3 rows do not divide by 2 ranks; give splits",
    ),
    "splits that do not add up": (
        lambda: hvd.alltoall(np.ones(3), [1, 1]),
        r"splits=\[1, 1\] must be 2 numbers of rows, one for each rank, which add up to 3",
    ),
    "a negative split": (lambda: hvd.alltoall(np.ones(3), [4, -1]), "must be 2 numbers"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_leaves_the_ranks_intact(what: str) -> None:
    call, message = REFUSED[what]

    def body() -> float:
        with pytest.raises(InputError, match=message):
            call()
        return float(hvd.allreduce(np.float64(hvd.rank())))

    assert hvd.run_on_threads(body, 2) == [0.5, 0.5]
