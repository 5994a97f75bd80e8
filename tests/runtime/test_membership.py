"""Generations of ranks: which slots they have, and what a launcher makes of the ends of ranks."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from onnxpar.base.errors import InputError, RankError
from onnxpar.runtime.launch.launch import generation_number
from onnxpar.runtime.launch.membership import Generation, Membership, Slot, slots_of
from onnxpar.runtime.launch.supervision import AGAIN, HOST_GONE, Supervisor

A, B = {"a": 2}, {"b": 1}


def names(slots: object) -> str:
    return " ".join(map(str, slots))  # type: ignore[call-overload]


def members(min_ranks: int = 1, max_restarts: int = 0) -> Membership:
    return Membership(slots_of({**A, **B}), min_ranks, max_restarts)


def test_ranks_that_die_start_again_until_restarts_are_used_up() -> None:
    ours = members(max_restarts=1)
    first = ours.begin()
    assert (first.number, names(first.slots)) == (0, "a:0 a:1 b:0")
    assert ours.lose([first.slots[1]])
    assert ours.begin() == Generation(1, first.slots)
    assert not ours.lose([first.slots[1]])
    assert names(ours.begin().slots) == "a:0 b:0" and ours.restarts == 2


def test_hosts_leave_and_return() -> None:
    ours = members(min_ranks=2)
    ours.leave(slots_of(B))
    assert names(ours.begin().slots) == "a:0 a:1" and ours.restarts == 0
    ours.join(slots_of({**A, "b": 2}))
    assert names(ours.begin(3).slots) == "a:0 a:1 b:0"
    ours.leave(slots_of({"a": 2, "b": 1}))
    with pytest.raises(RankError, match="ranks left: 1, fewer than --min-ranks 2"):
        ours.begin()


@pytest.mark.parametrize(("least", "restarts"), [(0, 0), (4, 0), (1, -1)])
def test_limits_that_cannot_be(least: int, restarts: int) -> None:
    with pytest.raises(InputError, match=r"--(min-ranks|max-restarts) [-\d]+: must be"):
        members(least, restarts)


def test_the_number_of_a_generation() -> None:
    assert generation_number({"ONNXPAR_GENERATION": "3"}) == 3
    assert generation_number({"TORCHELASTIC_RESTART_COUNT": "2"}) == 2
    assert generation_number({}) == 0


LOST = 77


class Rank(subprocess.Popen[bytes]):
    """A rank that ends with LOST where its host is to be lost."""

    def poll(self) -> int | None:
        status = super().poll()
        return HOST_GONE if status == LOST else status


@dataclass
class Launcher:
    """Starts a script of Python as each rank, by what `scripts` has for its generation and slot."""

    scripts: Callable[[int, Slot], str]
    started: list[tuple[int, str]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    processes: dict[tuple[int, str], Rank] = field(default_factory=dict)

    @contextmanager
    def launch(self, generation: Generation) -> Iterator[Sequence[Rank]]:
        for slot in generation.slots:
            at = generation.number, str(slot)
            self.started.append(at)
            script = self.scripts(generation.number, slot)
            self.processes[at] = Rank([sys.executable, "-c", script])
        yield [self.processes[generation.number, str(slot)] for slot in generation.slots]

    def run(self, ours: Membership, grace: float = 60.0, **options: object) -> int:
        try:
            given = {"tell": self.told.append, "grace": grace, **options}
            return Supervisor(ours, self.launch, **given).run()  # type: ignore[arg-type]
        finally:
            assert all(process.poll() is not None for process in self.processes.values())

    def slots(self, number: int) -> str:
        return " ".join(slot for of, slot in self.started if of == number)


DONE = "pass"
OBEDIENT = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
time.sleep(60)
"""
DIES = "import os; os.kill(os.getpid(), 9)"


def ends(status: int) -> str:
    return f"import os; os._exit({status})"


def scripted(table: Mapping[tuple[int, str], str], other: Mapping[int, str]) -> Launcher:
    """By generation and slot, or by generation alone, or what is simply done."""
    return Launcher(lambda n, slot: table.get((n, str(slot)), other.get(n, DONE)))


