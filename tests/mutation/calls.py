"""Which tests call which functions of the package, from the files that the recorder writes."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutants import Mutant


@dataclass(frozen=True)
class Test:
    """A test by its node id, and the seconds that it took."""

    id: str
    seconds: float

    @property
    def file(self) -> str:
        return self.id.partition("::")[0]

    @property
    def room(self) -> str:
        """The folder of the test below tests/."""
        return self.file.removeprefix("tests/").partition("/")[0]


@dataclass(frozen=True)
class Calls:
    """The tests that passed, and by function, as "file::name", those that called it; what fixtures
    call counts for all tests of their file."""

    tests: Sequence[Test]
    functions: dict[str, Sequence[int]]

    @staticmethod
    def read(file: Path) -> Calls:
        data = json.loads(gzip.decompress(file.read_bytes()))
        return Calls([Test(*test) for test in data["tests"]], data["functions"])

    def write(self, file: Path) -> None:
        data = {"tests": [[t.id, t.seconds] for t in self.tests], "functions": self.functions}
        file.write_bytes(gzip.compress(json.dumps(data).encode()))

    @staticmethod
    def of(folder: Path) -> Calls:
        """Reads what a recorded run of the tests wrote to a folder."""
        seconds: dict[str, float] = defaultdict(float)
        failed: set[str] = set()
        for file in folder.glob("*.times"):
            for line in file.read_text().splitlines():
                duration, outcome, name = line.split("\t")
                seconds[json.loads(name)] += float(duration)
                if outcome != "passed":
                    failed.add(json.loads(name))
        tests = [Test(name, round(s, 4)) for name, s in seconds.items() if name not in failed]
        number = {test.id: i for i, test in enumerate(tests)}
        of_file: dict[str, list[int]] = defaultdict(list)
        for i, test in enumerate(tests):
            of_file[test.file].append(i)
        called: dict[str, set[int]] = defaultdict(set)
        for file in folder.glob("*.calls"):
            for name, caller in _read(file):
                called[name].add(-1)
                if caller in number:
                    called[name].add(number[caller])
                elif caller.startswith("setup of "):
                    called[name].update(of_file[caller.removeprefix("setup of ")])
        return Calls(tests, {name: sorted(ids - {-1}) for name, ids in called.items()})

    def of_mutant(self, mutant: Mutant) -> list[Test]:
        """Returns the tests that call the mutated function or, outside of functions, any function
        of the file: those of its own room first, the quick ones before the slow ones."""
        if mutant.function:
            names: Iterable[str] = [f"{mutant.file}::{mutant.function}"]
        else:
            names = [name for name in self.functions if name.startswith(f"{mutant.file}::")]
        found = {self.tests[i] for name in names for i in self.functions.get(name, ())}
        return sorted(found, key=lambda t: (t.room != mutant.room, t.seconds, t.id))


def _read(file: Path) -> Iterable[tuple[str, str]]:
    """Yields the functions of a process with the tests that called them, or "setup of FILE" for
    calls of fixtures."""
    lines = [line.partition(" ") for line in file.read_text().splitlines()]
    of_number = (rest.split(" ", 2) for kind, _, rest in lines if kind == "F")
    names = {number: f"{path}::{name}" for number, path, name in of_number}
    test = "-"
    for kind, _, rest in lines:
        if kind == "T":
            test, _, phase = rest.rpartition(" (")
            if phase == "setup)":
                test = f"setup of {test.partition('::')[0]}"
        elif kind != "F":  # another thread may write a number before the line that explains it
            yield names[kind], test
