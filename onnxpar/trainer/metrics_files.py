"""The files to which a run writes the metrics of each step, while it goes on: lines of JSON, CSV,
or TensorBoard's event files."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from onnxpar.base.errors import InputError
from onnxpar.base.json_text import json_text
from onnxpar.base.write_file import whole_file, writing

if TYPE_CHECKING:
    from onnxpar.trainer.loop import Record

METRICS = "metrics.jsonl"
"""The name of the file in the folder of logs."""
Row = Mapping[str, float]
"""The metrics of a step, by name."""


class MetricsFile(Protocol):
    """A file or folder to which a run adds the metrics of each step."""

    def begin(self, first: int) -> None:
        """Prepares the file when a run begins or resumes: removes step `first` and later steps,
        which run again. Errors: OnnxparError."""

    def add(self, row: Row) -> None:
        """Adds the metrics of a step. Errors: OnnxparError."""

    def close(self) -> None:
        """Writes what is still in memory."""


def row_of(record: Record) -> dict[str, float]:
    """Returns the metrics of a step by name. The names of an evaluation's metrics begin with
    eval_."""
    row: dict[str, float] = {
        "epoch": record.epoch,
        "step": record.total,
        "learning_rate": record.rate,
    }
    for name, value in (record.evaluation or {}).items():
        row[f"eval_{name}"] = value
    return {**row, **record.values, "seconds": round(record.seconds, 6)}


class JsonLines:
    """A file with a line of JSON for each step."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, first: int) -> None:
        """Removes the lines of step `first` and later ones."""
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] < first]
        with whole_file(self._path) as sink:
            sink.writelines(f"{line}\n" for line in kept)

    def add(self, row: Row) -> None:
        """Adds a line with the metrics of a step."""
        with writing(self._path), self._path.open("a", encoding="utf-8") as sink:
            sink.write(f"{json_text(dict(row))}\n")

    def close(self) -> None:
        """Creates an empty file if there is none."""
        with writing(self._path):
            self._path.touch()


class PrintedLines:
    """Standard output as a file of metrics: a line of JSON for each step."""

    def begin(self, first: int) -> None:
        """Does nothing: printed lines stay."""

    def add(self, row: Row) -> None:
        """Prints a line with the metrics of a step."""
        print(json_text(dict(row)), flush=True)

    def close(self) -> None:
        """Does nothing."""


class Csv:
    """A file of comma-separated values with a line for each step. If a metric has no column yet,
    such as the metrics of the first evaluation, the file is written anew with more columns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: list[str] = []

    def begin(self, first: int) -> None:
        """Removes the lines of step `first` and later ones. Errors: InputError if the file is not
        one of metrics: it has no column of steps."""
        names, rows = self._read()
        if names and "step" not in names:
            raise InputError(f"--csv {self._path}: this file is not of a run; give another name")
        self._write(names, [row for row in rows if int(row["step"]) < first])

    def add(self, row: Row) -> None:
        """Adds a line with the metrics of a step."""
        new = [name for name in row if name not in self._names]
        if new:
            self._write([*self._names, *new], self._read()[1])
        with writing(self._path), self._path.open("a", encoding="utf-8", newline="") as sink:
            self._writer(sink).writerow(row)

    def close(self) -> None:
        """Does nothing: each line is written at once."""

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        """Returns the columns and the rows of the file; both empty if there is none."""
        if not self._path.exists():
            return [], []
        with self._path.open(encoding="utf-8", newline="") as source:
            reader = csv.DictReader(source)
            rows = [row for row in reader if None not in row.values()]  # else cut in writing
            return list(reader.fieldnames or []), rows

    def _write(self, names: list[str], rows: Iterable[Mapping[str, str]]) -> None:
        self._names = names
        with whole_file(self._path) as sink:
            if names:
                writer = self._writer(sink)
                writer.writeheader()
                writer.writerows(rows)

    def _writer(self, sink: Any) -> csv.DictWriter[str]:
        return csv.DictWriter(sink, self._names, lineterminator="\n")


class TensorBoard:
    """A folder of event files for TensorBoard. Errors: InputError if tensorboardX is not
    installed."""

    def __init__(self, folder: Path) -> None:
        try:
            import tensorboardX  # noqa: F401
        except ImportError:
            raise InputError(
                "--tensorboard needs tensorboardX; install it with: pip install "
                "'onnxpar[tensorboard]'"
            ) from None
        self._folder = folder
        self._writer: Any = None

    def begin(self, first: int) -> None:
        """Begins a file that makes TensorBoard ignore step `first` and later steps of earlier
        files."""
        from tensorboardX import SummaryWriter

        self.close()
        with writing(self._folder):
            own = f".{first}"  # for a run that begins again in the same second
            self._writer = SummaryWriter(str(self._folder), purge_step=first, filename_suffix=own)

    def add(self, row: Row) -> None:
        """Adds a point to the curve of each metric."""
        assert self._writer is not None, "begin comes first"
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name.replace("eval_", "eval/"), value, row["step"])

    def close(self) -> None:
        """Writes what is left, and closes the file."""
        if self._writer is not None:
            self._writer.close()