def test_a_run_that_is_done() -> None:
    launcher = scripted({}, {})
    assert launcher.run(members()) == 0
    assert launcher.slots(0) == "a:0 a:1 b:0"


@pytest.mark.parametrize("end", [DIES, ends(128 + 9)])
def test_a_rank_that_is_killed_is_given_up(end: str) -> None:
    launcher = scripted({(0, "a:1"): end}, {0: OBEDIENT})
    assert launcher.run(members()) == 0
    assert launcher.slots(1) == "a:0 b:0"
    assert launcher.told == ["generation 0 has ended: the rank of slot a:1 died; 2 slots go on"]


def test_a_rank_that_is_killed_starts_again() -> None:
    launcher = scripted({(0, "a:1"): DIES}, {0: OBEDIENT})
    assert launcher.run(members(max_restarts=1)) == 0
    assert launcher.slots(1) == "a:0 a:1 b:0"


def test_ranks_that_do_not_handle_the_signal_yet_are_not_lost() -> None:
    launcher = scripted({(0, "a:1"): DIES}, {0: "import time; time.sleep(60)"})
    assert launcher.run(members()) == 0
    assert launcher.slots(1) == "a:0 b:0"


def test_a_host_that_is_gone_takes_all_of_its_slots() -> None:
    launcher = scripted({(0, "a:1"): ends(LOST)}, {0: OBEDIENT})
    ours = members()
    assert launcher.run(ours) == 0 and ours.restarts == 0
    assert launcher.slots(1) == "b:0"
    assert launcher.told == ["generation 0 has ended: a is lost; 1 slot goes on"]


STUCK = """
import pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path({file!r}).touch()
time.sleep(60)
"""
AFTER = """
import os, pathlib, time
while not pathlib.Path({file!r}).exists(): time.sleep(0.01)
os.{end}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "left"), [(f"_exit({AGAIN})", "a:0 a:1"), ("kill(os.getpid(), 9)", "a:1 b:0")]
)
def test_a_rank_that_does_not_end_is_the_lost_one(end: str, left: str, tmp_path: Path) -> None:
    """If others say that they have lost one; not if another one was killed."""
    file = str(tmp_path / "stuck")
    table = {
        (0, "a:0"): AFTER.format(file=file, end=end),
        (0, "a:1"): AFTER.format(file=file, end=f"_exit({AGAIN})"),
        (0, "b:0"): STUCK.format(file=file),
    }
    launcher = scripted(table, {})
    assert launcher.run(members(), grace=1.0) == 0
    assert launcher.slots(1) == left


def test_an_error_ends_the_run() -> None:
    launcher = scripted({(0, "a:1"): ends(2)}, {0: OBEDIENT})
    assert launcher.run(members(max_restarts=9)) == 2
    assert launcher.slots(1) == ""


def test_too_few_are_left() -> None:
    launcher = scripted({(0, "a:0"): DIES}, {0: OBEDIENT})
    with pytest.raises(RankError, match="ranks left: 2, fewer than --min-ranks 3"):
        launcher.run(members(min_ranks=3))


def test_generations_that_end_for_no_known_reason() -> None:
    launcher = scripted({}, dict.fromkeys(range(9), ends(AGAIN)))
    with pytest.raises(RankError, match="generation 2 has ended without a lost rank, and"):
        launcher.run(members(max_restarts=2))


def test_a_host_that_returns_joins_the_next_generation() -> None:
    """The others are asked to make room, and say that they have."""
    launcher = scripted({(0, "b:0"): ends(LOST)}, {0: OBEDIENT, 1: OBEDIENT})
    ours = members()

    def look(members: Membership) -> None:
        if len(launcher.started) == 5:  # the second generation runs
            members.join(slots_of(B))

    assert launcher.run(ours, look=look) == 0
    assert launcher.slots(1) == "a:0 a:1" and launcher.slots(2) == "a:0 a:1 b:0"
    assert ours.restarts == 0


def test_an_interrupted_launcher_leaves_no_ranks() -> None:
    launcher = scripted({}, {0: OBEDIENT})

    def look(members: Membership) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launcher.run(members(), look=look)
    assert {p.poll() for p in launcher.processes.values()} <= {AGAIN, -signal.SIGTERM}
