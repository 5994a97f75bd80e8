"""Ends a text before any of its stop strings."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts the text of an answer, which comes in pieces, before the first stop string in it.

    stops  the stop strings
    shows  True if the text ends behind the stop string instead
    found  True once there was a stop string; text that follows is dropped
    """

    def __init__(self, stops: Sequence[str], shows: bool = False) -> None:
        self._stops, self._shows = stops, shows
        self._waiting = ""
        self.found = False

    def add(self, text: str, is_last: bool = False) -> str:
        """Adds a piece of text; returns the text that is sure to be part of the answer. Text that
        may be the beginning of a stop string waits for the next piece, unless `is_last`."""
        if self.found:
            return ""
        text = self._waiting + text
        places = [(at, len(stop)) for stop in self._stops if (at := text.find(stop)) >= 0]
        if places:
            self.found, self._waiting = True, ""
            at, length = min(places)
            return text[: at + length if self._shows else at]
        keep = 0 if is_last else longest_beginning(text, self._stops)
        self._waiting = text[len(text) - keep :]
        return text[: len(text) - keep]


def longest_beginning(text: str, stops: Sequence[str]) -> int:
    """Returns the length of the longest end of a text that is the beginning of a stop string: 2 for
    "end of th" and the stop string "the"."""
    lengths = (
        n
        for stop in stops
        for n in range(min(len(stop) - 1, len(text)), 0, -1)
        if text.endswith(stop[:n])
    )
    return max(lengths, default=0)
