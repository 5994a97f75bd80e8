"""Without a topology, costs are those of this host, which is measured once and kept."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import onnx
import onnx.parser
import pytest

import onnxpar
from onnxpar.base.errors import RankError
from onnxpar.cli.command_line import main
from onnxpar.cost import calibration_models as models
from onnxpar.cost import host
from onnxpar.cost.measure import (
    LARGE,
    QUICK,
    CollectiveTime,
    Measurements,
    Work,
    cases,
    group_sizes,
)
from onnxpar.cost.topology import ANY_HOST, CONSTANTS, Topology
from onnxpar.planner.convert_options import options_of
from onnxpar.runtime.ranks.cores import Core

MODEL = Path(__file__).parents[2] / "models" / "gpt2.dynamo.static.onnx"
PLAN = ["plan", str(MODEL), "--devices", "2"]
TALK = tuple(CollectiveTime(*case, 1e-5) for case in cases(2, QUICK))
RATED = {kind: (1e-3,) * len(shapes) for kind, shapes in models.RATED.items()}
COPIES = (1e-5, 1e-4, LARGE / 1e10)
WORK = Work(1e-3, 1e-3, 1e-3, 1e-3, COPIES, 1e-3, 1e-6, (1e-4,) * 5, RATED)
FOUND = Measurements(2, 1, WORK, WORK, ((1, 8192, 8e-5), (2, 8192, 1e-4), (2, 8 << 20, 2e-3)), TALK)


class Fake:
    """Stands for the measurement; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.does: Callable[[], object] = lambda: None

    def __call__(self, *how: object, **more: object) -> Measurements:
        self.calls += 1
        self.does()
        return FOUND


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host of two cores with a cache of its own, which may be measured; the file of its
    topology."""
    two = [Core(0, (0,)), Core(0, (1,))]
    monkeypatch.setattr(host, "own_cores", lambda: two)
    monkeypatch.setattr(host, "_others_seconds", lambda: 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(host.NEVER)
    host._host_topology.cache_clear()
    file = host.place_of(two)
    assert file is not None
    return file


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    monkeypatch.setattr("onnxpar.cost.measure.measure", made)
    return made


def anew() -> Topology | None:
    """The topology as the next process has it."""
    host._host_topology.cache_clear()
    return host.host_topology()


@pytest.mark.slow
def test_a_command_measures_and_the_next_one_reads(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "SECONDS", 0.01)
    assert main(PLAN) == 0
    said = capsys.readouterr()
    assert "costs: measured on this host" in said.out
    assert said.err.startswith("onnxpar: measured this host in ") and said.err.count("\n") == 1
    assert f"kept in {place} (--for-any-host plans without it)" in said.err
    kept = Topology.read(place)
    assert kept.device != Topology.default().device and anew() == kept
    assert main(PLAN) == 0
    again = capsys.readouterr()
    assert not again.err and again.out == said.out


@pytest.mark.slow
def test_what_is_given_is_not_measured(
    place: Path, fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "racks.yaml"
    file.write_text(Topology.default().text())
    assert main([*PLAN, "--topology", str(file)]) == 0
    assert f"costs: {file.name}" in capsys.readouterr().out
    assert main([*PLAN, "--for-any-host"]) == 0
    said = capsys.readouterr().out
    assert f"costs: {ANY_HOST}" in said and "predicted" not in said
    made = onnxpar.plan(MODEL, devices=2, for_any_host=True)
    assert made.costs == ANY_HOST and made.predicted is None
    assert not fake.calls
    assert onnxpar.plan(MODEL, devices=2).costs == host.MEASURED
    assert fake.calls == 1


@pytest.mark.slow
def test_only_what_depends_on_costs_measures(place: Path, fake: Fake, tmp_path: Path) -> None:
    onnxpar.opt(MODEL, "differentiate")
    assert main(["plan", str(tmp_path / "missing.onnx"), "--devices", "2"]) == 2
    assert not fake.calls
    onnxpar.annotate(MODEL, tmp_path / "annotated.onnx", devices=2)
    assert fake.calls == 1


def test_the_memory_of_this_host_counts_as_before(place: Path, fake: Fake) -> None:
    """What was measured is no topology that a user gives, which says what memory ranks have."""
    asked = options_of({"devices": 2})
    assert asked.topology is None and asked.host() is not None


@pytest.mark.parametrize("text", ["", "levels: [", "levels: []\n", "\0", "device: {flops: -1}\n"])
def test_a_damaged_file_is_written_anew(place: Path, fake: Fake, text: str) -> None:
    place.parent.mkdir(parents=True)
    place.write_text(text)
    found = anew()
    assert fake.calls == 1 and found is not None and found == Topology.read(place)
    assert anew() == found and fake.calls == 1


def test_where_nothing_can_be_written(
    place: Path, fake: Fake, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "onnxpar")
    (tmp_path / "cache").write_text("a file")
    assert anew() is not None
    assert "s: not kept: " in caplog.text
    assert host.host_topology() is not None and fake.calls == 1  # a process measures once


def test_without_a_home(place: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert host.place_of([Core(0, (0,))]) is None and anew() is not None


def test_a_failure_leaves_constants(
    place: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RankError("rank 1 failed\nlong story")

    fake.does = fail
    assert main(PLAN) == 0
    said = capsys.readouterr()
    assert said.err == (
        "onnxpar: costs are constants, because this host could not be measured: rank 1 failed\n"
    )
    assert f"costs: {CONSTANTS}" in said.out and not place.exists()


@pytest.mark.parametrize(
    "variables",
    [{"ONNXPAR_RANK": "0", "ONNXPAR_WORLD_SIZE": "1"}, {"RANK": "1", "WORLD_SIZE": "2"}],
)
def test_ranks_of_a_launcher_have_the_same_constants(
    variables: dict[str, str], place: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a file is there: that of another rank's host may differ."""
    assert anew() is not None
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert anew() is None and fake.calls == 1


