"""What a run tells while it goes on: metrics in files, and a bar."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from pathlib import Path

import pytest

from onnxpar.base.errors import InputError
from onnxpar.cli.training_bar import Bar
from onnxpar.trainer.loop import Record
from onnxpar.trainer.metrics_files import Csv, JsonLines, MetricsFile, TensorBoard, row_of


def record(total: int, **evaluation: float) -> Record:
    epoch, step = divmod(total - 1, 2)
    values = {"loss": 1 / total, "gradient_norm": 0.5}
    return Record(epoch + 1, step + 1, total, 0.1, 0.25, values, evaluation or None)


def write(file: MetricsFile, *records: Record) -> None:
    """As a run does that begins with the first of these steps."""
    file.begin(records[0].total)
    for each in records:
        file.add(row_of(each))
    file.close()


RUNS = (
    [record(1), record(2, loss=0.5, accuracy=0.25), record(3)],
    [record(2, loss=0.25), record(3)],
)
"""The second one resumes from step 1."""
STEPS = [1, 2, 3]
EVALUATED = {2: 0.25}


def test_lines_of_json(tmp_path: Path) -> None:
    for run in RUNS:
        write(JsonLines(tmp_path / "m.jsonl"), *run)
    rows = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == STEPS
    assert {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row} == EVALUATED


def test_comma_separated_values(tmp_path: Path) -> None:
    """Columns appear with the first evaluation; a line that a kill has cut is left out."""
    path = tmp_path / "m.csv"
    write(Csv(path), *RUNS[0])
    first = list(csv.reader(io.StringIO(path.read_text())))
    names = ["epoch", "step", "learning_rate", "loss", "gradient_norm", "seconds"]
    assert first[0] == [*names, "eval_loss", "eval_accuracy"]
    assert first[1] == ["1", "1", "0.1", "1.0", "0.5", "0.25", "", ""]
    path.write_text(path.read_text() + "2,4,0.1")
    write(Csv(path), *RUNS[1])
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    assert [int(row["step"]) for row in rows] == STEPS
    found = {int(row["step"]): float(row["eval_loss"]) for row in rows if row["eval_loss"]}
    assert found == EVALUATED


def test_a_file_that_is_not_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text("name,price\npear,2\n")
    with pytest.raises(InputError, match=r"--csv .*prices\.csv: this file is not of a run"):
        Csv(path).begin(1)
    assert path.read_text() == "name,price\npear,2\n"


def test_event_files(tmp_path: Path) -> None:
    """As TensorBoard reads them: a session's start hides steps that run again."""
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    for run in RUNS:
        write(TensorBoard(tmp_path / "tb"), *run)
    found: dict[str, dict[int, float]] = {}
    for file in sorted((tmp_path / "tb").iterdir(), key=lambda p: p.stat().st_mtime_ns):
        data, at = file.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size  # with two checksums
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                found = {
                    tag: {step: v for step, v in curve.items() if step < event.step}
                    for tag, curve in found.items()
                }
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    assert found["loss"] == {n: pytest.approx(1 / n) for n in STEPS}
    assert found["eval/loss"] == EVALUATED and found["learning_rate"][1] == pytest.approx(0.1)


def test_without_tensorboardx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(InputError, match=r"pip install 'onnxpar\[tensorboard\]'"):
        TensorBoard(tmp_path)


def test_a_loss_that_is_no_number(tmp_path: Path) -> None:
    write(Csv(tmp_path / "m.csv"), record(1, loss=math.nan))
    (row,) = csv.DictReader(io.StringIO((tmp_path / "m.csv").read_text()))
    assert math.isnan(float(row["eval_loss"]))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_counts_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 steps of 8 samples, of which an earlier run has taken 4: they took no time of this."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with Bar(10, 8) as bar:
        bar.show(5, ["a line"], 0.25)
        shown = bar._bar
        assert shown is not None and (shown.n, shown.initial, shown.total) == (40, 32, 80)
        shown.refresh()
        assert "40.0/80.0" in terminal.getvalue() and "sample/s, loss=0.25" in terminal.getvalue()
