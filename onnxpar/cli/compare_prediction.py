"""Compares measured times with the predictions of a plan, in words."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnxpar.runtime.profile.trace import Trace

_FAR = 1.5
"""A measured time that differs from the prediction by more than this factor gets an explanation."""


def compare_prediction(
    predicted: Mapping[str, float], measured: float, what: str, trace: Trace | None = None
) -> str:
    """Returns a sentence that compares the time of a run or step with its prediction. If they
    differ by more than _FAR, the sentence names the part that differs most, as far as a trace shows
    it.

    predicted  seconds by part, with their `total`, as in plan.json
    measured   seconds
    what       the word for what was measured: "run" or "step"
    """
    total = predicted["total"]
    ratio = measured / total
    said = f"predicted: {total * 1e3:.3f} ms; a {what} takes {ratio:.2f} times as long"
    if 1 / _FAR <= ratio <= _FAR:
        return said
    if trace is None:
        return f"{said}; --profile FILE, and `onnxpar plan --compare FILE`, show where they differ"
    parts = _parts(trace)
    most = max(parts, key=lambda kind: abs(parts[kind] - predicted.get(kind, 0.0)))
    return (
        f"{said}, mostly in {most}: {parts[most] * 1e3:.3f} ms, predicted "
        f"{predicted.get(most, 0.0) * 1e3:.3f}"
    )


def _parts(trace: Trace) -> dict[str, float]:
    """Returns the seconds of a run by the parts of a prediction ("compute", "communication",
    "session"), and the time between nodes, for the rank with the most compute."""
    parts = max((trace.parts(rank) for rank in range(trace.ranks)), key=itemgetter("compute"))
    return {
        "compute": parts["compute"],
        "communication": parts["communication"] + parts["waiting"],
        "session": trace.session(trace.runs()) or 0.0,
        "onnxruntime, between nodes": parts["idle"],
    }