def test_one_core_is_not_measured(place: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "own_cores", lambda: [Core(0, (0,))])
    assert anew() is None and not fake.calls


def test_of_two_at_once_one_measures(place: Path, fake: Fake) -> None:
    fake.does = lambda: time.sleep(0.3)
    found: list[Topology | None] = []
    each = [Thread(target=lambda: found.append(host.host_topology())) for _ in range(3)]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()
    assert fake.calls == 1 and found == [Topology.read(place)] * 3


def test_a_busy_host_is_measured_again_after_an_hour(
    place: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "onnxpar")
    clock = iter(range(0, 1 << 30, 1 << 20))
    monkeypatch.setattr(host, "_others_seconds", lambda: float(next(clock)))
    assert anew() is not None and not place.exists()
    assert "for an hour, because others keep its cores busy" in caplog.text
    assert anew() is not None and fake.calls == 1
    (busy,) = place.parent.glob("*.busy.yaml")
    os.utime(busy, (0, time.time() - 2 * host.HOUR))
    assert anew() is not None and fake.calls == 2


def test_what_changes_the_result_changes_the_file(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = [Core(0, (0,)), Core(0, (1,))]
    assert host.place_of(cores) == place != host.place_of(cores * 2)
    monkeypatch.setenv("ONNXPAR_TRANSPORT", "gloo")
    assert host.place_of(cores) != place
    assert host.place_of(cores).parent == place.parent  # type: ignore[union-attr]


def test_the_quick_cases_are_some_of_all() -> None:
    assert group_sizes(8, QUICK) == [2, 8] and group_sizes(2, QUICK) == [2]
    assert set(cases(8, QUICK)) < set(cases(8))


def test_a_plan_without_times_names_no_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program of a rank by hand is not planned by costs."""
    text = "m (float[4,4] x) => (float[4,4] y) { y = Relu(x) }"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    onnx.save(model, tmp_path / "rank.onnx")
    assert main(["plan", str(tmp_path / "rank.onnx"), "--preset", "manual", "--devices", "2"]) == 0
    assert "costs:" not in capsys.readouterr().out
