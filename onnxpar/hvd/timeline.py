"""The timeline: a file in Chrome's trace format that shows when each tensor waited and when it was
sent.

Open the file in chrome://tracing or Perfetto. As in Horovod's timeline, each tensor is shown as a
process of the trace.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from onnxpar.base.errors import InputError

T = TypeVar("T")

QUEUE = "QUEUE"
"""The event from a call to its start: earlier work runs."""


class Timeline:
    """Writes events to a file, which is valid JSON after `close`. Any thread may call any method.

    mark_cycles  also marks the start of each cycle, or without cycles of each collective
    """

    def __init__(self, path: str | Path, mark_cycles: bool) -> None:
        try:
            self._file = Path(path).open("w")  # noqa: SIM115  (open until close)
        except OSError as error:
            raise InputError(f"the timeline cannot be written to {path}: {error}") from error
        self._mark_cycles = mark_cycles
        self._start = time.perf_counter_ns()
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._unnamed = 0
        self._file.write("[\n")
        since = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
        self._write({"name": "process_name", "ph": "M", "pid": 0, "args": since}, first=True)

    def recorded(self, work: Callable[[], T], kind: str, names: Sequence[str]) -> Callable[[], T]:
        """Returns `work`, extended to write events of its tensors: QUEUE from now until the work
        starts, then `kind`, such as "ALLREDUCE", until it ends."""
        started = self.queued(kind, names)

        def run() -> T:
            self.mark_cycle()
            with started():
                return work()

        return run

    def queued(self, kind: str, names: Sequence[str]) -> Callable[[], AbstractContextManager[None]]:
        """Records that tensors wait (QUEUE) from now on. Returns a function to call when their work
        starts: it ends the wait, and returns a context that records its block as `kind`."""
        with self._lock:
            if not any(names):
                names = [f"{kind.lower()}.noname.{self._unnamed}"]
                self._unnamed += 1
        self._all(names, "B", QUEUE)

        def started() -> AbstractContextManager[None]:
            self._all(names, "E", QUEUE)
            return self.span(names, kind)

        return started

    def mark_cycle(self) -> None:
        """Marks the start of a cycle, or of a collective outside of cycles, if `mark_cycles` is
        set."""
        if self._mark_cycles:
            self._event({"ph": "i", "name": "CYCLE_START", "pid": 0, "s": "g"})

    @contextmanager
    def span(self, names: Sequence[str], activity: str) -> Iterator[None]:
        """Records that the tensors are in `activity` while the `with` block runs."""
        self._all(names, "B", activity)
        try:
            yield
        finally:
            self._all(names, "E", activity)

    def close(self) -> None:
        """Ends the file; later events are dropped."""
        with self._lock:
            if not self._file.closed:
                self._file.write("\n]\n")
                self._file.close()

    def _all(self, names: Sequence[str], phase: str, activity: str) -> None:
        """Writes the begin ("B") or the end ("E") of an activity for each tensor."""
        for name in names:
            event = {"ph": phase, "name": activity, "pid": self._number(name), "tid": 0}
            self._event(event)

    def _number(self, name: str) -> int:
        """Returns the number of the process that stands for a tensor in the trace; names a new
        process first."""
        with self._lock:
            number = self._numbers.get(name)
            if number is None:
                number = self._numbers[name] = len(self._numbers) + 1
                about: list[tuple[str, dict[str, Any]]] = [
                    ("process_name", {"name": name}),
                    ("process_sort_index", {"sort_index": number}),
                ]
                for what, args in about:
                    self._write({"name": what, "ph": "M", "pid": number, "args": args})
            return number

    def _event(self, event: dict[str, Any]) -> None:
        """Writes an event with the time since the start, in microseconds."""
        with self._lock:
            moment = (time.perf_counter_ns() - self._start) / 1000
            self._write({**event, "ts": moment})

    def _write(self, event: dict[str, Any], first: bool = False) -> None:
        if not self._file.closed:
            self._file.write(("" if first else ",\n") + json.dumps(event))
