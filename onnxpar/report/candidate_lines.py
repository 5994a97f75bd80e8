"""The text that `plan --candidates` prints."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from onnxpar.base.shown import text_of
from onnxpar.report.compare_strategies import Candidates
from onnxpar.report.plan_text import WIDTH, size_text, table
from onnxpar.search.objective import LATENCY

_TIMES = ("run", "compute", "communication")
_MEMORY = {
    "weights_per_rank": "weights",
    "states_per_rank": "states",
    "activations_per_rank": "activations",
}


def candidate_lines(candidates: Candidates) -> Iterator[str]:
    """Yields the lines of a comparison of strategies: a table of times and memory, a table of bytes
    by kind of collective, and the strategies that do not apply."""
    yield f"{candidates.model} over {candidates.ranks} ranks, the fastest strategy first"
    of = "the longer of compute and communication" if candidates.objective != LATENCY else "latency"
    yield f"predicted milliseconds per run ({of}), and memory per rank:"
    held = [k for k in _MEMORY if any(c.memory.get(k) for c in candidates.rows)]
    heads = [*_TIMES, *(_MEMORY[k] for k in held), "total"]
    rows = [
        (
            candidate.label + (" *" if candidate is candidates.winner else ""),
            *(f"{s * 1e3:.3f}" for s in times),
            *(size_text(candidate.memory.get(k, 0)) for k in held),
            size_text(candidate.held),
        )
        for candidate in candidates.rows
        for p in [candidate.predicted]
        for times in [(candidate.seconds, p.compute, p.communication)]
    ]
    yield from _right(rows, ("strategy", *heads))
    yield ""
    yield from wrap(candidates.why, WIDTH)
    yield ""
    kinds = list(dict.fromkeys(k for c in candidates.found for k in c.sent))
    if kinds:
        yield "bytes that a rank sends in a run, by kind of collective:"
        sent = [
            (c.label, *(size_text(c.sent[k]) if k in c.sent else "-" for k in kinds))
            for c in candidates.found
        ]
        yield from _right(sent, ("strategy", *kinds))
        yield ""
    if candidates.refused:
        yield "strategies that do not apply:"
        for refused in candidates.refused:
            text = f"{refused.strategy} {refused.mesh}: {refused.reason.split(';')[0]}"
            yield from wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")


@text_of.register
def _(candidates: Candidates) -> str:
    return "\n".join(candidate_lines(candidates))


def _right(rows: list[tuple[str, ...]], head: tuple[str, ...]) -> Iterator[str]:
    """Yields the lines of a table of numbers with units: all columns but the first are aligned to
    the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    first, *others = [
        (line[0], *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True)))
        for line in (head, *rows)
    ]
    yield from table(others, first)
