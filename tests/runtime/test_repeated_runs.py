"""A run with the request and the shapes of the run before it sends no message to the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper, save
from runtime.bundles import Tensor, weight_of_k_split, write_par

from onnxpar.api import shard
from onnxpar.base.errors import InputError, RunError
from onnxpar.runtime.ranks.processes import Processes
from onnxpar.runtime.session.session import InferenceSession

pytestmark = pytest.mark.processes


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The calls of sessions that have messages, by name."""
    found: list[str] = []
    call = Processes.call

    def noted(self: Processes, messages: list[object] | None, what: str) -> object:
        if messages is not None:
            found.append(what)
        return call(self, messages, what)

    monkeypatch.setattr(Processes, "call", noted)
    yield found


def test_the_same_again(par: Path, x: np.ndarray, messages: list[str]) -> None:
    with InferenceSession(par) as session:
        for k in range(5):
            y, d = session.run(None, {"x": x * k})
            np.testing.assert_allclose(y, x * k @ weight_of_k_split(), rtol=1e-5, atol=1e-4)
            np.testing.assert_array_equal(d, 2 * (x * k))
        assert messages == ["the start", "run 1"]
        for k in range(3):
            (d,) = session.run(["d"], {"x": x + k})
            np.testing.assert_array_equal(d, 2 * (x + k))
        assert messages == ["the start", "run 1", "run 6"]


def test_other_sizes_between(tmp_path: Path, messages: list[str]) -> None:
    """Each size has its own places for inputs and outputs, so it has a message."""
    graph = helper.make_graph(
        [helper.make_node("Exp", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
    )
    save(helper.make_model(graph), tmp_path / "m.onnx")
    shard(tmp_path / "m.onnx", tmp_path / "m.par", devices=2, preset="data-parallel")
    rng = np.random.default_rng(0)
    with InferenceSession(tmp_path / "m.par") as session:
        for n in (4, 4, 1, 70_000, 1, 1, 4, 4):
            x = rng.standard_normal((n, 3)).astype(np.float32)
            np.testing.assert_allclose(session.run(None, {"x": x})[0], np.exp(x), rtol=1e-6)
    assert messages == ["the start", "run 1", "run 3", "run 4", "run 5", "run 7"]


def test_sizes_that_data_decides(tmp_path: Path, messages: list[str]) -> None:
    par = write_par(
        tmp_path,
        "tp=2",
        [Tensor("x", (6,))],
        [Tensor("at", None, None, "int64")],
        lambda rank: [helper.make_node("NonZero", ["x"], ["at"])],
    )
    with InferenceSession(par) as session:
        for count in (2, 2, 0, 6, 6, 3):
            (at,) = session.run(None, {"x": (np.arange(6) < count).astype(np.float32)})
            np.testing.assert_array_equal(at, np.arange(count)[None])
    assert messages == ["the start", "run 1"]


@pytest.mark.slow
def test_another_dtype_between(par: Path, x: np.ndarray) -> None:
    """Arrays of the same shape, and even of the same bytes, are refused between equal runs."""
    with InferenceSession(par) as session:
        for _ in range(2):
            session.run(None, {"x": x})
        for other in (x.astype(np.float64), x.view(np.int32)):
            with pytest.raises(InputError, match="x"):
                session.run(None, {"x": other})
        y, d = session.run(None, {"x": x})
        np.testing.assert_allclose(y, x @ weight_of_k_split(), rtol=1e-5, atol=1e-4)
        np.testing.assert_array_equal(d, 2 * x)


def test_states_between(tmp_path: Path, messages: list[str]) -> None:
    """s' = s + x: written and read between runs that keep it."""
    split = Tensor("s", (3, 5), (None, "tp"))
    par = write_par(
        tmp_path,
        "tp=2",
        [Tensor("x", (3, 5), (None, "tp")), split],
        [Tensor("t", (3, 5), (None, "tp"))],
        lambda rank: [helper.make_node("Add", ["s", "x"], ["t"])],
        states={"s": "t"},
    )
    x = np.ones((3, 5), np.float32)
    with InferenceSession(par) as session:
        session.run([], {"x": x, "s": x}, keep_states=True)
        for _ in range(3):
            session.run([], {"x": x}, keep_states=True)
        np.testing.assert_array_equal(session.states.read("s"), 5 * x)
        session.states.write("s", 10 * x)
        (t,) = session.run(["t"], {"x": x}, keep_states=True)
        np.testing.assert_array_equal(t, 11 * x)
        (t,) = session.run(["t"], {"x": 2 * x}, keep_states=True)
        np.testing.assert_array_equal(t, 13 * x)
        np.testing.assert_array_equal(session.run(["t"], {"x": x})[0], 14 * x)
        np.testing.assert_array_equal(session.run(["t"], {"x": x})[0], 14 * x)
    runs = [message for message in messages if message.startswith("run")]
    assert runs == ["run 1", "run 2", "run 5", "run 7"]


@pytest.mark.slow
def test_states_of_another_size(tmp_path: Path) -> None:
    """t = s + x: the same feeds again need another request, and without a state they are wrong."""
    graph = helper.make_graph(
        [helper.make_node("Add", ["s", "x"], ["t"])],
        "g",
        [
            helper.make_tensor_value_info("s", TensorProto.FLOAT, ["n", 3]),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3]),
        ],
        [helper.make_tensor_value_info("t", TensorProto.FLOAT, ["n", 3])],
    )
    save(helper.make_model(graph), tmp_path / "m.onnx")
    options = {"preset": "data-parallel", "states": {"s": "t"}}
    shard(tmp_path / "m.onnx", tmp_path / "m.par", devices=2, **options)
    x = np.ones((1, 3), np.float32)
    with InferenceSession(tmp_path / "m.par") as session:
        for n in (4, 6, 5):
            session.states.write("s", np.zeros((n, 3), np.float32))
            for k in range(1, 4):
                (t,) = session.run(["t"], {"x": x}, keep_states=True)
                np.testing.assert_array_equal(t, np.full((n, 3), k))
        session.states.reset()
        with pytest.raises(InputError, match="input 's' is not fed"):
            session.run(["t"], {"x": x}, keep_states=True)


