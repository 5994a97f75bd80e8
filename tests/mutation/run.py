"""How many small faults of the package do its tests notice?

    python tests/mutation/run.py record calls.gz -- -n 2       # runs the tests once: who calls what
    python tests/mutation/run.py score calls.gz scores.jsonl   # breaks the package 330 times
    python tests/mutation/run.py compare scores.jsonl [later.jsonl]

Needs Python 3.12 or newer, with a wheel of onnxpar and its test extra. Each mutant is a copy of the
installed package with one change; the tests that call the changed function run until one fails.
Tests beyond the 150th, or that would take longer than `--budget` seconds in all, are left out, the
slow ones and those of other rooms first. `score` goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import Queue

from calls import Calls, Test
from mutants import Mutant, drawn

HERE = Path(__file__).parent
KILLED = ("killed", "timeout")
QUICK = 12
"""Tests that run before all others, since collecting many takes longer than most faults live."""
MOST = 150
"""Tests that run at most: a function that all models pass through is called by thousands."""


def record(calls: Path, arguments: Sequence[str]) -> int:
    """Runs pytest with these arguments, and writes who called what."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "ONNXPAR_CALLS": folder,
            "PYTHONPATH": str(HERE / "recorder"),
            "PYTHONSAFEPATH": "1",  # the installed package, not the checkout
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "recorder_plugin", *arguments]
        status = subprocess.call(command, env=environment)
        Calls.of(Path(folder)).write(calls)
    return status


class Job:
    """A copy of the package to break."""

    def __init__(self, folder: Path, package: Path, budget: float) -> None:
        self.folder, self.budget = folder, budget
        self.copy = Path(shutil.copytree(package, folder / "onnxpar"))
        (folder / "home").mkdir()

    def outcome(self, mutant: Mutant, tests: Sequence[Test]) -> dict[str, object]:
        """Runs the tests with the fault: the outcome, the seconds, and the test that failed."""
        began = time.monotonic()
        path = self.copy / mutant.file
        whole = path.read_text()
        try:
            _write(path, mutant.applied(whole))
            result = self._run(mutant, tests)
        finally:
            _write(path, whole)
        return {**asdict(mutant), **result, "seconds": round(time.monotonic() - began, 1)}

    def _run(self, mutant: Mutant, tests: Sequence[Test]) -> dict[str, object]:
        chosen: list[Test] = []
        total = 0.0
        for test in tests:
            total += test.seconds
            if chosen and (total > self.budget or len(chosen) == MOST):
                break
            chosen.append(test)
        result: dict[str, object] = {"tests": len(chosen), "of": len(tests)}
        if not chosen:
            return {**result, "outcome": "not called", "by": ""}
        for part in (chosen[:QUICK], chosen[QUICK:]):
            if not part:
                continue
            names = self.folder / "tests.txt"
            names.write_text("".join(f"{test.id}\n" for test in part))
            flags = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", "--timeout", "100"]
            expected = 3 * sum(test.seconds for test in part) + 120
            status, said = self._call(["-m", "pytest", *flags, f"@{names}"], expected)
            failed = [s for s in said if s.startswith(("FAILED ", "ERROR "))]
            by = failed[0].partition(" ")[2].partition(" - ")[0] if failed else ""
            if status is None:
                return {**result, "outcome": "timeout", "by": by}
            if status in (1, 2) or any(
                re.match(r"E  +\w+Error|ImportError while", s) for s in said
            ):
                return {**result, "outcome": "killed", "by": by}
            if status not in (0, 5):
                return {**result, "outcome": f"pytest ended with {status}", "by": said[-1]}
        return {**result, "outcome": "survived", "by": ""}

    def _call(self, arguments: Sequence[str], seconds: float) -> tuple[int | None, list[str]]:
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            "PYTHONSAFEPATH": "1",
            "PYTHONDONTWRITEBYTECODE": "",
            "TMPDIR": str(self.folder / "home"),
        }
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            output.seek(0)
            return status, output.read().splitlines()


def _write(path: Path, source: str) -> None:
    """Writes a module, and forgets its bytecode, which may be as old by its time."""
    path.write_text(source)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def score(options: argparse.Namespace) -> int:
    """Tries all mutants that the file of scores does not have yet."""
    package = Path(str(importlib.util.find_spec("onnxpar").origin)).parent  # type: ignore[union-attr]
    calls = Calls.read(options.calls)
    todo = drawn(package, options.mutants, options.seed)
    known = {key(r) for r in read(options.scores)} if options.scores.exists() else set()
    todo = [m for m in todo if key(asdict(m)) not in known]
    killers = {key(r): str(r["by"]) for r in read(options.first)} if options.first else {}
    with tempfile.TemporaryDirectory() as scratch, open(options.scores, "a") as out:
        jobs: Queue[Job] = Queue()
        for i in range(options.jobs):
            (folder := Path(scratch, str(i))).mkdir()
            jobs.put(Job(folder, package, options.budget))

        def one(mutant: Mutant) -> None:
            job = jobs.get()
            try:
                killer = killers.get(key(asdict(mutant)))
                tests = sorted(calls.of_mutant(mutant), key=lambda test: test.id != killer)
                row = job.outcome(mutant, tests)
            finally:
                jobs.put(job)
            print(json.dumps(row), file=out, flush=True)
            print(f"{row['outcome']:12} {row['seconds']:6} s  {mutant}", flush=True)

        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(one, todo))
    return 0


def read(file: Path) -> list[dict[str, object]]:
    """Returns the rows of a file of scores."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def key(row: dict[str, object]) -> tuple[object, ...]:
    """What tells a mutant from others."""
    return row["file"], row["line"], row["column"], row["after"]


def compare(options: argparse.Namespace) -> int:
    """Prints how many mutants of each room were killed, in one or several files of scores."""
    columns = [read(file) for file in options.scores]
    rooms = sorted({Mutant(str(r["file"]), "", "", 0, 0, "", "").room for c in columns for r in c})
    for room in [*rooms, "all"]:
        cells = []
        for rows in columns:
            of_room = [
                r
                for r in rows
                if room in ("all", Mutant(str(r["file"]), "", "", 0, 0, "", "").room)
            ]
            killed = sum(r["outcome"] in KILLED for r in of_room)
            cells.append(f"{killed:4} of {len(of_room):3}")
        print(f"{room:14}", *cells)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("record")
    one.add_argument("calls", type=Path)
    one.add_argument("arguments", nargs="*")
    one.set_defaults(run=lambda o: record(o.calls, o.arguments))
    one = commands.add_parser("score")
    one.add_argument("calls", type=Path)
    one.add_argument("scores", type=Path)
    one.add_argument("--mutants", type=int, default=330)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--jobs", type=int, default=2)
    one.add_argument("--budget", type=float, default=60)
    one.add_argument("--first", type=Path, help="scores whose killers are tried first")
    one.set_defaults(run=score)
    one = commands.add_parser("compare")
    one.add_argument("scores", type=Path, nargs="+")
    one.set_defaults(run=compare)
    options = parser.parse_args()
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
