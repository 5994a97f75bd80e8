"""Names that are still free in a graph, for tensors and nodes that the compiler adds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable


class Names:
    """The names that a graph already uses (`taken`). Equal sets of names always give equal free
    names."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._sorted = sorted(self._taken)

    def free(self, name: str) -> str:
        """Returns `name` with as many underscores behind it as needed until it is not taken, and no
        taken name begins with it and `::`. With "x" taken, `free("x")` is "x_". Does not reserve
        the name."""
        while name in self._taken or self._is_continued(name, "::"):
            name += "_"
        return name

    def root(self, name: str, mark: str) -> str:
        """Returns `name` with as many underscores behind it as needed until no taken name begins
        with `name + mark`. For a prefix of new names: with "x/1" taken, `root("x", "/")` is "x_".
        """
        while self._is_continued(name, mark):
            name += "_"
        return name

    def _is_continued(self, name: str, mark: str) -> bool:
        at = bisect_left(self._sorted, name + mark)
        return at < len(self._sorted) and self._sorted[at].startswith(name + mark)