@pytest.mark.matrix
@pytest.mark.parametrize("fetch", [["t"], ["t", "y"], ["y", "t"]])
def test_a_state_that_is_kept_and_returned(tmp_path: Path, fetch: list[str]) -> None:
    """s' = 2 s, y = x + s'."""
    par = write_par(
        tmp_path,
        "tp=2",
        [Tensor("x", (4,), ("tp",)), Tensor("s", (4,), ("tp",))],
        [Tensor("y", (4,), ("tp",)), Tensor("t", (4,), ("tp",))],
        lambda rank: [
            helper.make_node("Add", ["s", "s"], ["t"]),
            helper.make_node("Add", ["x", "t"], ["y"]),
        ],
        states={"s": "t"},
    )
    ones = np.ones(4, np.float32)
    with InferenceSession(par) as session:
        session.states.write("s", ones)
        for k in range(1, 9):
            found = dict(zip(fetch, session.run(fetch, {"x": ones}, keep_states=True), strict=True))
            np.testing.assert_array_equal(found["t"], 2.0**k * ones)
            np.testing.assert_array_equal(found.get("y", found["t"] + 1), (2.0**k + 1) * ones)
        np.testing.assert_array_equal(session.states.read("s"), 2.0**8 * ones)


def looked_up(folder: Path) -> Path:
    """s' = s + table[i], on which a run fails if i is too large; y = 2 s'."""
    return write_par(
        folder,
        "tp=2",
        [Tensor("s", (4,), ("tp",)), Tensor("i", (1,), None, "int64")],
        [Tensor("t", (4,), ("tp",)), Tensor("y", (4,), ("tp",))],
        lambda rank: [
            helper.make_node("Gather", ["table", "i"], ["x"]),
            helper.make_node("Add", ["s", "x"], ["t"]),
            helper.make_node("Add", ["t", "t"], ["y"]),
        ],
        lambda rank: {"table": np.arange(4, dtype=np.float32)},
        states={"s": "t"},
    )


