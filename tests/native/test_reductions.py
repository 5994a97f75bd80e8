"""AllReduce and ReduceScatter against numpy: exact, since both fold in the order of the group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from native.ranks import TOKEN, collective, model, node, on_ranks, run, session
from onnx import TensorProto, helper

from onnxpar.runtime.ranks.groups import World

Worlds = Callable[[int], list[World]]

DTYPES = ["f4", "f8", "f2", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"]
FOLDS: dict[str, np.ufunc] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}
BOOL_FOLDS: dict[str, np.ufunc] = {
    "sum": np.logical_or,
    "max": np.logical_or,
    "min": np.logical_and,
    "prod": np.logical_and,
}
# Nothing, one element, one message to each rank, and (above 32 KB) chunks and segments of them.
LENGTHS = [0, 1, 1000, 9001, 600_001]


def onnx_type(dtype: np.dtype) -> int:
    return int(helper.np_dtype_to_tensor_dtype(dtype))


def random(dtype: np.dtype, shape: Sequence[int], seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape)
    if dtype.kind == "f":
        return values.astype(dtype)
    if dtype.kind == "b":
        return values > 0
    return (values * 1000).astype("i8").astype(dtype)  # sums wrap in 8 bits


def fold(op: str, xs: Sequence[np.ndarray]) -> np.ndarray:
    """The reduction in group order; 16-bit floats are rounded once."""
    ufunc = (BOOL_FOLDS if xs[0].dtype == bool else FOLDS)[op]
    wide = np.dtype("f4") if xs[0].dtype == np.float16 else xs[0].dtype
    with np.errstate(over="ignore"):
        result = xs[0].astype(wide)
        for x in xs[1:]:
            result = ufunc(result, x.astype(wide))
        return result.astype(xs[0].dtype)


@pytest.mark.matrix
@pytest.mark.parametrize("op", FOLDS)
@pytest.mark.parametrize("name", DTYPES)
def test_all_reduce_matches_numpy_bit_for_bit(worlds_of: Worlds, name: str, op: str) -> None:
    dtype = np.dtype(name)
    worlds = worlds_of(3)
    proto = collective("AllReduce", onnx_type(dtype), ["n"], op=op)
    sessions = on_ranks(worlds, lambda world: session(world, proto))
    for length in LENGTHS[:4]:
        xs = [random(dtype, [length], rank) for rank in range(3)]
        results = on_ranks(worlds, lambda w, xs=xs: run_session(sessions[w.rank], xs[w.rank]))
        for y in results:
            assert y.dtype == dtype
            np.testing.assert_array_equal(y, fold(op, xs))


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["f4", "f2"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_reduce_of_any_length(worlds_of: Worlds, ranks: int, name: str) -> None:
    dtype = np.dtype(name)
    worlds = worlds_of(ranks)
    proto = collective("AllReduce", onnx_type(dtype), ["n"])
    sessions = on_ranks(worlds, lambda world: session(world, proto))
    for length in LENGTHS:
        xs = [random(dtype, [length], rank) for rank in range(ranks)]
        for _ in range(2):
            results = on_ranks(worlds, lambda w, xs=xs: run_session(sessions[w.rank], xs[w.rank]))
            for y in results:
                np.testing.assert_array_equal(y, fold("sum", xs))


def run_session(session: object, x: np.ndarray) -> np.ndarray:
    [y] = session.run(["Y"], {"X": x, "t": np.zeros([0], bool)})  # type: ignore[attr-defined]
    return y


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_all_reduce_of_bfloat16_accumulates_in_float32(worlds_of: Worlds, op: str) -> None:
    import ml_dtypes

    worlds = worlds_of(3)
    bfloat16, float32 = TensorProto.BFLOAT16, TensorProto.FLOAT
    proto = model(
        [
            helper.make_node("Cast", ["X"], ["x"], to=bfloat16),
            node("AllReduce", ["x", "t"], ["y", "s"], tag=1, op=op),
            helper.make_node("Cast", ["y"], ["Y"], to=float32),
        ],
        [("X", float32, ["n"])],
        [("Y", float32, ["n"])],
    )
    xs = [random(np.dtype("f4"), [5000], rank).astype(ml_dtypes.bfloat16) for rank in range(3)]
    wide = [x.astype("f4") for x in xs]
    results = on_ranks(worlds, lambda world: run(world, proto, *wide))
    expected = fold(op, wide).astype(ml_dtypes.bfloat16).astype("f4")
    for y in results:
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("name", ["f4", "f2"])
@pytest.mark.parametrize("op", ["sum", "max", "min", "prod"])
def test_special_values(worlds_of: Worlds, name: str, op: str) -> None:
    """Every pair of NaN, infinities, zeros, the largest, and the smallest subnormal number."""
    dtype = np.dtype(name)
    info = np.finfo(dtype)
    special = [np.nan, np.inf, -np.inf, 0, 1, -1, info.max, info.min, info.smallest_subnormal]
    a, b = (side.ravel() for side in np.meshgrid(special, special))
    xs = [a.astype(dtype), b.astype(dtype)]
    proto = collective("AllReduce", onnx_type(dtype), ["n"], op=op)
    results = on_ranks(worlds_of(2), lambda world: run(world, proto, *xs))
    with np.errstate(all="ignore"):
        expected = fold(op, xs)
    np.testing.assert_array_equal(results[0], expected)
    assert results[0].tobytes() == results[1].tobytes()


def test_every_float16_survives(worlds_of: Worlds) -> None:
    every = np.arange(1 << 16, dtype="u2").view("f2")
    zeros = np.full_like(every, -0.0)
    proto = collective("AllReduce", TensorProto.FLOAT16, ["n"])
    [y, _] = on_ranks(worlds_of(2), lambda world: run(world, proto, every, zeros))
    quiet = np.where(np.isnan(every), 0x200, 0).astype("u2")
    assert (y.view("u2") == every.view("u2") | quiet).all()


def test_bits_do_not_depend_on_the_place_in_a_vector(worlds_of: Worlds) -> None:
    """Instructions convert vectors of float16, and plain code converts what is left."""
    bits = np.random.default_rng(0).integers(0, 1 << 16, (2, 2000), dtype="u2")
    left, right = bits.view("f2")
    right[np.isnan(right)] = 1  # of two NaNs, the CPU may keep either
    proto = collective("AllReduce", TensorProto.FLOAT16, ["n"])

    def summed(world: World) -> tuple[bytes, bytes]:
        opened, mine = session(world, proto), (left, right)[world.rank]

        def run(x: np.ndarray) -> bytes:
            return opened.run(["Y"], {"X": x, "t": TOKEN})[0].tobytes()

        return run(mine), b"".join(run(mine[i : i + 1]) for i in range(len(mine)))

    for whole, single in on_ranks(worlds_of(2), summed):
        assert whole == single


def test_all_reduce_of_a_scalar(worlds_of: Worlds) -> None:
    xs = [np.float32(1.5), np.float32(2.25)]
    proto = collective("AllReduce", TensorProto.FLOAT, [])
    results = on_ranks(worlds_of(2), lambda world: run(world, proto, *map(np.asarray, xs)))
    assert [y.shape for y in results] == [(), ()]
    assert results == [3.75, 3.75]


def test_all_reduce_in_place_leaves_other_tensors_alone(worlds_of: Worlds) -> None:
    """onnxruntime may give AllReduce an intermediate's memory; not of one that is used again."""
    n = 300_000
    proto = model(
        [
            helper.make_node("Neg", ["X"], ["a"]),
            node("AllReduce", ["a", "t"], ["b", "t1"], tag=1),
            helper.make_node("Neg", ["b"], ["c"]),
            node("AllReduce", ["c", "t1"], ["d", "t2"], tag=2),
            helper.make_node("Sub", ["d", "c"], ["Y"]),
        ],
        [("X", TensorProto.FLOAT, [n])],
        [("Y", TensorProto.FLOAT, [n])],
    )
    xs = [np.full([n], value, "f4") for value in (1, 2, 3)]
    for y in on_ranks(worlds_of(3), lambda world: run(world, proto, *xs)):
        np.testing.assert_array_equal(y, np.full([n], 3 * 6 - 6, "f4"))


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("sizes", [[2, 2], [3, 0], [4], [1, 5, 0], [2, 1, 1, 3]])
def test_reduce_scatter(worlds_of: Worlds, sizes: list[int], axis: int) -> None:
    shape = [3, 4, 2]
    shape[axis] = sum(sizes)
    xs = [random(np.dtype("f4"), shape, rank) for rank in range(len(sizes))]
    proto = collective("ReduceScatter", TensorProto.FLOAT, [None] * 3, axis=axis, sizes=sizes)
    results = on_ranks(worlds_of(len(sizes)), lambda world: run(world, proto, *xs))
    parts = np.split(fold("sum", xs), np.cumsum(sizes)[:-1], axis)
    for y, part in zip(results, parts, strict=True):
        np.testing.assert_array_equal(y, part)


