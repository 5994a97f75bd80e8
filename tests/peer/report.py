"""The outcomes of a peer run, counted: by kind, by op, and what is wrong or missed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from peer.outcome import BAD, EXPLAINED, MISSED, REFUSED, ROUNDED, RUNS, UNFIT, Outcome

SHOWN = 40
"""Lines of each kind in a summary."""


def summary(outcomes: Sequence[Outcome], per_kind: int = SHOWN) -> Iterator[str]:
    """The counts, then what is bad, by op; then why runs were refused."""
    kinds = Counter(o.kind for o in outcomes)
    cases = {o.case for o in outcomes if o.kind != UNFIT}
    yield f"{len(cases)} cases; {kinds[UNFIT]} unfit for the unsplit runtime"
    runs = sum(kinds[k] for k in RUNS)
    yield f"{runs} sharded runs: " + ", ".join(f"{kinds[k]} {k}" for k in RUNS)
    rounded = sum(o.detail == ROUNDED for o in outcomes)
    yield f"of these, {rounded} off by up to two units in the last place of float16"
    yield f"splits that rules leave out: {kinds[MISSED]} missed, {kinds[EXPLAINED]} explained"
    for kind in BAD:
        found = [o for o in outcomes if o.kind == kind]
        if found:
            by_op = Counter(o.op for o in found)
            yield f"\n{kind}: " + ", ".join(f"{op} {n}" for op, n in by_op.most_common())
            yield from (f"  {o}" for o in _few_of_each(found, per_kind))
    refused = Counter(_kind_of_refusal(o) for o in outcomes if o.kind == REFUSED)
    yield "\nrefused:"
    yield from (f"  {n} {text}" for text, n in refused.most_common(SHOWN))


def _few_of_each(outcomes: Iterable[Outcome], most: int) -> Iterator[Outcome]:
    """A few outcomes of each op."""
    seen: Counter[str] = Counter()
    for outcome in outcomes:
        seen[outcome.op] += 1
        if seen[outcome.op] <= 3 and sum(seen.values()) <= 3 * most:
            yield outcome


def _kind_of_refusal(outcome: Outcome) -> str:
    words = (w for w in outcome.detail.split() if not any(c in w for c in "'/0123456789["))
    return f"{outcome.op}: {' '.join(words)}"[:160]


def by_op(outcomes: Iterable[Outcome]) -> dict[str, Counter[str]]:
    """How many runs of each kind an op has."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        if outcome.kind in RUNS:
            counts[outcome.op][outcome.kind] += 1
    return counts
