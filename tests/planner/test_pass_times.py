"""Wall times of passes: what is timed, by a clock that the test sets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from small_models import HEAD, write_text

import onnxpar
from onnxpar.base import pass_times
from onnxpar.base.errors import ModelError
from onnxpar.base.pass_times import OTHER, PassTimes
from onnxpar.cli.command_line import main
from onnxpar.load.load import AS_WRITTEN, NORMALIZING
from onnxpar.planner.default_passes import DEFAULT_PASSES

MODELS = Path(__file__).parents[2] / "models"
MLP = """m (float[8,16] x, float[16,32] w1, float[32,16] w2) => (float[8,16] y)
{ h = MatMul(x, w1)  r = Relu(h)  y = MatMul(r, w2) }"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_text(HEAD + MLP, tmp_path / "m.onnx")


def test_time_inside_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(pass_times, "time", clock)
    times = PassTimes()
    with pytest.raises(ModelError), times.of(OTHER):
        clock.now += 1
        for _ in range(2):
            with times.of("outer"):
                clock.now += 10
                with times.of("inner"):
                    clock.now += 100
        with times.of("outer"):
            clock.now += 1000
            raise ModelError("")
    found = {name: (row.runs, row.seconds) for name, row in times.rows.items()}
    assert found == {OTHER: (1, 1), "outer": (3, 1020), "inner": (2, 200)}
    assert times.seconds == clock.now
    assert str(times).splitlines() == [
        "pass   runs   seconds  share",
        "outer     3  1020.000    84%",
        "inner     2   200.000    16%",
        "other           1.000     0%",
        "total        1221.000   100%",
    ]


def test_each_pass_of_shard_is_timed(model: Path, tmp_path: Path) -> None:
    times = onnxpar.PassTimes()
    how = {"devices": 2, "check_layouts": True, "dump": tmp_path / "dump", "time_passes": times}
    onnxpar.shard(model, tmp_path / "m.par", **how)  # type: ignore[arg-type]
    runs = {name: row.runs for name, row in times.rows.items()}
    passes = [each.name for each in DEFAULT_PASSES]
    once = ["load", "analyse", "search", *passes, "split-ranks", "write plan.json"]
    assert {name: runs.pop(name) for name in once} == dict.fromkeys(once, 1)
    assert runs.pop("check layouts") == runs.pop("dump") == len(passes)
    rewrites = {rewrite.name for rewrite in (*AS_WRITTEN, *NORMALIZING)}
    assert runs.keys() - rewrites == {"summarize", OTHER}
    assert {"inline-functions", "infer-shapes"} <= runs.keys()
    assert all(row.seconds >= 0 for row in times.rows.values())


def test_a_limit_on_memory_that_a_plan_keeps_to_repeats_no_pass(model: Path) -> None:
    times = onnxpar.PassTimes()
    onnxpar.plan(model, devices=2, memory_limit="4kB", time_passes=times)
    assert times.rows["propagate-layouts"].runs == 1 and times.rows["search"].runs >= 1


def test_open_sizes_have_rows_of_their_own() -> None:
    times = onnxpar.PassTimes()
    path = MODELS / "dlrm.dynamo.dynamic.onnx"
    onnxpar.plan(path, devices=2, preset="data-parallel", time_passes=times)
    for name in ("repeat at other sizes", "predict at typical sizes"):
        assert times.rows[name].runs == 1
    assert "search" not in times.rows


def test_commands_print_the_table_to_stderr(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(model), "--devices", "2"]
    calls = {
        "propagate-layouts": ["opt", *given, "--passes", "propagate-layouts"],
        "search": ["plan", *given, "--json"],
        "split-ranks": ["shard", *given, "-o", str(tmp_path / "m.par")],
        "analyse": ["plan", *given, "--costs", "*"],
    }
    for name, args in calls.items():
        assert main(args) == 0
        plain = capsys.readouterr()
        assert "seconds" not in plain.err
        assert main([*args, "--time-passes"]) == 0
        timed = capsys.readouterr()
        assert timed.out == plain.out
        first, *rows, last = timed.err.splitlines()
        assert first.split() == ["pass", "runs", "seconds", "share"]
        assert last.split()[0] == "total" and last.split()[-1] == "100%"
        assert any(row.startswith(f"{name} ") for row in rows)


def test_a_command_that_fails_prints_what_ran(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["plan", str(model), "--devices", "2", "--strategy", str(model.parent / "s.yaml")]
    (model.parent / "s.yaml").write_text("shard: {nope: {m: tp}}")
    assert main([*args, "--mesh", "tp=2", "--time-passes"]) == 2
    error = capsys.readouterr().err
    assert "load" in error and "annotate-strategy" in error and "'nope' matches no node" in error
    assert main(["plan", str(model), "--time-passes", "--mesh", "tp=2", "--devices", "3"]) == 2
