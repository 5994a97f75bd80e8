"""Suggestions for names that are unknown."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error message about an unknown name: the most similar name, or all
    names."""
    known = list(known)
    close = get_close_matches(name, known, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; it has: {', '.join(known)}"
