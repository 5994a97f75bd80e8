"""State pairs stay on their ranks between runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import helper
from runtime.bundles import Tensor, write_par

from onnxpar.base.errors import InputError, RankError
from onnxpar.layout.layout import Factor, Layout
from onnxpar.layout.mesh import Axis
from onnxpar.runtime.session.session import Session

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


@pytest.mark.matrix
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


@pytest.mark.matrix
def test_fed_states_replace_kept_ones(
    counter: Path, feeds: dict[str, np.ndarray], open_session: Open
) -> None:
    with open_session(counter) as session:
        session.run(None, feeds, keep_states=True)
        session.run(None, {"x": feeds["x"]}, keep_states=True)
        (y,) = session.run(["y"], feeds, keep_states=True)
    np.testing.assert_array_equal(y, np.full(SHAPE, 2))


@pytest.mark.matrix
def test_named_states_are_kept_and_returned(
    counter: Path, feeds: dict[str, np.ndarray], open_session: Open
) -> None:
    with open_session(counter) as session:
        session.run(None, feeds, keep_states=True)
        s, y = session.run(["s_next", "y"], {"x": feeds["x"]}, keep_states=True)
        np.testing.assert_array_equal(s.astype(np.float32), np.full(SHAPE, 2))
        np.testing.assert_array_equal(session.states.read("s"), s)
    np.testing.assert_array_equal(y, np.full(SHAPE, 4))


@pytest.mark.matrix
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


@pytest.mark.matrix
def test_states_can_be_written_and_reset(
    counter: Path, feeds: dict[str, np.ndarray], open_session: Open
) -> None:
    start = np.arange(15).reshape(SHAPE).astype(feeds["s"].dtype)
    with open_session(counter) as session:
        assert session.states.names == ["s", "c"]
        session.states.write("s", start)
        assert repr(session.states) == "<States: s [3, 5], c not kept>"
        session.states.write("c", feeds["c"])
        np.testing.assert_array_equal(session.states.read("s"), start)
        (y,) = session.run(["y"], {"x": feeds["x"]}, keep_states=True)
        np.testing.assert_array_equal(y, 2 * (start.astype(np.float32) + 1))
        session.states.reset()
        with pytest.raises(InputError, match="no value of state 's' is kept"):
            session.states.read("s")
        with pytest.raises(InputError, match="'c' is not fed"):
            session.run(None, {"x": feeds["x"]}, keep_states=True)


@pytest.mark.matrix
def test_what_is_no_state(counter: Path, feeds: dict[str, np.ndarray], open_session: Open) -> None:
    with open_session(counter) as session:
        with pytest.raises(InputError, match="no state is named 'x'; the states are s, c"):
            session.states.read("x")
        with pytest.raises(InputError, match=r"'s' was given \w+ \[2\], but expects \w+ \[3, 5\]"):
            session.states.write("s", np.zeros(2, feeds["s"].dtype))


@pytest.mark.slow
def test_a_kept_state_of_another_shape_than_its_layout_says(
    tmp_path: Path, open_session: Open
) -> None:
    """Nobody fetches it, so that no rank hands it to onnxruntime's check of bound memory."""
    par = write_par(
        tmp_path / "model.par",
        "tp=2",
        [Tensor("s", SHAPE, (None, "tp"))],
        [Tensor("y", SHAPE, (None, "tp")), Tensor("s_next", SHAPE, (None, "tp"))],
        lambda rank: [
            helper.make_node("Neg", ["s"], ["y"]),
            helper.make_node("Concat", ["s", "s"], ["s_next"], axis=1 - rank),
        ],
        states={"s": "s_next"},
    )
    with (
        open_session(par) as session,
        pytest.raises(
            RankError, match=r"'s_next' has the shape \[\d, \d\] on rank [01]; its layout"
        ),
    ):
        session.run(["y"], {"s": np.zeros(SHAPE, np.float32)}, keep_states=True)


def test_a_state_that_grows_out_of_its_input(tmp_path: Path, open_session: Open) -> None:
    """The model takes 5 columns, and a run leaves 6: the next one is refused, and the session goes
    on."""
    wide = (SHAPE[0], SHAPE[1] + 1)
    par = write_par(
        tmp_path / "model.par",
        "tp=3",
        [Tensor("s", SHAPE, ("tp", None))],
        [Tensor("s_next", wide, ("tp", None))],
        lambda rank: [
            helper.make_node("Pad", ["s", "pads"], ["s_next"]),
        ],
        lambda rank: {"pads": np.array([0, 0, 0, 1])},
        states={"s": "s_next"},
    )
    s = np.ones(SHAPE, np.float32)
    with open_session(par) as session:
        session.run([], {"s": s}, keep_states=True)
        for call in (lambda: session.run(["s_next"], {}), lambda: session.states.read("s")):
            with pytest.raises(InputError, match=r"'s' is \[3, 6\] after the last run"):
                call()
        (found,) = session.run(["s_next"], {"s": s})
        np.testing.assert_array_equal(found, np.pad(s, ((0, 0), (0, 1))))


def test_sizes_that_data_decides_are_those_of_the_parts(tmp_path: Path, open_session: Open) -> None:
    """Rows of x that are not zero: how many no shape says, while columns are split."""
    rows = Layout((Factor(-1), Factor(5, (Axis("tp", 2),))))
    par = write_par(
        tmp_path / "model.par",
        "tp=2",
        [Tensor("x", SHAPE, (None, "tp")), Tensor("rows", (3,), None, "bool")],
        [Tensor("kept", (None, 5), rows)],
        lambda rank: [helper.make_node("Compress", ["x", "rows"], ["kept"], axis=0)],
    )
    x = np.arange(15, dtype=np.float32).reshape(SHAPE)
    with open_session(par) as session:
        for chosen in ([0, 2], [], [0, 1, 2]):
            some = np.isin(np.arange(3), chosen)
            (found,) = session.run(None, {"x": x, "rows": some})
            np.testing.assert_array_equal(found, x[some])


@pytest.mark.matrix
@pytest.mark.usefixtures("medium")
def test_ranks_that_disagree_on_a_size_that_data_decides(
    tmp_path: Path, open_session: Open
) -> None:
    rows = Layout((Factor(-1), Factor(5, (Axis("tp", 2),))))
    par = write_par(
        tmp_path / "model.par",
        "tp=2",
        [Tensor("x", SHAPE, (None, "tp"))],
        [Tensor("kept", (None, 5), rows)],
        lambda rank: [helper.make_node("Compress", ["x", "rows"], ["kept"], axis=0)],
        lambda rank: {"rows": np.array([True, bool(rank), True])},
    )
    with open_session(par) as session, pytest.raises(RankError, match="on rank 0, but 3 on rank 1"):
        session.run(None, {"x": np.ones(SHAPE, np.float32)})
