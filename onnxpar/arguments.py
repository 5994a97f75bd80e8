"""Arguments of the command line that have a form of their own."""

from __future__ import annotations

from collections.abc import Sequence

from onnxpar.errors import StrategyError


def dims_of(entries: Sequence[str]) -> dict[str, int]:
    """Sizes of symbolic dimensions, given as NAME=N. Errors: StrategyError."""
    dims = {}
    for entry in entries:
        name, _, size = entry.rpartition("=")
        if not name or not size.isdigit() or not int(size):
            raise StrategyError(f"--dim {entry}: is not NAME=N with N >= 1")
        dims[name] = int(size)
    return dims


def states_of(entries: Sequence[str]) -> list[tuple[str, str]]:
    """State pairs, given as INPUT=OUTPUT. Errors: StrategyError."""
    pairs = []
    for entry in entries:
        source, _, result = entry.partition("=")
        if not source or not result:
            raise StrategyError(f"--state {entry}: is not INPUT=OUTPUT")
        pairs.append((source, result))
    return pairs
