"""A time limit for searches, which could go on for minutes, and reports of their progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

SECONDS = 20.0
"""Default time limit for finding a better strategy, or one that fits in memory; work that is always
done does not count."""


def _nobody(text: str) -> None:
    pass


@dataclass
class Patience:
    """The seconds that a search may spend. The search calls `tell` with a few words on each thing
    that it tries."""

    seconds: float = SECONDS
    tell: Callable[[str], None] = _nobody
    spent: float = 0.0
    _since: float | None = None

    @property
    def left(self) -> float:
        """Seconds that may still be spent."""
        running = 0.0 if self._since is None else time.monotonic() - self._since
        return max(self.seconds - self.spent - running, 0.0)

    @property
    def is_out(self) -> bool:
        """True if no time is left."""
        return self.left <= 0.0

    def renewed(self, seconds: float = SECONDS) -> Patience:
        """A copy with this time limit, of which nothing is spent yet."""
        return replace(self, seconds=seconds, spent=0.0, _since=None)

    def telling(self, prefix: str) -> Patience:
        """A copy of which nothing is spent yet, and that tells what it is told after a prefix."""

        def tell(text: str) -> None:
            self.tell(f"{prefix}: {text}" if text else "")

        return replace(self.renewed(self.seconds), tell=tell)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Counts the time inside the block as spent; a nested block does not count twice."""
        if self._since is not None:
            yield
            return
        self._since = time.monotonic()
        try:
            yield
        finally:
            self.spent += time.monotonic() - self._since
            self._since = None
