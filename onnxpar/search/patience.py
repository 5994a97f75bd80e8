"""How long a search looks on where it could go on for minutes, and whom it tells what it does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

SECONDS = 20.0
"""Of looking for something better, or for something that fits, beside what must be done anyway."""


def _nobody(text: str) -> None:
    pass


@dataclass
class Patience:
    """The seconds that a search may spend. `tell` is called with a few words on what is tried."""

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
        """Whether nothing is left."""
        return self.left <= 0.0

    def renewed(self, seconds: float = SECONDS) -> Patience:
        """The same at its beginning."""
        return replace(self, seconds=seconds, spent=0.0, _since=None)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Counts the time within; where it is counted already, no second time."""
        if self._since is not None:
            yield
            return
        self._since = time.monotonic()
        try:
            yield
        finally:
            self.spent += time.monotonic() - self._since
            self._since = None