@pytest.mark.parametrize("name", DTYPES)
def test_reduce_scatter_of_each_type(worlds_of: Worlds, name: str) -> None:
    dtype = np.dtype(name)
    xs = [random(dtype, [2, 30_000], rank) for rank in range(3)]
    sizes = [20_000, 1, 9_999]
    proto = collective(
        "ReduceScatter", onnx_type(dtype), [None, None], axis=1, sizes=sizes, op="max"
    )
    results = on_ranks(worlds_of(3), lambda world: run(world, proto, *xs))
    for y, part in zip(results, np.split(fold("max", xs), [20_000, 20_001], 1), strict=True):
        np.testing.assert_array_equal(y, part)


@pytest.mark.slow
def test_reductions_do_not_depend_on_the_algorithm(worlds_of: Worlds) -> None:
    """Fusing all-reduces, or splitting one into reduce-scatter and all-gather, changes no bit."""
    n = 40_000
    xs = [random(np.dtype("f4"), [n], rank) for rank in range(4)]
    whole = collective("AllReduce", TensorProto.FLOAT, ["n"])
    scatter = collective("ReduceScatter", TensorProto.FLOAT, ["n"], axis=0, sizes=[n // 4] * 4)

    def each(world: World) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rank_sum = run(world, whole, *xs)
        pieces = [run(world, whole, *(x[i : i + 500] for x in xs)) for i in range(0, n, 500)]
        return rank_sum, np.concatenate(pieces), run(world, scatter, *xs)

    for rank, (fused, pieces, part) in enumerate(on_ranks(worlds_of(4), each)):
        assert fused.tobytes() == pieces.tobytes()
        assert fused[rank * n // 4 : (rank + 1) * n // 4].tobytes() == part.tobytes()
