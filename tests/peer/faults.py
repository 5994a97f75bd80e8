"""Steps that end or block their process, for tests of the workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

from peer.outcome import SPLIT, Outcome
from peer.trial import Bench
from peer.workers import Step


def faulty_steps(number: int, bench: Bench) -> Iterator[Step]:
    """A good step, one that ends its process, one that blocks it, and a good one."""
    for name, action in (("first", None), ("dies", _die), ("blocks", _block), ("last", None)):
        label = Outcome(f"case {number}", name, "Op", SPLIT)

        def work(label: Outcome = label, action: object = action) -> list[Outcome]:
            if callable(action):
                action()
            return [label]

        yield label, work


def _die() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _block() -> None:
    time.sleep(3600)


def silent_steps(number: int, bench: Bench) -> Iterator[Step]:
    """Never comes to a step."""
    time.sleep(60)
    yield from faulty_steps(number, bench)
