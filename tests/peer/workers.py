"""Worker processes for cases: a run that ends or blocks its process is counted, not fatal."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from peer.cases import PeerCase, all_cases, runnable
from peer.forms import forms
from peer.missed import missed_splits
from peer.open_cases import opened
from peer.outcome import CRASH, HANG, REFUSED, UNFIT, Outcome
from peer.trial import Bench, Trials, last_lines

from onnxpar.base.errors import OnnxparError, PassError

PATIENCE = 90.0
"""Seconds without a sign of life from a worker after which what it does is a hang."""
COUNT = -1
"""Asks how many cases there are."""

Step = tuple[Outcome, Callable[[], list[Outcome]]]
"""What to say if the process ends in it, but for the kind; and the work."""
Steps = Callable[[int, Bench], Iterator[Step]]
"""What is done for a case of this number, in the same order each time."""


def trials_of(number: int, bench: Bench) -> Iterator[Step]:
    """The runs of a case in all its forms, and the search for what its rule misses."""
    case = all_cases()[number]
    found = runnable(case)
    if isinstance(found, str):
        yield Outcome(case.name, "", "", ""), lambda: [Outcome(case.name, "", "", UNFIT, found)]
        return
    for form in forms(found):
        yield from _runs(form, bench)
        label = Outcome(form.name, "search for missed splits", _ops(form.model), "")
        yield label, lambda form=form: list(_missed(form))


def open_trials_of(number: int, bench: Bench, sample: tuple[int, int] = (0, 1)) -> Iterator[Step]:
    """The runs of a case with each size of its inputs open, at that size and at others; of the ways
    to open it, a sample, as in `opened`."""
    case = all_cases()[number]
    found = runnable(case)
    if isinstance(found, str):
        yield Outcome(case.name, "", "", ""), lambda: [Outcome(case.name, "", "", UNFIT, found)]
        return
    for form in opened(found, sample):
        yield from _runs(form, bench, every=False)


def _runs(form: PeerCase, bench: Bench, every: bool = True) -> Iterator[Step]:
    """The runs of a case; without `every`, of one input at a time, in default parts."""
    try:
        trials = Trials(form, bench)
        splits = [s for s in trials.splits() if every or (s.parts is None and len(s.places) == 1)]
    except Exception as error:  # the report shows it
        is_refusal = isinstance(error, OnnxparError) and not isinstance(error, PassError)
        kind = REFUSED if is_refusal else CRASH
        detail = str(error)[:400] if kind == REFUSED else last_lines()
        failed = Outcome(form.name, "load", _ops(form.model), kind, detail)
        yield failed, lambda failed=failed: [failed]
        return
    for split in splits:
        label = Outcome(form.name, str(split), _ops(form.model), "")
        yield label, lambda t=trials, s=split: [t.run(s)]


def _missed(form: Any) -> Iterator[Outcome]:
    try:
        yield from missed_splits(form)
    except Exception:  # the report shows it
        label = "search for missed splits"
        yield Outcome(form.name, label, _ops(form.model), CRASH, last_lines())


def _ops(model: Any) -> str:
    return str(model.graph.node[0].op_type) if model.graph.node else ""


def _serve(pipe: Any, steps: Steps, folder: str) -> None:
    """The worker's loop: tries the cases it is told, from the step it is told."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    bench = Bench(Path(folder))
    pipe.send(("ready", None))
    while True:
        number, skip = pipe.recv()
        if number == COUNT:
            pipe.send(("count", len(all_cases())))
            continue
        for i, (label, work) in enumerate(steps(number, bench)):
            if i >= skip:
                pipe.send(("start", label))
                pipe.send(("done", work()))
        pipe.send(("end", None))


class Worker:
    """A process that tries cases, and is started anew where a run has ended it."""

    def __init__(self, steps: Steps = trials_of, patience: float = PATIENCE) -> None:
        self._steps = steps
        self._patience = patience
        self._process: Any = None
        self._pipe: Any = None
        self._folder: Any = None

    def try_case(self, number: int) -> list[Outcome]:
        """All outcomes of a case, what ended the process included."""
        outcomes: list[Outcome] = []
        done, is_prepared = 0, False
        pipe = self._send(number, done)
        label = Outcome(f"case {number}", "start", "", "")
        while True:
            what, content = self._receive(pipe, self._patience)
            if what == "end":
                return outcomes
            if what == "start":
                label, is_prepared = content, True
            elif what == "done":
                outcomes += content
                done += 1
            else:
                outcomes.append(Outcome(label.case, label.split, label.op, what, content))
                self.close()
                if not is_prepared:  # and would not be again
                    return outcomes
                done, is_prepared = done + 1, False
                pipe = self._send(number, done)

    def count(self) -> int:
        """How many cases there are."""
        what, content = self._receive(self._send(COUNT, 0), PATIENCE)
        assert what == "count", content
        return int(content)

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._folder.cleanup()
            self._process = None

    def _receive(self, pipe: Any, patience: float) -> tuple[str, Any]:
        if not pipe.poll(patience):
            return HANG, f"no answer within {patience:.0f} s"
        try:
            what, content = pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            return CRASH, f"the process ended with {self._process.exitcode}"
        return what, content

    def _send(self, number: int, skip: int) -> Any:
        if self._process is None:
            shared = Path("/dev/shm")
            where = shared if shared.is_dir() else None
            self._folder = tempfile.TemporaryDirectory(prefix="peer-", dir=where)
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            arguments = (theirs, self._steps, self._folder.name)
            self._process = context.Process(target=_serve, args=arguments, daemon=True)
            self._process.start()
            theirs.close()
            what, content = self._receive(self._pipe, PATIENCE)
            assert what == "ready", content
        self._pipe.send((number, skip))
        return self._pipe
