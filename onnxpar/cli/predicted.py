"""Compares measured times with what a plan predicts, in words."""

from __future__ import annotations

_FAR = 1.5
"""A prediction that is so many times too long or too short deserves a look at where it is so."""


def compared(predicted: float, measured: float, what: str) -> str:
    """Returns a sentence on how long a run or step (`what`) takes, beside what was predicted of it;
    times are in seconds."""
    ratio = measured / predicted
    said = f"predicted: {predicted * 1e3:.3f} ms; a {what} takes {ratio:.2f} times as long"
    if 1 / _FAR <= ratio <= _FAR:
        return said
    return f"{said}; --profile FILE, and `onnxpar plan --compare FILE`, show where they differ"
