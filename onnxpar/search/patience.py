"""A time limit for searches, which could go on for minutes, and reports of their progress.

Seconds are CPU time of this process, so that other load on the machine does not change what a
search finds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

SECONDS = 20.0
"""The default time limit for finding a better strategy, or one that fits in memory; work that is
always done does not count."""


def _nobody(text: str) -> None:
    pass


@dataclass
class Patience:
    """A search's time limit.

    seconds  the CPU time that the search may spend
    tell     called with a few words on each attempt
    spent    the CPU time spent
    passed   the wall time that passed meanwhile
    """

    seconds: float = SECONDS
    tell: Callable[[str], None] = _nobody
    spent: float = 0.0
    passed: float = 0.0
    _since: tuple[float, float] | None = None

    @property
    def left(self) -> float:
        """Seconds that may still be spent."""
        return max(self.seconds - self._until_now()[0], 0.0)

    @property
    def is_out(self) -> bool:
        """True if no time is left."""
        return self.left <= 0.0

    def on_the_clock(self, seconds: float) -> float:
        """Returns the wall time in which this process will spend these seconds of CPU time, if the
        machine stays as busy as during the search so far."""
        spent, passed = self._until_now()
        return seconds * max(passed / spent, 1.0) if spent > 0 else seconds

    def renewed(self, seconds: float = SECONDS) -> Patience:
        """Returns a copy with this time limit, and nothing spent."""
        return replace(self, seconds=seconds, spent=0.0, passed=0.0, _since=None)

    def telling(self, prefix: str) -> Patience:
        """Returns a copy with nothing spent, which puts a prefix before each text that it tells."""

        def tell(text: str) -> None:
            self.tell(f"{prefix}: {text}" if text else "")

        return replace(self.renewed(self.seconds), tell=tell)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Context whose time counts as spent; a context inside another does not count twice."""
        if self._since is not None:
            yield
            return
        self._since = time.process_time(), time.monotonic()
        try:
            yield
        finally:
            self.spent, self.passed = self._until_now()
            self._since = None

    def _until_now(self) -> tuple[float, float]:
        """Returns (CPU time spent, wall time passed), including the time of a context that has not
        ended."""
        if self._since is None:
            return self.spent, self.passed
        spent, passed = (
            now - start
            for now, start in zip((time.process_time(), time.monotonic()), self._since, strict=True)
        )
        return self.spent + spent, self.passed + passed
