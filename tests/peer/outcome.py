"""What became of one run of a case."""

from __future__ import annotations

from dataclasses import dataclass

SPLIT, GATHERED, LIMITED, REFUSED = "split", "gathered", "limited", "refused"
WRONG, CRASH, HANG = "wrong", "crash", "hang"
MISSED, EXPLAINED, UNFIT = "missed", "explained", "unfit"
ROUNDED = "float16 rounded once more"
"""The detail of a good run that is off by up to two units in the last place."""
RUNS = (SPLIT, GATHERED, LIMITED, REFUSED, WRONG, CRASH, HANG)
BAD = (WRONG, CRASH, HANG, MISSED)


@dataclass(frozen=True)
class Outcome:
    """A run, or a finding, of a case.

    kind    a run: computed on parts, gathered, right but for sizes that it refuses (limited),
            refused, wrong, crash or hang; a finding: a split
            that the rule misses without a reason, or with one; a case that is unfit for the
            unsplit runtime
    op      the op that first reads what is split
    detail  what went wrong, why it was refused, what a missed split gives
    reason  why the rule keeps what was split whole
    """

    case: str
    split: str
    op: str
    kind: str
    detail: str = ""
    reason: str = ""

    def __str__(self) -> str:
        notes = "; ".join(n for n in (self.detail, self.reason) if n)
        return f"{self.kind}: {self.case} ({self.op}) {self.split}: {notes}"
