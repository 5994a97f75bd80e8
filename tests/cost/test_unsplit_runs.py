"""A plan for this host has the times of runs of the unsplit model here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from small_models import write_text

import onnxpar
from onnxpar.compiler.plan import Plan, Predicted
from onnxpar.cost import unsplit_runs
from onnxpar.cost.host import MEASURED
from onnxpar.cost.topology import Session, Topology
from onnxpar.cost.unsplit_runs import UnsplitRuns, time_unsplit
from onnxpar.planner import timed_plan
from onnxpar.planner.predicted_times import (
    OBJECT_SECONDS,
    VALUE_OF_RANK_SECONDS,
    VALUE_SECONDS,
)
from onnxpar.runtime.session.feeds import InputSpec
from onnxpar.training import grad

MODELS = Path(__file__).parents[2] / "models"
BERT = MODELS / "bert.dynamo.dynamic.onnx"
FOUND = UnsplitRuns(7e-3, 11e-3)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Topology:
    """The topology of a host that was measured; runs of unsplit models take FOUND."""
    found = replace(Topology.default(), origin=MEASURED)
    monkeypatch.setattr(timed_plan, "time_unsplit", lambda *_: FOUND)
    return found


def planned(topology: Topology, path: Path = BERT, devices: int = 2) -> Plan:
    return onnxpar.plan(path, devices=devices, topology=topology)


def test_the_work_of_ranks_takes_as_much_longer_as_a_run() -> None:
    told = Predicted(4.0, 3.0, 6.0, 2.0, on_rank=8.0)
    assert told.timed(1.0, 16.0) == Predicted(8.0, 3.0, 1.0, 2.0, 16.0, is_timed=True)
    unknown = Predicted(4.0, 3.0, 6.0)
    assert unknown.timed(1.0, 16.0).compute == 4.0


def test_a_plan_for_this_host(host: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    timed, other = planned(host).predicted, planned(Topology.default()).predicted
    assert timed is not None and other is not None and not other.is_timed
    assert timed.one_rank == FOUND.alone and timed.is_timed
    assert timed.compute == pytest.approx(other.compute * FOUND.beside / other.on_rank)
    assert timed.communication == other.communication and timed.session == other.session
    assert "unsplit: 7.000 ms (measured)" in str(planned(host))
    assert "(measured)" not in str(planned(Topology.default()))
    monkeypatch.setattr(timed_plan, "MOST_BYTES", 100)
    assert planned(host).predicted == other


def test_it_runs_at_the_typical_sizes(host: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[list[int]] = []

    def time(_: Path, inputs: list[InputSpec], ranges: object, ranks: int, zeros: set[str]) -> None:
        shapes.extend(list(shape) for _, _, shape in inputs)
        assert ranks == 3 and not zeros

    monkeypatch.setattr(timed_plan, "time_unsplit", time)
    made = onnxpar.plan(BERT, devices=3, topology=host, typical="batch=5,seq=7")
    assert shapes == [[5, 7]] * 3 and made.predicted is not None and not made.predicted.is_timed


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_training_step_runs_from_its_first_states(optimizer: str, tmp_path: Path) -> None:
    step = tmp_path / "step.onnx"
    grad(MODELS / "bert.legacy.training.onnx", step, loss="mse", optimizer=optimizer)
    made = planned(replace(Topology.default(), origin=MEASURED), step).predicted
    assert made is not None and made.is_timed and 0 < made.one_rank < 10


def test_runs_are_timed_alone_and_at_once() -> None:
    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = [(name, "int64", (3, 5)) for name in names]
    found = time_unsplit(BERT, inputs, {}, 2)
    assert found is not None and 0 < found.alone < 1 and 0 < found.beside < 1
    assert time_unsplit(BERT, inputs, {}, 2) is found
    assert time_unsplit(BERT, inputs[1:], {}, 2) is None
    assert time_unsplit(MODELS / "README.md", inputs, {}, 2) is None


def test_a_kernel_that_ends_its_process_does_not_end_this_one(tmp_path: Path) -> None:
    """Of random integers, some are 0."""
    path = write_text(
        """<ir_version: 8, opset_import: ["" : 17]>
        m (int32[4] x) => (int32[4] y) { y = Div (x, x) }""",
        tmp_path / "m.onnx",
    )
    assert time_unsplit(path, [("x", "int32", (4,))], {}, 2) is None


def test_a_run_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsplit_runs, "PATIENCE", 0.01)
    inputs = [(name, "int64", (2, 3)) for name in ("input_ids", "attention_mask", "token_type_ids")]
    assert time_unsplit(BERT, inputs, {}, 2) is None


@pytest.mark.parametrize("samples", [1, 500])
def test_strings_and_maps_take_a_session_longer(samples: int, host: Topology) -> None:
    """A ZipMap makes an object of each number, and a label is a text."""
    path = MODELS / "ml" / "forest_classifier.onnx"
    timed = replace(host, session=Session(2e-5, 1e12))
    made = onnxpar.plan(path, devices=2, topology=timed, typical=f"X_0={samples}").predicted
    assert made is not None
    objects = samples * (3 + 1)
    values = 2 * (VALUE_SECONDS + 2 * VALUE_OF_RANK_SECONDS)
    assert made.session == pytest.approx(2e-5 + values + objects * OBJECT_SECONDS, rel=0.01)
    numbers = MODELS / "ml" / "xgboost_regressor.onnx"
    plain = onnxpar.plan(numbers, devices=2, topology=timed).predicted
    assert plain is not None and plain.session == pytest.approx(2e-5, rel=0.01)
