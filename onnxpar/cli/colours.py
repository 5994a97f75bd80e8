"""Adds colours to texts on a terminal; the words stay the same."""

from __future__ import annotations

import os
import re
from typing import TextIO

_RED, _GREEN, _YELLOW = 31, 32, 33
_COLOURED = {
    _RED: r"(?<=^onnxpar: )error:|^the outputs differ|^the first that differs|^.*  too large$",
    _GREEN: r"^all outputs agree",
    _YELLOW: r"(?<=^onnxpar: )warning:|^(?:warning|note):",
}
"""Patterns of the words that get each ANSI colour, in any line."""


def coloured(text: str, stream: TextIO) -> str:
    """Returns `text` with ANSI colours on certain words ("error:") if the stream shows colours,
    else as it is."""
    if not _shows_colours(stream):
        return text
    for colour, words in _COLOURED.items():
        text = re.sub(words, rf"\033[{colour}m\g<0>\033[0m", text, flags=re.MULTILINE)
    return text


def _shows_colours(stream: TextIO) -> bool:
    """True for a terminal that knows colours; the variables NO_COLOR and FORCE_COLOR overrule
    that."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return os.environ.get("TERM") != "dumb" and stream.isatty()
