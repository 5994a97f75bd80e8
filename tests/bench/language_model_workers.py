"""The processes of language_model_systems.py, driven by pipes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers import watched

PROGRAM = Path(__file__).with_name("language_model_systems.py")


@dataclass
class Worker:
    """A system, and its process while it has one: until the end if it is lasting, else for a turn.

    peaks  the most bytes of each of its processes: once they were started, and after turns
    """

    name: str
    python: str
    system: str
    options: Mapping[str, Any]
    is_lasting: bool
    peaks: dict[str, list[int]] = field(default_factory=dict)
    _process: subprocess.Popen[str] | None = None

    def measure(self, warm_up: Sequence[Any], call: Sequence[Any]) -> dict[str, Any]:
        """The answer to a call on a quiet machine, after another call; `others` are the cores that
        other processes used meanwhile. Errors: SystemExit if the process has ended."""
        process = self._start()
        self._ask(process, *warm_up)
        answer: dict[str, Any]
        answer, others = watched(process.pid, lambda: self._ask(process, *call))
        self._note(process, "ended")
        if not self.is_lasting:
            self.close()
        return {**answer, "others": others}

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        if self._process is None:
            command = [self.python, str(PROGRAM), self.system, json.dumps(self.options)]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self._answer(self._process)
            self._note(self._process, "started")
        return self._process

    def _ask(self, process: subprocess.Popen[str], *call: Any) -> Any:
        assert process.stdin is not None
        print(json.dumps(call), file=process.stdin, flush=True)
        return self._answer(process)

    def _answer(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} has stopped; its error is above")
        return json.loads(line)

    def _note(self, process: subprocess.Popen[str], when: str) -> None:
        found = self._ask(process, "memory")
        before = self.peaks.get(when, [0] * len(found))
        self.peaks[when] = [max(pair) for pair in zip(before, found, strict=True)]


def lacks(python: str, module: str) -> str:
    """Why another Python cannot import a module; nothing if it can."""
    code = f"import {module}"
    tried = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return tried.stderr.strip().splitlines()[-1] if tried.returncode else ""


def version(python: str, package: str) -> str:
    """The version of a package of another Python. Errors: CalledProcessError if it has none."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.check_output([python, "-c", code], text=True).strip()
