"""What a sharded model computes and returns, as processes and as threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import helper
from runtime.bundles import (
    Tensor,
    is_alive,
    k_split,
    pids,
    wait_until,
    weight_of_k_split,
    write_par,
)

from onnxpar.base.errors import RankError
from onnxpar.layout.layout import Concat, Factor, Layout
from onnxpar.layout.mesh import Axis
from onnxpar.runtime.session.session import InferenceSession, Session
from onnxpar.runtime.session.threads import ThreadSession

Open = Callable[..., Session]
RNG = np.random.default_rng(0)
TP, DP = Axis("tp", 2), Axis("dp", 2)


def identity(folder: Path, mesh: str, tensor: Tensor) -> Path:
    """y = x, both in the tensor's layout."""
    y = Tensor("y", tensor.shape, tensor.layout, tensor.dtype)
    x = Tensor("x", tensor.shape, tensor.layout, tensor.dtype)
    return write_par(
        folder, mesh, [x], [y], lambda rank: [helper.make_node("Identity", ["x"], ["y"])]
    )


def test_partial_products_are_reduced(par: Path, x: np.ndarray, open_session: Open) -> None:
    with open_session(par) as session:
        y, d = session.run(None, {"x": x})
    np.testing.assert_allclose(y, x @ weight_of_k_split(), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(d, x + x)


LAYOUTS = [
    ("tp=2", Tensor("x", (5, 6), (None, None))),
    ("tp=2", Tensor("x", (5, 6), ("tp", None))),
    ("tp=2", Tensor("x", (5, 6), (None, "tp"))),
    ("tp=3", Tensor("x", (2, 7), (None, "tp"))),
    ("tp=3", Tensor("x", (2, 2), ("tp", None))),
    ("dp=2,tp=2", Tensor("x", (5, 6), ("tp", None))),
    ("dp=2,tp=2", Tensor("x", (5, 7), ("tp", "dp"))),
    ("dp=2,tp=2", Tensor("x", (9,), Layout((Factor(9, (DP, TP)),)))),
    ("tp=2", Tensor("x", (9,), Layout((Factor(9, (TP,), (2, 7)),)))),
    (
        "tp=2",
        Tensor("x", (2, 9), Layout((Factor(2), Concat((Factor(5, (TP,)), Factor(4, (TP,))))))),
    ),
    ("tp=2", Tensor("x", (0, 3), (None, "tp"))),
    ("tp=2", Tensor("x", (), ())),
]


@pytest.mark.parametrize(("mesh", "tensor"), LAYOUTS)
def test_parts_make_the_whole(mesh: str, tensor: Tensor, tmp_path: Path) -> None:
    par = identity(tmp_path, mesh, tensor)
    value = RNG.standard_normal(tensor.shape).astype(np.float32)
    with ThreadSession(par) as session:
        (y,) = session.run(None, {"x": value})
    np.testing.assert_array_equal(y, value)


@pytest.mark.slow
def test_parts_make_the_whole_across_processes(tmp_path: Path) -> None:
    cases = [(n, t) for n, (m, t) in enumerate(LAYOUTS) if m == "dp=2,tp=2"]
    inputs = [Tensor(f"x{n}", t.shape, t.layout) for n, t in cases]
    outputs = [Tensor(f"y{n}", t.shape, t.layout) for n, t in cases]
    nodes = [helper.make_node("Identity", [f"x{n}"], [f"y{n}"]) for n, _ in cases]
    par = write_par(tmp_path, "dp=2,tp=2", inputs, outputs, lambda rank: nodes)
    feeds = {t.name: RNG.standard_normal(t.shape).astype(np.float32) for t in inputs}
    with InferenceSession(par) as session:
        results = session.run(None, feeds)
    for result, value in zip(results, feeds.values(), strict=True):
        np.testing.assert_array_equal(result, value)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int64", "bool"])
def test_element_types(dtype: str, tmp_path: Path, open_session: Open) -> None:
    par = identity(tmp_path, "tp=2", Tensor("x", (3, 5), (None, "tp"), dtype))
    value = RNG.integers(0, 2, (3, 5)).astype(dtype)
    with open_session(par) as session:
        assert session.get_inputs()[0].type == f"tensor({dtype.replace('float64', 'double')})"
        (y,) = session.run(["y"], {"x": value})
    assert y.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(y, value)


def test_partial_outputs_are_summed(tmp_path: Path, open_session: Open) -> None:
    layout = Layout((Factor(4),), (TP,))
    par = write_par(
        tmp_path,
        "tp=2",
        [Tensor("x", (4,))],
        [Tensor("y", (4,), layout)],
        lambda rank: [helper.make_node("Identity", ["x"], ["y"])],
    )
    with open_session(par) as session:
        (y,) = session.run(None, {"x": np.arange(4, dtype=np.float32)})
    np.testing.assert_array_equal(y, 2 * np.arange(4))


def test_sizes_that_data_decides(tmp_path: Path, open_session: Open) -> None:
    par = write_par(
        tmp_path,
        "tp=2",
        [Tensor("x", (6,))],
        [Tensor("at", None, None, "int64"), Tensor("y", (6,))],
        lambda rank: [
            helper.make_node("NonZero", ["x"], ["at"]),
            helper.make_node("Identity", ["x"], ["y"]),
        ],
    )
    with open_session(par) as session:
        assert session.get_outputs()[0].shape == []
        for count in (2, 0, 6, 3):
            x = (np.arange(6) < count).astype(np.float32)
            at, y = session.run(None, {"x": x})
            np.testing.assert_array_equal(at, np.arange(count)[None])
            np.testing.assert_array_equal(y, x)


def test_an_input_passed_straight_through(tmp_path: Path, open_session: Open) -> None:
    par = write_par(
        tmp_path,
        "tp=2",
        [Tensor("x", (2, 3), (None, "tp"))],
        [Tensor("x", (2, 3), (None, "tp")), Tensor("y", (2, 3), (None, "tp"))],
        lambda rank: [helper.make_node("Neg", ["x"], ["y"])],
    )
    x = RNG.standard_normal((2, 3)).astype(np.float32)
    with open_session(par) as session:
        same, negative = session.run(None, {"x": x})
    np.testing.assert_array_equal(same, x)
    np.testing.assert_array_equal(negative, -x)


def test_many_runs_keep_their_own_results(par: Path, x: np.ndarray, open_session: Open) -> None:
    with open_session(par) as session:
        doubled = [session.run(["d"], {"x": x * k})[0] for k in range(30)]
    for k, d in enumerate(doubled):
        np.testing.assert_array_equal(d, 2 * (x * k))


def test_outputs_in_the_order_asked_for(par: Path, x: np.ndarray, open_session: Open) -> None:
    with open_session(par) as session:
        first, second, third = session.run(["d", "y", "d"], {"x": x})
        (alone,) = session.run(["y"], {"x": x})
    np.testing.assert_array_equal(first, x + x)
    np.testing.assert_array_equal(third, first)
    np.testing.assert_array_equal(second, alone)


def test_feeds_need_not_be_contiguous(par: Path, x: np.ndarray, open_session: Open) -> None:
    with open_session(par) as session:
        (d,) = session.run(["d"], {"x": np.asfortranarray(x)})
        (reverse,) = session.run(["d"], {"x": x[::-1]})
    np.testing.assert_array_equal(d, x + x)
    np.testing.assert_array_equal(reverse, 2 * x[::-1])


def test_arenas_grow(tmp_path: Path) -> None:
    """Whole inputs without a fixed size: each run needs more memory than the one before."""
    par = write_par(
        tmp_path,
        "tp=2",
        [Tensor("x", None), Tensor("z", None)],
        [Tensor("y", None), Tensor("w", None)],
        lambda rank: [
            helper.make_node("Neg", ["x"], ["y"]),
            helper.make_node("Abs", ["z"], ["w"]),
        ],
    )
    with InferenceSession(par) as session:
        for size in (3, 5000, 100_000, 7, 1_000_000):
            x = RNG.standard_normal(size).astype(np.float32)
            z = RNG.standard_normal((2, size)).astype(np.float32)
            y, w = session.run(None, {"x": x, "z": z})
            np.testing.assert_array_equal(y, -x)
            np.testing.assert_array_equal(w, np.abs(z))


def test_ports_are_those_of_the_unsplit_model(par: Path, open_session: Open) -> None:
    with open_session(par) as session:
        inputs = [(a.name, a.type, a.shape) for a in session.get_inputs()]
        outputs = [(a.name, a.type, a.shape) for a in session.get_outputs()]
        assert session.get_providers() == ["CPUExecutionProvider"]
    assert inputs == [("x", "tensor(float)", [4, 7])]
    assert outputs == [("y", "tensor(float)", [4, 3]), ("d", "tensor(float)", [4, 7])]


@pytest.mark.slow
def test_memory_is_reused(par: Path, x: np.ndarray) -> None:
    with InferenceSession(par) as session:
        processes = session._ranks._processes
        sizes = set()
        for _ in range(200):
            session.run(None, {"x": x})
            sizes.add((processes.inputs.size, *(outputs.size for outputs in processes.outputs)))
    assert len(sizes) == 1


def test_threads_take_turns(par: Path, x: np.ndarray) -> None:
    right = []

    def run(k: int) -> None:
        for _ in range(10):
            (d,) = session.run(["d"], {"x": x * k})
            right.append(np.array_equal(d, 2 * (x * k)))

    with InferenceSession(par) as session:
        threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert right == [True] * 40


@pytest.mark.slow
def test_two_sessions_at_once(par: Path, tmp_path: Path, x: np.ndarray) -> None:
    other = k_split(tmp_path / "other.par", ranks=3)
    with InferenceSession(par) as a, InferenceSession(other) as b:
        for _ in range(3):
            np.testing.assert_allclose(
                a.run(["y"], {"x": x})[0], b.run(["y"], {"x": x})[0], rtol=1e-5, atol=1e-5
            )


def test_closed_sessions_say_so(par: Path, x: np.ndarray, open_session: Open) -> None:
    session = open_session(par)
    session.close()
    session.close()
    with pytest.raises(RankError, match=r"closed.*close\(\).*make a new one"):
        session.run(None, {"x": x})


@pytest.mark.slow
def test_a_forgotten_session_ends_its_ranks(par: Path) -> None:
    session = InferenceSession(par)
    ranks = pids(session)
    assert all(map(is_alive, ranks))
    del session
    gc.collect()
    assert wait_until(lambda: not any(map(is_alive, ranks)))


def test_sessions_survive_the_thread_that_made_them(par: Path, x: np.ndarray) -> None:
    made: list[InferenceSession] = []
    thread = threading.Thread(target=lambda: made.append(InferenceSession(par)))
    thread.start()
    thread.join()
    with made.pop() as session:
        (d,) = session.run(["d"], {"x": x})
    np.testing.assert_array_equal(d, x + x)


@pytest.mark.slow
def test_reductions_over_four_ranks(tmp_path: Path, x: np.ndarray) -> None:
    par = k_split(tmp_path / "four.par", ranks=4)
    with InferenceSession(par) as session:
        (y,) = session.run(["y"], {"x": x})
    np.testing.assert_allclose(y, x @ weight_of_k_split(), rtol=1e-5, atol=1e-5)
