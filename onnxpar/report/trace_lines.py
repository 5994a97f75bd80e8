"""The text of a trace of recorded runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnxpar.report.plan_text import table
from onnxpar.runtime.profile.trace import ExpertLoad, NodeTimes, Trace

SLOWEST = 10
_MIXTURES = 4
"""So many mixtures of experts are listed."""
_ENDS = 8
"""Of a mixture with more than twice as many experts, so many with most tokens and so many with
fewest are listed."""
_PARTS = ("compute", "communication", "waiting", "idle", "total")


def trace_lines(trace: Trace) -> Iterator[str]:
    """Yields the lines: the time of each rank by kind, and the slowest nodes."""
    for program in sorted({span.program for span in trace.spans}):
        count = len(trace.runs(program))
        what = f"{count} {program or 'run'}{'s' if count > 1 else ''}"
        left = trace.left_out if not program else 0
        after = f" after {left} warm-up run{'s' if left > 1 else ''}" if left else ""
        yield f"{what}{after}, in milliseconds of each:"
        parts = [trace.parts(rank, program) for rank in range(trace.ranks)]
        texts = [[f"{seconds * 1e3:.3f}" for seconds in each.values()] for each in parts]
        rows = [(rank, *_columns(each, _PARTS)) for rank, each in enumerate(texts)]
        yield from table(rows, ("rank", *_heads(_PARTS)))
        yield from _transfers(trace, program)
        session = None if program else trace.session(trace.runs())
        if session is not None:
            yield f"beside that, the session takes {session * 1e3:.3f} ms of a run"
        yield ""
    busy = sum(event.own for event in trace.events)
    if busy:
        yield f"nodes that took longest, of {busy * 1e3:.3f} ms on all ranks:"
        head = ("ms a call", "waiting", "share")
        slowest = trace.nodes()[:SLOWEST]
        rows = [(_name(n), n.op, n.calls, *_columns(_times(n, busy), head)) for n in slowest]
        yield from table(rows, ("node", "op", "calls", *_heads(head)))
        yield ""
    for load in trace.experts[:_MIXTURES]:
        yield from expert_lines(load)
        yield ""
    if len(trace.experts) > _MIXTURES:
        yield f"the trace has the tokens of {len(trace.experts) - _MIXTURES} more mixtures"
    if trace.dropped:
        yield (
            f"onnxruntime records a million events per rank; it dropped {trace.dropped:,}, so the "
            "last runs are missing"
        )


def expert_lines(load: ExpertLoad) -> Iterator[str]:
    """Yields the lines about a mixture: the tokens of each expert; of many experts, only of the
    experts with most and with fewest tokens."""
    total = sum(load.tokens)
    runs = f"{load.runs} run{'s' if load.runs > 1 else ''}"
    yield f"tokens per expert of {load.mixture}, {total:,} in {runs}:"
    order = sorted(range(len(load.tokens)), key=lambda i: -load.tokens[i])
    shown = range(len(order)) if len(order) <= 2 * _ENDS else [*order[:_ENDS], *order[-_ENDS:]]
    head = ("tokens", "share")
    rows = [(i, *_columns(_of_expert(load.tokens[i], total), head)) for i in shown]
    yield from table(rows, ("expert", *_heads(head)))
    if len(shown) < len(order):
        yield f"{len(order) - len(shown)} experts are between the two halves"


def _of_expert(tokens: int, total: int) -> list[str]:
    return [f"{tokens:,}", f"{tokens / max(total, 1):.1%}"]


def _transfers(trace: Trace, program: str) -> Iterator[str]:
    """Yields a line about communication on a thread beside compute, if there is any."""
    runs = set(trace.runs(program))
    sent = [e for e in trace.events if e.run in runs and e.collective and e.collective.transfer]
    if sent:
        total, hidden = (
            sum(times) * 1e3 / (len(runs) * trace.ranks)
            for times in ([e.busy[1] for e in sent], [e.hidden for e in sent])
        )
        yield (
            f"a thread of each rank communicated for {total:.3f} ms, {hidden:.3f} ms of which the "
            "rank did not wait for"
        )


def _times(node: NodeTimes, busy: float) -> list[str]:
    waiting = node.wait * 1e3 / node.calls
    is_collective = node.collective is not None
    return [
        f"{node.mean * 1e3:.3f}",
        f"{waiting:.3f}" if is_collective else "",
        f"{node.seconds / busy:.1%}",
    ]


def _name(node: NodeTimes) -> str:
    """Returns the name of the global node, and how many other nodes onnxruntime fused with it. For
    a collective, its own name, because an op may contain several."""
    if node.collective or not node.nodes or node.nodes == (node.name,):
        return node.name
    others = f" and {len(node.nodes) - 1} more" if len(node.nodes) > 1 else ""
    return node.nodes[0] + others


def _columns(texts: Sequence[str], heads: Sequence[str]) -> list[str]:
    """Returns the texts aligned to the right, as wide as their heads."""
    return [text.rjust(max(len(head), 9)) for text, head in zip(texts, heads, strict=True)]


def _heads(heads: Sequence[str]) -> list[str]:
    return [head.rjust(9) for head in heads]
