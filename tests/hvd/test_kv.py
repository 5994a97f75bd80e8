"""The key-value store: what MXNet's documentation shows, and what NumPy makes of all pushes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxpar import hvd
from onnxpar.base.errors import InputError, RankError
from onnxpar.hvd import kv

Array = np.ndarray


def draw(seed: list[int], *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


def test_the_examples_of_the_documentation() -> None:
    """Of `mxnet.kvstore.KVStore`, on one worker."""

    def body() -> None:
        shape, a = (2, 3), np.zeros((2, 3))
        store = kv.create("local")
        assert (store.type, store.rank, store.num_workers) == ("local", 0, 1)
        store.init("3", np.ones(shape) * 2)
        store.pull("3", out=a)
        assert (a == 2).all()
        store.push("3", np.ones(shape) * 8)
        store.pull("3", out=a)
        assert (a == 8).all()
        store.push("3", [np.ones(shape) for _ in range(4)])
        store.pull("3", out=a)
        assert (a == 4).all()
        keys = ["5", "7", "9"]
        store.init(keys, [np.ones(shape)] * 3)
        b = [np.zeros(shape) for _ in keys]
        store.push(keys, [np.ones(shape) * i for i in range(3)])
        store.pull(keys, out=b)
        assert [float(each[0, 0]) for each in b] == [0, 1, 2]
        devices = [[np.zeros(shape), np.zeros(shape)] for _ in keys]
        store.push(keys, [[np.ones(shape)] * 4] * 3)
        store.pull(keys, out=devices)
        assert all((each == 4).all() for pair in devices for each in pair)
        store.pushpull("3", np.ones(shape) * 5, out=a)
        assert (a == 5).all()
        store.broadcast("11", np.ones(shape) * 6, out=a)
        assert (a == 6).all()

        def update(key: Any, pushed: Array, stored: Array) -> None:
            stored += pushed * 2

        store._set_updater(update)
        store.pull("3", out=a)
        assert (a == 5).all()
        store.push("3", np.ones(shape))
        store.pull("3", out=a)
        assert (a == 7).all()

    hvd.run_on_threads(body, 1)


SHAPES = {"a": (4, 3), 7: (2,), "c": (), "d": (5, 2, 2), "e": (0, 2)}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype,bound", [("f8", 1e-14), ("f4", 1e-6)])
def test_pushes_are_added_over_the_ranks(ranks: int, dtype: str, bound: float) -> None:
    keys = list(SHAPES)

    def pushed(step: int, rank: int) -> list[Array]:
        return [np.asarray(draw([step, rank], *s), dtype) for s in SHAPES.values()]

    def body() -> None:
        store = kv.create("dist_sync")
        assert (store.rank, store.num_workers) == (hvd.rank(), ranks)
        store.init(keys, pushed(9, hvd.rank()))  # that of rank 0 counts
        for one, other in zip(store.pull(keys), pushed(9, 0), strict=True):
            np.testing.assert_array_equal(one, other)
        for step in range(2):
            store.push(keys, pushed(step, hvd.rank()))
            every = [pushed(step, rank) for rank in range(ranks)]
            for index, found in enumerate(store.pull(keys)):
                expected = np.sum([each[index] for each in every], axis=0)
                assert found.dtype == dtype
                np.testing.assert_allclose(found, expected, rtol=bound, atol=bound)
        np.testing.assert_array_equal(store.pull("a"), store.pull(keys)[0])
        held = hvd.allgather_object([str(key) for key in store._values])
        assert sorted(key for each in held for key in each) == sorted(map(str, keys))
        if ranks == 2:
            assert held == [["a", "e"], ["7", "c", "d"]]  # each to the rank with fewest bytes

    hvd.run_on_threads(body, ranks)


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_optimizer_on_the_store_is_one_process_with_the_sum(ranks: int) -> None:
    shapes = {"w": (6, 2), "b": (2,)}
    expected = {n: draw([0], *s) for n, s in shapes.items()}
    alone = hvd.Adam(0.1)
    for step in range(4):
        sums = {n: sum(draw([1 + step, r], *s) for r in range(ranks)) for n, s in shapes.items()}
        alone.step(expected, sums)

    def body() -> dict[str, Array]:
        store = kv.create("dist_sync")
        params = {n: draw([hvd.rank()], *s) for n, s in shapes.items()}
        store.init(list(params), list(params.values()))
        store.pull(list(params), out=list(params.values()))
        store.set_optimizer(hvd.Adam(0.1 if hvd.rank() == 0 else 7.0))  # that of rank 0 counts
        for step in range(4):
            for name in params:
                store.push(name, draw([1 + step, hvd.rank()], *shapes[name]))
            store.pull(list(params), out=list(params.values()))
        return params

    for params in hvd.run_on_threads(body, ranks):
        for name in shapes:
            np.testing.assert_allclose(params[name], expected[name], rtol=1e-12)


def test_rows_of_a_table() -> None:
    table = draw([5], 8, 3)

    def body() -> None:
        rank = hvd.rank()
        store = kv.create("dist_sync")
        store.init(["x", "t"], [np.zeros(1), table])
        wanted = [6, 1, 6] if rank else [0]
        rows = store.row_sparse_pull("t", row_ids=np.array(wanted))
        assert rows.indices.tolist() == sorted(set(wanted)) and rows.dense_shape == (8, 3)
        np.testing.assert_array_equal(rows.values, table[sorted(set(wanted))])
        out = np.ones((8, 3))
        store.row_sparse_pull("t", out=out, row_ids=wanted)
        np.testing.assert_array_equal(out, rows.dense())
        store.set_optimizer(hvd.SGD(0.5))
        values = draw([6, rank], 2, 3)
        store.push("t", hvd.IndexedSlices(values, np.array([rank, 4])))
        expected = table.copy()
        for r in range(2):
            np.subtract.at(expected, [r, 4], 0.5 * draw([6, r], 2, 3))
        np.testing.assert_allclose(store.pull("t"), expected, rtol=1e-14)
        both = store.row_sparse_pull(["t", "t"], row_ids=[np.array([4]), np.array([], np.int64)])
        assert [len(each.values) for each in both] == [1, 0]

    hvd.run_on_threads(body, 2)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_two_bit_compression(ranks: int) -> None:
    """By MXNet's formula: what reaches the threshold is sent as it, and the rest is kept."""
    threshold, shapes = 0.5, {"w": (5, 3), "b": (2,)}
    kept = {(n, r): np.zeros(s) for n, s in shapes.items() for r in range(ranks)}
    expected = {n: np.zeros(s) for n, s in shapes.items()}
    trajectory = []
    for step in range(50):
        for name, shape in shapes.items():
            for rank in range(ranks):
                total = kept[name, rank] + 0.4 * draw([step, rank], *shape)
                sent = np.where(total >= threshold, threshold, 0.0)
                sent = np.where(total <= -threshold, -threshold, sent)
                kept[name, rank] = total - sent
                expected[name] = expected[name] - 0.1 * sent
        trajectory.append(dict(expected))

    def body() -> list[dict[str, Array]]:
        store = kv.create("dist_sync")
        store.init(list(shapes), [np.zeros(s) for s in shapes.values()])
        store.set_optimizer(hvd.SGD(0.1))
        store.set_gradient_compression({"type": "2bit", "threshold": threshold})
        found = []
        for step in range(50):
            grads = [0.4 * draw([step, hvd.rank()], *s) for s in shapes.values()]
            store.push(list(shapes), grads)
            found.append(dict(zip(shapes, store.pull(list(shapes)), strict=True)))
        return found

    for found in hvd.run_on_threads(body, ranks):
        for step, (mine, theirs) in enumerate(zip(found, trajectory, strict=True)):
            for name in shapes:
                np.testing.assert_allclose(mine[name], theirs[name], atol=1e-12, err_msg=str(step))


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_stores_of_ranks_with_cycles(kind: str) -> None:
    def body() -> float:
        hvd.init(cycle_time_ms=1)
        store = kv.create(kind)
        for step in range(1 + (kind == "local") * hvd.rank()):
            store.init(f"w{step}", np.zeros(2))
            store.push(f"w{step}", np.full(2, 1.0 + hvd.rank()))
        hvd.barrier()
        return float(store.pull("w0")[0])

    expected = {"local": [1.0, 2.0], "dist_sync": [3.0, 3.0]}[kind]
    assert hvd.run_on_threads(body, 2) == expected