@pytest.mark.slow
@pytest.mark.usefixtures("medium")
def test_states_of_a_run_that_failed(tmp_path: Path) -> None:
    """After any number of runs that kept them, the states are those before the run that failed."""
    par = looked_up(tmp_path)
    with InferenceSession(par) as session:
        for good in range(1, 6):
            session.states.write("s", np.zeros(4, np.float32))
            for k in range(1, good + 1):
                (y,) = session.run(["y"], {"i": np.array([k % 4])}, keep_states=True)
            total = sum(k % 4 for k in range(1, good + 1))
            np.testing.assert_array_equal(y, np.full(4, 2 * total))
            with pytest.raises(RunError):
                session.run(["y"], {"i": np.array([9])}, keep_states=True)
            np.testing.assert_array_equal(session.states.read("s"), np.full(4, total))
            (y,) = session.run(["y"], {"i": np.array([3])}, keep_states=True)
            np.testing.assert_array_equal(y, np.full(4, 2 * (total + 3)))


@pytest.mark.slow
def test_a_state_that_is_read_between(tmp_path: Path) -> None:
    par = looked_up(tmp_path)
    one = {"i": np.array([1])}
    with InferenceSession(par) as session:
        session.states.write("s", np.zeros(4, np.float32))
        for k in range(1, 9):
            keep = session.run(["t"] if k % 3 == 0 else ["y"], one, keep_states=True)
            np.testing.assert_array_equal(keep[0], np.full(4, k if k % 3 == 0 else 2 * k))
            for _ in range(3):
                np.testing.assert_array_equal(session.run(["t"], one)[0], np.full(4, k + 1))
        for _ in range(9, 14):
            session.run([], one, keep_states=True)
        np.testing.assert_array_equal(session.states.read("s"), np.full(4, 13))


@pytest.mark.slow
def test_inputs_of_four_bits(tmp_path: Path) -> None:
    """They are packed for each run."""
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.INT4, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), tmp_path / "m.onnx")
    shard(tmp_path / "m.onnx", tmp_path / "m.par", devices=2)
    with InferenceSession(tmp_path / "m.par") as session:
        for k in range(5):
            x = np.array([k, -k, 1, -8], np.int8)
            (y,) = session.run(None, {"x": x.astype(ml_dtypes.int4)})
            np.testing.assert_array_equal(y, x)


@pytest.mark.slow
@pytest.mark.usefixtures("medium")
def test_after_a_run_that_failed(tmp_path: Path, messages: list[str]) -> None:
    par = write_par(
        tmp_path,
        "tp=2",
        [Tensor("table", (4,)), Tensor("i", (1,), None, "int64")],
        [Tensor("y", (1,))],
        lambda rank: [helper.make_node("Gather", ["table", "i"], ["y"])],
    )
    table = np.arange(4, dtype=np.float32)

    def run(i: int) -> np.ndarray:
        return session.run(None, {"table": table, "i": np.array([i])})[0]

    with InferenceSession(par) as session:
        assert run(1) == 1
        assert run(2) == 2
        for _ in range(2):
            with pytest.raises(RunError):
                run(9)
        assert run(3) == 3
        assert run(0) == 0
    runs = [message for message in messages if message.startswith("run")]
    assert runs == ["run 1", "run 4", "run 5"]


@pytest.mark.slow
def test_texts(tmp_path: Path, messages: list[str]) -> None:
    """Their bytes may have another length each time, so each run has a message."""
    graph = helper.make_graph(
        [helper.make_node("StringConcat", ["x", "x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.STRING, [2])],
        [helper.make_tensor_value_info("y", TensorProto.STRING, [2])],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / "m.onnx")
    shard(tmp_path / "m.onnx", tmp_path / "m.par", devices=2)
    with InferenceSession(tmp_path / "m.par") as session:
        for text in ("ab", "cd", "é", ""):
            (y,) = session.run(None, {"x": np.array([text, "z"], object)})
            assert list(y) == [2 * text, "zz"]
    assert messages[1:] == ["run 1", "run 2", "run 3", "run 4"]


@pytest.mark.slow
def test_a_long_message(tmp_path: Path) -> None:
    """It does not fit in the buffer of a socket."""
    count = 6000
    names = [f"an_input_with_a_long_name_{n:050}" for n in range(count)]
    par = write_par(
        tmp_path,
        "tp=2",
        [Tensor(name, (1,)) for name in names],
        [Tensor("y", (1,))],
        lambda rank: [helper.make_node("Sum", names, ["y"])],
    )
    feeds = {name: np.ones(1, np.float32) for name in names}
    with InferenceSession(par) as session:
        for _ in range(2):
            assert session.run(None, feeds)[0] == count
