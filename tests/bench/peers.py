"""Systems measured side by side: each in a process of its own, in random turns, and only as far as
the rest of the machine leaves them alone."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from bench.bench_strategies import busy_seconds, wait_for_quiet

Run = Callable[[], Any]
PATIENCE = 20
"""Moments to wait for a quiet machine before a turn."""
OTHERS = 0.1
"""Cores that others may use during a quiet turn."""
QUARTILES = (0.25, 0.5, 0.75)
FEWEST = 0.25
"""Share of the turns that counts, the quietest first, where fewer were quiet."""


@dataclass(frozen=True)
class Peer:
    """A system to measure. `make(stack, *arguments)` returns what is timed: a call that takes the
    work from arrays to arrays. `needs` is a module of the extra `peers`."""

    name: str
    make: Callable[..., Run]
    arguments: tuple[Any, ...]
    needs: str = ""

    @property
    def missing(self) -> str:
        """Why it cannot be measured here, and the remedy."""
        if not self.needs or find_spec(self.needs) is not None:
            return ""
        return f"{self.name} is left out: pip install 'onnxpar[peers]' installs {self.needs}"


@dataclass
class Turn:
    """Seconds of each run of a turn, and how many cores others used meanwhile."""

    runs: list[float]
    others: float


@dataclass
class Running:
    """A peer in its process."""

    peer: Peer
    connection: Connection
    process: Any
    turns: list[Turn] = field(default_factory=list)

    @classmethod
    def start(cls, peer: Peer, stack: ExitStack) -> Running:
        """Starts the process, which ends with the stack."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, peer.make, peer.arguments))
        process.start()
        theirs.close()
        stack.callback(process.join)
        stack.callback(ours.close)
        return cls(peer, ours, process)

    def ask(self, request: Any) -> Any:
        """Its answer. Errors: RuntimeError if the process has ended."""
        try:
            self.connection.send(request)
            return self.connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"{self.peer.name} has stopped; its error is above") from error

    def results(self, count: int) -> list[Any]:
        """What its first runs return."""
        return [self.ask("result") for _ in range(count)]

    def take_turn(self, seconds: float) -> None:
        """Runs for about so long, when the machine does little else."""
        self.turns.append(Turn(*watched(self.process.pid, lambda: self.ask(seconds))))


@dataclass(frozen=True)
class Figure:
    """Seconds of a run of a peer: quartiles; turns that were quiet, of all; what the results are
    away from those of the base, as a share of the largest."""

    low: float
    median: float
    high: float
    quiet: int
    turns: int
    error: float

    @classmethod
    def of(cls, turns: Sequence[Turn], error: float = 0.0) -> Figure:
        """Of the quiet turns, or of the quietest quarter of all."""
        quiet = sum(turn.others <= OTHERS for turn in turns)
        count = max(quiet, round(FEWEST * len(turns)), 1)
        quietest = sorted(turns, key=lambda turn: turn.others)[:count]
        low, median, high = np.quantile([run for t in quietest for run in t.runs], QUARTILES)
        return cls(float(low), float(median), float(high), quiet, len(turns), error)


def serve(connection: Connection, make: Callable[..., Run], arguments: tuple[Any, ...]) -> None:
    """Answers in a peer's process: seconds of runs, or the result of one."""
    with ExitStack() as stack, contextlib.suppress(EOFError):
        run = make(stack, *arguments)
        while True:
            request = connection.recv()
            connection.send(run() if request == "result" else timed(run, request))


def timed(run: Run, seconds: float) -> list[float]:
    """Seconds of each run, after one that fills the caches; at least two."""
    run()
    runs: list[float] = []
    while len(runs) < 2 or sum(runs) < seconds:
        start = time.perf_counter()
        run()
        runs.append(time.perf_counter() - start)
    return runs


def watched(pid: int, work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` returns, once the machine is quiet, and how many cores were used meanwhile by
    processes other than `pid` and those that it has started."""
    wait_for_quiet(PATIENCE)
    start, busy, own = time.perf_counter(), busy_seconds(), tree_seconds(pid)
    result = work()
    took = time.perf_counter() - start
    others = busy_seconds() - busy - (tree_seconds(pid) - own)
    return result, max(others / took, 0.0)


def tree_seconds(pid: int) -> float:
    """Seconds that a process, and those that it has started, have worked."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        files = list(Path(f"/proc/{pid}/task").glob("*/children"))
        children = [int(child) for file in files for child in file.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    # user and system time, its own and that of children that have ended
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(map(tree_seconds, children))


def away(result: Sequence[Any], base: Sequence[Any]) -> float:
    """The largest difference of results, as a share of the largest of the base."""
    return max(
        float(np.max(np.abs(np.asarray(a, np.float64) - b)) / np.max(np.abs(b)))
        for a, b in zip(result, base, strict=True)
    )


def measure(
    peers: Sequence[Peer], rounds: int, seconds: float, results: int, tolerance: float
) -> Mapping[str, Figure]:
    """Figures of all peers, by name; the first is the base, with which all must agree. Errors:
    SystemExit where one does not."""
    draw = random.Random(0)
    with ExitStack() as stack:
        running, errors = [], {}
        base: list[Any] = []
        for peer in peers:
            one = Running.start(peer, stack)
            result = one.results(results)
            base = base or result
            errors[peer.name] = away(result, base)
            if not errors[peer.name] <= tolerance:
                raise SystemExit(
                    f"{peer.name} disagrees with {peers[0].name}: {errors[peer.name]:.1e}"
                )
            running.append(one)
        for _ in range(rounds):
            for one in draw.sample(running, len(running)):
                one.take_turn(seconds)
        return {one.peer.name: Figure.of(one.turns, errors[one.peer.name]) for one in running}