def rows(indices: list[Any]) -> hvd.IndexedSlices:
    return hvd.IndexedSlices(np.ones((1, 2)), np.array(indices))


def test_what_is_refused() -> None:
    def body() -> None:
        store = kv.create("dist_device_sync")
        store.init("w", np.zeros((2, 2)))
        for call, message in [
            (lambda: kv.create("dist_async"), "stores without servers are synchronous"),
            (lambda: store.init("w", np.zeros(2)), "init: the key 'w' exists already"),
            (lambda: store.push("v", np.zeros(2)), "push: there is no key 'v'; call init first"),
            (lambda: store.pull("v"), "pull: there is no key 'v'"),
            (lambda: store.push("w", np.zeros(2)), r"is float64\[2\], but that of the key is"),
            (lambda: store.push(["w", "w"], [np.zeros((2, 2))] * 2), "a key is there twice"),
            (lambda: store.push(["w"], []), "push: 0 values for 1 keys"),
            (lambda: store.pull("w", out=np.zeros(3)), r"out has shape \[3\], the value \[2, 2\]"),
            (lambda: store.row_sparse_pull("w"), "row_sparse_pull needs row_ids"),
            (lambda: store.row_sparse_pull("w", row_ids=[2]), "row_ids must be from 0 to 1"),
            (lambda: store.push("w", rows([2])), "push 'w': indices must be from 0 to 1"),
            (lambda: store.push("w", rows([-1])), "push 'w': indices must be from 0 to 1"),
            (lambda: store.push("w", rows([[0]])), "do not number the rows of values"),
            (lambda: store.set_gradient_compression({"type": "1bit"}), "give type '2bit' or"),
            (lambda: store.set_gradient_compression({"type": "2bit", "x": 1}), "give type"),
        ]:
            with pytest.raises(InputError, match=message):
                call()
        store.barrier()
        assert store.pull("w").tolist() == [[0.0, 0.0]] * 2

    hvd.run_on_threads(body, 2)


@pytest.mark.usefixtures("medium")
def test_ranks_that_push_different_keys() -> None:
    def body() -> str:
        store = kv.create("dist_sync")
        store.init(["a", "b"], [np.zeros(2), np.zeros(2)])
        with pytest.raises(RankError, match="disagree") as raised:
            store.push("ab"[hvd.rank()], np.ones(2))
        return str(raised.value)

    for message in hvd.run_on_threads(body, 2, timeout=20):
        assert "push ['a']" in message and "push ['b']" in message
