"""`PYTHONPATH=tests python -m hosts.faulty_worlds --seeds 200`: worlds of ranks over links with
random faults; prints how each kind has ended, and each world that has ended as none may."""

from __future__ import annotations

import argparse
import json
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hosts.hosts import Host, Hosts
from hosts.link import NETWORK, Network, Quality
from hosts.link_faults import TIMEOUT, Case, draw
from hosts.model_of_faults import shard_for

_TESTS = Path(__file__).parents[1]
MARGIN = 4.5
"""Seconds after the timeout: a second in which the hub asks other ranks, two in which a rank waits
for what the hub says, and some for a busy machine."""
START = 2 * TIMEOUT + MARGIN
"""Ranks first wait for the hub, then for each other."""
PATIENCE = 60.0
"""Seconds after which a rank counts as one that hangs."""

_CLEAN = asdict(Quality())
_RANK = re.compile(r"rank (\d+)(?: \(pid \d+(?: on (\w+))?\)| on host (\w+))?")


@dataclass(frozen=True)
class Ended:
    """How a world has ended: right, error, or a fault of onnxpar."""

    case: Case
    how: str
    details: str = ""

    @property
    def is_fault(self) -> bool:
        return self.how not in ("right", "error")


class _Server:
    """A process on a host that is a rank of one world after another."""

    def __init__(self, host: Host, number: int) -> None:
        self._errors: deque[str] = deque(maxlen=50)
        self.process = host.start(
            [sys.executable, "-X", "faulthandler", "-m", "hosts.faulty_rank"],
            {"PYTHONPATH": f"{_TESTS}:{_TESTS.parent}"},
            stdin=subprocess.PIPE,
        )
        self.lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self.process.stderr is not None
        threading.Thread(target=self._errors.extend, args=[self.process.stderr]).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(json.loads(line))
        self.lines.put(None)

    def ask(self, job: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)

    def next(self, until: float) -> dict[str, Any]:
        """The next line; how the process has ended, if there is none."""
        try:
            line = self.lines.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return {"end": "hang", "text": "no end", "phase": "?"}
        if line is not None:
            return line
        text = f"status {self.process.wait()}: {''.join(self._errors)}"
        return {"end": "crash", "text": text, "phase": "?"}

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Laboratory:
    """Hosts, a network between them, and on each the processes that are ranks."""

    def __init__(self, hosts: Sequence[Host], network: Network, folder: Path) -> None:
        self._hosts, self._network, self._folder = hosts, network, folder
        self._servers: dict[tuple[int, int], _Server] = {}
        self._port = 29_500

    def close(self) -> None:
        for server in self._servers.values():
            server.close()
        self._servers.clear()

    def run(self, case: Case) -> Ended:
        self._port += 1
        ranks = self._ranks(case)
        self._network.set(**_CLEAN)
        stop = threading.Event()
        began = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            if case.at_start:
                done = pool.submit(self._disturb, case, stop)
            for rank, server in enumerate(ranks):
                server.ask(self._job(case, rank))
            until = began + PATIENCE
            first = [server.next(until) for server in ranks]
            if not case.at_start:
                done = pool.submit(self._disturb, case, stop)
            last = [
                server.next(until) if "up" in line else line
                for server, line in zip(ranks, first, strict=True)
            ]
            stop.set()
            done.result()
        self._network.set(**_CLEAN)
        ended = judge(case, last)
        if any(each["end"] in ("hang", "crash") for each in last):
            self.close()
        return ended

    def _disturb(self, case: Case, stop: threading.Event) -> None:
        began = time.monotonic() + case.onset
        for change in case.changes:
            if stop.wait(max(0.0, began + change.after - time.monotonic())):
                return
            for sender, receiver in change.pairs:
                self._network.set(sender, receiver, **change.quality)

    def _ranks(self, case: Case) -> list[_Server]:
        found = []
        for host, count in enumerate(case.counts):
            for number in range(count):
                place = host, number
                if place not in self._servers:
                    self._servers[place] = _Server(self._hosts[host], number)
                found.append(self._servers[place])
        return found

    def _job(self, case: Case, rank: int) -> dict[str, Any]:
        host = case.places[rank]
        environment = {
            "ONNXPAR_RANK": rank,
            "ONNXPAR_WORLD_SIZE": len(case.places),
            "ONNXPAR_LOCAL_WORLD_SIZE": case.counts[host],
            "ONNXPAR_STORE": f"tcp://{self._network.addresses[0]}:{self._port}",
            "ONNXPAR_KEY": f"a key of world {self._port} alone",
            "ONNXPAR_INSECURE": 1,
            "ONNXPAR_BIND": self._network.addresses[host],
            "ONNXPAR_TIMEOUT": TIMEOUT,
        }
        return {
            "environment": {name: str(value) for name, value in environment.items()},
            "turns": case.turns,
            "pace": case.pace,
            "model": str(shard_for(len(case.places), self._folder)) if case.model else "",
        }


