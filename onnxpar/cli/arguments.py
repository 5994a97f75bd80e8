"""Parses values of command-line options that have a syntax of their own (--dim, --state)."""

from __future__ import annotations

from collections.abc import Sequence

from onnxpar.base.errors import StrategyError


def dims_of(entries: Sequence[str]) -> dict[str, int | str]:
    """Returns the sizes of symbolic dimensions that --dim gives: ["batch=4", "total=past + seq"]
    becomes {"batch": 4, "total": "past + seq"}. Errors: StrategyError."""
    dims: dict[str, int | str] = {}
    for entry in entries:
        name, _, size = entry.rpartition("=")
        is_number = size.lstrip("-").isdigit()
        if not name or not size.strip() or (is_number and int(size) < 1):
            raise StrategyError(
                f"--dim {entry}: write NAME=N with N >= 1, or NAME=SIZE of other symbols"
            )
        dims[name] = int(size) if is_number else size
    return dims


def states_of(entries: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the state pairs that --state gives: ["past=present"] becomes [("past", "present")],
    an input and the output that it gets in the next run. Errors: StrategyError."""
    pairs = []
    for entry in entries:
        source, _, result = entry.partition("=")
        if not source or not result:
            raise StrategyError(f"--state {entry}: write INPUT=OUTPUT")
        pairs.append((source, result))
    return pairs
