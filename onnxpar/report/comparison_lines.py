"""The text that `plan --compare` prints about predicted and measured times."""

from __future__ import annotations

from collections.abc import Iterator

from onnxpar.base.shown import text_of
from onnxpar.report.comparison_result import Communicated, Comparison, Computed
from onnxpar.report.plan_text import size_text, table

WORST = 10
_HEADS = ("predicted", "measured")


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Yields the lines: totals, times by type of op, times by collective, and the worst
    predictions."""
    mesh = ",".join(f"{name}={size}" for name, size in comparison.mesh)
    runs, recorded = comparison.runs, comparison.recorded
    whole = f"{runs} run{'s' if runs > 1 else ''}"
    middle = f"the middle {runs} of {recorded} runs"
    yield f"{comparison.model} over the mesh {mesh}"
    yield f"milliseconds of a run, mean of {middle if runs < recorded else whole}:"
    yield from _totals(comparison)
    yield ""
    yield f"by op, on rank {comparison.rank}, which computes longest:"
    types = comparison.op_types()
    yield from table(
        [(t.op, t.nodes, *_times(t.predicted, t.measured)) for t in types],
        ("op", "nodes", *_times_heads()),
    )
    if comparison.talked:
        yield ""
        yield "by collective, averaged over the ranks:"
        yield from table(
            [_collective(t) for t in comparison.talked],
            ("tensor", "kind", "calls", "bytes", *_times_heads(), "waiting".rjust(9)),
        )
    yield ""
    yield "worst predictions:"
    rows = [(*_worst(row), *_times(row.predicted, row.measured)) for row in comparison.worst()]
    yield from table(rows[:WORST], ("node", "op", "calls", *_times_heads()))
    if comparison.sizes:
        yield ""
        yield f"sizes are open: predictions are for {comparison.sizes}"


@text_of.register
def _(comparison: Comparison) -> str:
    return "\n".join(comparison_lines(comparison))


def _totals(comparison: Comparison) -> Iterator[str]:
    predicted, measured = comparison.predicted, comparison.measured
    rest = comparison.length - measured.total - comparison.wait
    rows = [
        ("compute", *_times(predicted.compute, measured.compute)),
        ("communication", *_times(predicted.communication, measured.communication)),
        ("waiting", *_times(None, comparison.wait)),
        ("between nodes", *_times(None, max(rest, 0.0))),
    ]
    session, own = comparison.session or 0.0, comparison.predicted_session
    if comparison.session is not None:
        rows.append(("session", *_times(own or None, session)))
    rows.append(("a run", *_times(predicted.total + own, comparison.length + session)))
    yield from table(rows, ("", *_times_heads()))


def _collective(row: Communicated) -> tuple[str | int, ...]:
    sent = "?" if row.bytes is None else size_text(row.bytes)
    times = _times(row.predicted, row.measured)
    tensors = row.tensor.split()
    is_bucket = len(tensors) > 1 and not row.tensor.startswith("in ")
    tensor = f"{tensors[0]} and {len(tensors) - 1} more" if is_bucket else row.tensor
    return tensor, row.kind, row.calls, sent.rjust(8), *times, _ms(row.wait)


def _worst(row: Computed | Communicated) -> tuple[str, str, int]:
    if isinstance(row, Communicated):
        return row.node, row.kind, row.calls
    name = row.nodes[0] if row.nodes else "(added by onnxruntime)"
    others = f" and {len(row.nodes) - 1} more" if len(row.nodes) > 1 else ""
    return name + others, row.label, row.calls


def _times(predicted: float | None, measured: float) -> tuple[str, str, str]:
    """Returns predicted and measured milliseconds, and measured / predicted, as text in columns."""
    ratio = f"{measured / predicted:.2f}" if predicted else ""
    return "".rjust(9) if predicted is None else _ms(predicted), _ms(measured), ratio.rjust(7)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}".rjust(9)


def _times_heads() -> tuple[str, ...]:
    return (*(head.rjust(9) for head in _HEADS), "ratio".rjust(7))