@contextmanager
def laboratory(folder: Path) -> Iterator[Laboratory]:
    """Three hosts; `folder` must not be in /tmp, of which each host has its own."""
    with ExitStack() as exits:
        hosts = exits.enter_context(Hosts(3))
        network = exits.enter_context(Network(hosts, queue=2000, mtu=1500))
        made = Laboratory(hosts, network, folder)
        exits.callback(made.close)
        yield made


def judge(case: Case, ends: Sequence[dict[str, Any]]) -> Ended:
    """Every rank must end in time, all with right results or all with an error that names both
    ends of a link that has failed."""
    details = "\n".join(f"    rank {rank}: {end}" for rank, end in enumerate(ends))
    found = {end["end"] for end in ends}
    for how in ("crash", "wrong", "traceback", "hang"):
        if how in found:
            return Ended(case, how, details)
    for end in ends:
        if end["end"] == "error" and end["waited"] > _limit(case, end):
            return Ended(case, "late", details)
        if end["leaving"] > MARGIN:
            return Ended(case, "late", details)
    if found == {"right"}:
        return Ended(case, "right", details)
    if "right" in found:
        return Ended(case, "some ranks alone", details)
    if not all(_names_both_ends(case, end) for end in ends):
        return Ended(case, "unnamed", details)
    return Ended(case, "error", details)


def _limit(case: Case, end: dict[str, Any]) -> float:
    if end["phase"] == "start":
        return START
    return PATIENCE if case.flows else TIMEOUT + MARGIN


def _names_both_ends(case: Case, end: dict[str, Any]) -> bool:
    """Whether a text names two ranks between whose hosts a link has failed, and, once all have met,
    the hosts. Until then, a rank may know rank 0 by its address alone."""
    named: dict[int, str] = {}
    for rank, *hosts in _RANK.findall(end["text"]):
        place = case.places[int(rank)]
        name = "".join(hosts)
        if name not in ("", "abc"[place]):
            return False
        named[place] = named.get(place, "") or name
    if end["phase"] == "start" and f"{NETWORK}.1:" in end["text"]:
        named.setdefault(0, "")
    return any(
        pair[0] in named and pair[1] in named
        for pair in case.broken
        if end["phase"] == "start" or all(named.get(place) for place in pair)
    )


def run_all(
    seeds: Sequence[int], folder: Path, at_once: int, show: Callable[[Ended], None]
) -> list[Ended]:
    """Runs the faults of these seeds, some worlds at once, each in a laboratory of its own."""
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for seed in seeds:
        todo.put(seed)
    for ranks in range(2, 7):
        shard_for(ranks, folder)
    ended: list[Ended] = []

    def work() -> None:
        with laboratory(folder) as made:
            while True:
                try:
                    seed = todo.get_nowait()
                except queue.Empty:
                    return
                each = made.run(draw(seed))
                ended.append(each)
                show(each)

    with ThreadPoolExecutor(at_once) as pool:
        for done in [pool.submit(work) for _ in range(at_once)]:
            done.result()
    return ended


def table(ended: Sequence[Ended]) -> str:
    """How many worlds of each kind of fault have ended how."""
    counts = Counter((each.case.kind, each.how) for each in ended)
    lines = []
    for kind in dict.fromkeys(each.case.kind for each in sorted(ended, key=lambda e: e.case.seed)):
        of_kind = {how: n for (other, how), n in sorted(counts.items()) if other == kind}
        lines.append(f"{kind}: " + ", ".join(f"{n} {how}" for how, n in of_kind.items()))
    total = Counter(each.how for each in ended)
    return "\n".join([*lines, f"{len(ended)} in all: {dict(total)}"])


def main() -> int:
    """Returns 1 if a world has ended as none may."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many faults")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", type=int, nargs="+", help="these seeds, with what ranks say")
    parser.add_argument("--at-once", type=int, default=2, help="worlds at once")
    args = parser.parse_args()
    began = time.monotonic()

    def show(each: Ended) -> None:
        if args.only or each.is_fault:
            print(f"{each.how}: {each.case}\n{each.details}", flush=True)

    seeds = args.only or range(args.first, args.first + args.seeds)
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="onnxpar-faults-") as folder:
        ended = run_all(seeds, Path(folder), args.at_once, show)
    print(f"{table(ended)}, in {time.monotonic() - began:.0f} s")
    return int(any(each.is_fault for each in ended))


if __name__ == "__main__":
    sys.exit(main())
