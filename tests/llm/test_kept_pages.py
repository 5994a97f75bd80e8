"""States that runs change in their own memory: cleared, read, written, and left alone by runs that
do not keep them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from committed import MODELS
from sharded import sharded

import onnxpar
from onnxpar.base.errors import InputError, RunError
from onnxpar.runtime.session.session import Session
from onnxpar.runtime.session.threads import ThreadSession

SHAPE = (6, 2, 16, 16)
KEYS = "past_key_values.0.key"
Feeds = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def par() -> Path:
    return sharded(MODELS / "llm" / "llama", devices=2)


@pytest.fixture(params=[pytest.param("processes", marks=pytest.mark.processes), "threads"])
def session(par: Path, request: pytest.FixtureRequest) -> Iterator[Session]:
    kind = onnxpar.InferenceSession if request.param == "processes" else ThreadSession
    with kind(par) as made:
        made.states.clear(dict.fromkeys(made.states.names, SHAPE))
        yield made


def feeds(positions: list[int], pages: list[int]) -> Feeds:
    count = len(positions)
    return {
        "input_ids": np.arange(5, 5 + count)[None],
        "token_rows": np.zeros(count, np.int64),
        "token_positions": np.array(positions),
        "block_table": np.array([pages]),
        "picked_tokens": np.array([count - 1]),
        "asked_tokens": np.zeros((1, 1), np.int64),
        "temperatures": np.ones((1, 1), np.float32),
    }


@pytest.mark.slow
def test_cleared_states_are_zeros(session: Session) -> None:
    keys = session.states.read(KEYS)
    assert keys.shape == SHAPE and not keys.any()


@pytest.mark.slow
def test_runs_write_the_pages_of_their_tokens(session: Session) -> None:
    for turn in range(4):  # the last ones repeat a run without binding anew
        session.run(["logits"], feeds([turn, turn + 16], [4, 1]), keep_states=True)
        keys = session.states.read(KEYS)
        written = keys.any(axis=(1, 3))
        assert written[4].tolist() == written[1].tolist() == [i <= turn for i in range(16)]
        assert not written[[0, 2, 3, 5]].any()


@pytest.mark.slow
def test_runs_that_keep_nothing_change_nothing(session: Session) -> None:
    first = session.run(["logits"], feeds([0, 1], [2]), keep_states=True)
    before = session.states.read(KEYS)
    session.run(["logits"], feeds([0, 1], [3]))
    session.run(["logits", "present.0.key"], feeds([2], [2]))
    np.testing.assert_array_equal(session.states.read(KEYS), before)
    again = session.run(["logits"], feeds([0, 1], [2]), keep_states=True)
    np.testing.assert_array_equal(first[0], again[0])


@pytest.mark.slow
def test_fed_caches_take_the_place_of_kept_ones(session: Session) -> None:
    session.run(["logits"], feeds([0], [2]), keep_states=True)
    kept = {name: session.states.read(name) for name in session.states.names}
    expected = session.run(["logits"], feeds([1], [2]), keep_states=True)
    after = session.states.read(KEYS)
    session.states.clear(dict.fromkeys(session.states.names, (3, *SHAPE[1:])))
    small = {name: array[:3] for name, array in kept.items()}
    found = session.run(["logits"], {**feeds([1], [2]), **small}, keep_states=True)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(session.states.read(KEYS), after[:3])
    session.run(["logits"], {**feeds([1], [2]), **kept}, keep_states=True)  # of another size
    np.testing.assert_array_equal(session.states.read(KEYS), after)
    session.states.clear(dict.fromkeys(session.states.names, (3, *SHAPE[1:])))
    session.states.write(KEYS, np.ones((3, *SHAPE[1:]), "f4"))
    session.run(["logits"], feeds([0], [0]), keep_states=True)
    assert (session.states.read(KEYS)[1:] == 1).all()


@pytest.mark.slow
def test_a_run_that_fails_can_be_repeated(session: Session) -> None:
    session.run(["logits"], feeds([0, 1], [2]), keep_states=True)
    before = session.states.read(KEYS)
    with pytest.raises(RunError, match="block_table names page 77"):
        session.run(["logits"], feeds([2], [77]), keep_states=True)
    np.testing.assert_array_equal(session.states.read(KEYS), before)
    session.run(["logits"], feeds([2], [2]), keep_states=True)
    assert session.states.read(KEYS)[2, :, 2].any()


def test_wrong_shapes_and_names_are_refused(session: Session) -> None:
    with pytest.raises(InputError, match=rf"{KEYS}.*cannot have shape \[6, 2, 16, 8\]"):
        session.states.clear({KEYS: (6, 2, 16, 8)})
    with pytest.raises(InputError, match="'other'"):
        session.states.clear({"other": SHAPE})
    assert not session.states.read(KEYS).any()
