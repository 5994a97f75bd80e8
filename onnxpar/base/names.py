"""Names for what is added to a graph."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable


class Names:
    """The names of a graph, of its tensors and nodes; equal ones give equal free names."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._sorted = sorted(self._taken)

    def free(self, name: str) -> str:
        """`name`, with underscores behind it until nothing has this name, or continues it with
        `::`."""
        while name in self._taken or self._is_continued(name, "::"):
            name += "_"
        return name

    def root(self, name: str, mark: str) -> str:
        """`name`, with underscores behind it until no name continues it with `mark`."""
        while self._is_continued(name, mark):
            name += "_"
        return name

    def _is_continued(self, name: str, mark: str) -> bool:
        at = bisect_left(self._sorted, name + mark)
        return at < len(self._sorted) and self._sorted[at].startswith(name + mark)
