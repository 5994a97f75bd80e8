"""State pairs stay on their ranks between runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import helper
from runtime.bundles import Tensor, write_par

from onnxpar.errors import InputError
from onnxpar.runtime.session import Session

Open = Callable[..., Session]
SHAPE = (3, 5)


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def counter(tmp_path: Path, dtype: str) -> Path:
    """s' = s + x and y = 2 s', with s split, and c' = c, which passes straight through."""
    split, kind = (None, "tp"), "float32"
    cast = {"float32": 1, "bfloat16": 16}[dtype]
    return write_par(
        tmp_path / "model.par",
        "tp=2",
        [Tensor("c", (2,)), Tensor("x", SHAPE, split, kind), Tensor("s", SHAPE, split, dtype)],
        [
            Tensor("y", SHAPE, split, kind),
            Tensor("s_next", SHAPE, split, dtype),
            Tensor("c", (2,)),
        ],
        lambda rank: [
            helper.make_node("Cast", ["s"], ["f"], to=1),
            helper.make_node("Add", ["f", "x"], ["sum"]),
            helper.make_node("Cast", ["sum"], ["s_next"], to=cast),
            helper.make_node("Add", ["sum", "sum"], ["y"]),
        ],
        states={"s": "s_next", "c": "c"},
    )


@pytest.fixture
def feeds(dtype: str) -> dict[str, np.ndarray]:
    return {
        "x": np.ones(SHAPE, np.float32),
        "s": np.zeros(SHAPE, dtype),
        "c": np.array([3, 4], np.float32),
    }


def test_kept_states_are_the_next_inputs(
    counter: Path, feeds: dict[str, np.ndarray], open_session: Open
) -> None:
    with open_session(counter) as session:
        (y,) = session.run(None, feeds, keep_states=True)
        np.testing.assert_array_equal(y, np.full(SHAPE, 2))
        for k in range(2, 6):
            (y,) = session.run(["y"], {"x": feeds["x"]}, keep_states=True)
            np.testing.assert_array_equal(y, np.full(SHAPE, 2 * k))
        s = session.states.read("s")
        assert s.dtype == feeds["s"].dtype
        np.testing.assert_array_equal(s.astype(np.float32), np.full(SHAPE, 5))
        # Another run's inputs stand where the passed-through state once did.
        np.testing.assert_array_equal(session.states.read("c"), [3, 4])


def test_fed_states_replace_kept_ones(
    counter: Path, feeds: dict[str, np.ndarray], open_session: Open
) -> None:
    with open_session(counter) as session:
        session.run(None, feeds, keep_states=True)
        session.run(None, {"x": feeds["x"]}, keep_states=True)
        (y,) = session.run(["y"], feeds, keep_states=True)
    np.testing.assert_array_equal(y, np.full(SHAPE, 2))


def test_named_states_are_kept_and_returned(
    counter: Path, feeds: dict[str, np.ndarray], open_session: Open
) -> None:
    with open_session(counter) as session:
        session.run(None, feeds, keep_states=True)
        s, y = session.run(["s_next", "y"], {"x": feeds["x"]}, keep_states=True)
        np.testing.assert_array_equal(s.astype(np.float32), np.full(SHAPE, 2))
        np.testing.assert_array_equal(session.states.read("s"), s)
    np.testing.assert_array_equal(y, np.full(SHAPE, 4))


def test_a_run_that_keeps_nothing_changes_nothing(
    counter: Path, feeds: dict[str, np.ndarray], open_session: Open
) -> None:
    with open_session(counter) as session:
        assert len(session.run(None, feeds)) == 3
        with pytest.raises(InputError, match="'c' is not fed"):
            session.run(None, {"x": feeds["x"]})
        session.run(None, feeds, keep_states=True)
        for _ in range(2):
            y, s, c = session.run(None, {"x": feeds["x"]})
            np.testing.assert_array_equal(y, np.full(SHAPE, 4))
            np.testing.assert_array_equal(s.astype(np.float32), np.full(SHAPE, 2))
            np.testing.assert_array_equal(c, feeds["c"])


def test_states_can_be_written_and_reset(
    counter: Path, feeds: dict[str, np.ndarray], open_session: Open
) -> None:
    start = np.arange(15).reshape(SHAPE).astype(feeds["s"].dtype)
    with open_session(counter) as session:
        assert session.states.names == ["s", "c"]
        session.states.write("s", start)
        session.states.write("c", feeds["c"])
        np.testing.assert_array_equal(session.states.read("s"), start)
        (y,) = session.run(["y"], {"x": feeds["x"]}, keep_states=True)
        np.testing.assert_array_equal(y, 2 * (start.astype(np.float32) + 1))
        session.states.reset()
        with pytest.raises(InputError, match="no value of state 's' is kept"):
            session.states.read("s")
        with pytest.raises(InputError, match="'c' is not fed"):
            session.run(None, {"x": feeds["x"]}, keep_states=True)


def test_what_is_no_state(counter: Path, feeds: dict[str, np.ndarray], open_session: Open) -> None:
    with open_session(counter) as session:
        with pytest.raises(InputError, match="no state is named 'x'; the states are s, c"):
            session.states.read("x")
        with pytest.raises(InputError, match=r"'s' was given \w+ \[2\], expects \w+ \[3, 5\]"):
            session.states.write("s", np.zeros(2, feeds["s"].dtype))
