"""States of a training step have first values: nothing need be fed or written before a run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from training.steps import MLP, Array, run_unsplit, shard, write_step

from onnxpar.base.errors import InputError, ModelError, OnnxparError
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.session import Session
from onnxpar.runtime.session.threads import ThreadSession
from onnxpar.runtime.states.state_files import StateFiles

Open = Callable[..., Session]


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_step(MLP, tmp_path_factory.mktemp("step"), optimizer="adam")


@pytest.fixture(scope="module", params=["zero3 2", "data-parallel 2"])
def par(step: Path, request: pytest.FixtureRequest) -> Path:
    return shard(step, request.param)[0]


@pytest.fixture
def batch() -> dict[str, Array]:
    draw = np.random.default_rng(7)
    x = draw.standard_normal((8, 6)).astype(np.float32)
    return {"x": x, "labels": draw.integers(0, 5, 8)}


@pytest.fixture
def feeds(batch: dict[str, Array]) -> dict[str, Array]:
    return {**batch, "learning_rate": np.array(0.1, np.float32)}


def stored(step: Path) -> dict[str, Array]:
    return {
        t.name: numpy_helper.to_array(t)
        for t in onnx.load(step.with_name("model.onnx")).graph.initializer
    }


@pytest.mark.matrix
def test_states_can_be_read_before_a_run(step: Path, par: Path, open_session: Open) -> None:
    """Parameters as the model has them, all else zeros; each of its own type and shape."""
    weights = stored(step)
    with open_session(par) as session:
        assert {*weights} < {*session.states.names}
        for name in session.states.names:
            value = session.states.read(name)
            if name in weights:
                np.testing.assert_array_equal(value, weights[name])
            else:
                of = weights.get(name.split(".")[0], np.zeros((), np.int64))
                assert (value.shape, value.dtype) == (of.shape, of.dtype)
                assert not value.any()


@pytest.mark.matrix
def test_a_run_starts_from_them(
    step: Path, par: Path, feeds: dict[str, Array], batch: dict[str, Array], open_session: Open
) -> None:
    """Also one that keeps nothing, as often as it is asked for; kept ones follow each other."""
    alone, _ = run_unsplit(step, [batch] * 3, [0.1] * 3)
    with open_session(par) as session:
        for _ in range(2):
            loss, w1 = session.run(["loss", "w1.next"], feeds)
            np.testing.assert_allclose(loss, alone[0]["loss"], rtol=1e-5)
            np.testing.assert_allclose(w1, alone[0]["w1.next"], rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(session.states.read("w1"), stored(step)["w1"])
        for results in alone:
            (loss,) = session.run(["loss"], feeds, keep_states=True)
            np.testing.assert_allclose(loss, results["loss"], rtol=1e-5)
        assert int(session.states.read("step")) == 3


@pytest.mark.matrix
def test_a_reset_goes_back_to_them(
    step: Path, par: Path, feeds: dict[str, Array], open_session: Open
) -> None:
    with open_session(par) as session:
        first = [session.run(["loss"], feeds, keep_states=True)[0] for _ in range(3)]
        session.states.reset()
        np.testing.assert_array_equal(session.states.read("w3"), stored(step)["w3"])
        again = [session.run(["loss"], feeds, keep_states=True)[0] for _ in range(3)]
        np.testing.assert_array_equal(first, again)
        assert len({float(loss) for loss in first}) == 3


@pytest.mark.slow
@pytest.mark.matrix
def test_what_is_fed_or_written_comes_before_them(
    step: Path, par: Path, feeds: dict[str, Array], open_session: Open
) -> None:
    weights = {name: np.zeros_like(value) for name, value in stored(step).items()}
    with open_session(par) as session:
        (loss,) = session.run(["loss"], {**feeds, **weights})
        np.testing.assert_allclose(loss, np.log(5), rtol=1e-6)
        assert session.run(["loss"], feeds)[0] != loss
        for name, value in weights.items():
            session.states.write(name, value)
        np.testing.assert_allclose(session.run(["loss"], feeds)[0], np.log(5), rtol=1e-6)
        with pytest.raises(InputError, match=r"'w1' was given float32 \[9, 6\], but expects"):
            session.states.write("w1", weights["w1"].T)


@pytest.mark.slow
@pytest.mark.matrix
def test_they_are_saved_as_they_are(
    step: Path, par: Path, open_session: Open, tmp_path: Path
) -> None:
    """Before any run too."""
    with open_session(par) as session:
        session.states.save(tmp_path)
        values = {n: session.states.read(n) for n in session.states.names}
    bundle = Bundle.load(par)
    layouts = {n: p.layout for n, p in bundle.inputs.items() if p.layout is not None}
    files = StateFiles(tmp_path, bundle.mesh, layouts)
    for name, value in values.items():
        np.testing.assert_array_equal(files.read(name), value)
    with pytest.raises(ModelError, match="has no state 'q'"):
        files.read("q")


def test_a_folder_that_lacks_them_is_refused(
    par: Path, feeds: dict[str, Array], tmp_path: Path
) -> None:
    copy = tmp_path / "copy.par"
    shutil.copytree(par, copy)
    (copy / "rank_0001.states.onnx").unlink()
    with (
        pytest.raises(OnnxparError, match=r"lacks rank_0001\.states\.onnx"),
        ThreadSession(copy) as session,
    ):
        session.run(["loss"], feeds)
