"""Tables on a plan's page that show what each pass changed."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from html import escape
from itertools import groupby, zip_longest

from onnxpar.report.explain import Operand, repeated
from onnxpar.report.page_tables import Room, code, counted, folded, row
from onnxpar.report.pass_steps import ADDED, CHANGED, KEPT, REMOVED, Change, NodeText, PassStep

PASSES_ROOM = 900_000
"""Most characters of HTML in the rows of all passes."""
_HEADS = (
    ("op", ""),
    ("node", ""),
    ("inputs", ""),
    ("outputs", ""),
    ("attributes", ""),
)
TAG = re.compile(r"\btag=\d+")
Kept = int
"""The number of successive nodes that a pass left as they were."""


def passes(steps: Sequence[PassStep]) -> Iterator[str]:
    """Yields the HTML of the section of passes, with a table for each; passes that changed nothing
    are only named."""
    yield "<h2>Passes, in the order in which they ran</h2>"
    marks = ", ".join(f'<span class="mark {k}">{k}</span>' for k in (ADDED, REMOVED, CHANGED))
    yield (
        f"<p>What each pass did to the graph: nodes that it {marks}. An arrow is between "
        "what a node had before and after. A tensor without a layout is whole on every rank.</p>"
    )
    room = Room(PASSES_ROOM)
    for number, step in enumerate(steps):
        if not step.is_idle:
            rows = [*_asked_rows(step.asked), *_rows(step)]
            yield from folded(_title(step), f"pass-{number}", _HEADS, rows, room, False)
    idle = ", ".join(step.name for step in steps if step.is_idle)
    if idle:
        yield f"<p>Changed nothing: {escape(idle)}.</p>"


def _title(step: PassStep) -> str:
    counts = [f"{step.count(kind):,} {kind}" for kind in (ADDED, REMOVED, CHANGED, KEPT)]
    told = [count for count in counts if not count.startswith("0 ")]
    if step.asked:
        told.insert(0, counted(len(step.asked), "requests"))
    if step.reordered:
        told.append("in another order")
    return f"<b>{escape(step.name)}</b>: {', '.join(told)}"


def _asked_rows(asked: Iterable[str]) -> Iterator[str]:
    """Yields a row for each request of a layout; requests that are equal except for names are
    listed once."""
    told = [line.removeprefix("annotate ").partition(": ") for line in asked]
    for part, times in repeated(told, lambda each: each[2]):
        if times > 1:
            yield _again(counted(len(part), "requests"), times)
        for name, _, layout in part:
            what = f"<code>{escape(layout)}</code>"
            cells = [("request", ""), code(name), ("", ""), (what, ""), ("", "")]
            yield row(ADDED, cells)


def _again(what: str, times: int) -> str:
    return _note(f"The next {what} stand for {times} repetitions, with other names")


def _rows(step: PassStep) -> Iterator[str]:
    """Yields the rows of a pass: unchanged nodes are only counted, and changes that are equal
    except for names are listed once."""
    for part, times in repeated(list(_counted(step.changes)), _sign):
        if times > 1:
            named = [c for c in part if isinstance(c, Change)]
            yield _again(counted(len(named), "nodes"), times)
        for each in part:
            yield _row(each) if isinstance(each, Change) else _note(f"{each:,} unchanged")


def _counted(changes: Iterable[Change]) -> Iterator[Change | Kept]:
    for kept, group in groupby(changes, key=lambda change: change.kind == KEPT):
        if kept:
            yield sum(1 for _ in group)
        else:
            yield from group


def _sign(change: Change | Kept) -> Hashable:
    """Returns a key that is equal for changes that are equal except for names."""
    if not isinstance(change, Change):
        return change
    return tuple(
        None
        if node is None
        else (
            node.op,
            tuple(t.layout for t in node.operands),
            tuple(t.layout for t in node.results),
            TAG.sub("", node.attributes),
        )
        for node in (change.before, change.after)
    )


def _note(text: str) -> str:
    return f'<tr class="note"><td colspan="{len(_HEADS)}">{text}</td></tr>'


def _row(change: Change) -> str:
    before, after = change.before, change.after
    shown = after or before
    assert shown is not None
    old, new = before or shown, after or shown
    cells = [
        (f"{_text(old.op, new.op)}<br>{change.kind}", ""),
        (f"<code>{_text(old.name, new.name)}</code>", ""),
        (_operands(old.operands, new.operands), "operands"),
        (_operands(old.results, new.results), "operands"),
        (f"<code>{_attributes(old, new)}</code>", ""),
    ]
    return row(change.kind, cells)


def _operands(old: Iterable[Operand], new: Iterable[Operand]) -> str:
    return "<br>".join(
        f"<code>{_text(a.name if a else '', b.name if b else '')} "
        f"<span>{_layouts(a, b)}</span></code>"
        for a, b in zip_longest(old, new)
    )


def _layouts(old: Operand | None, new: Operand | None) -> str:
    if old is None or new is None or old.layout == new.layout:
        return escape((old or new or Operand("", "", "")).layout)
    return _text(old.layout or "whole", new.layout or "whole")


def _attributes(old: NodeText, new: NodeText) -> str:
    """Returns the HTML of a node's attributes; if a pass changed them, of both versions; if it
    changed only other things, nothing."""
    if old.attributes == new.attributes:
        return escape(new.attributes.strip(" {}")) if old is new else ""
    return _text(old.attributes.strip(" {}"), new.attributes.strip(" {}"))


def _text(old: str, new: str) -> str:
    """Returns the HTML of a text; if it changed, of the old and the new one with an arrow between
    them."""
    if old == new:
        return escape(new)
    both = (f"<{tag}>{escape(t)}</{tag}>" for tag, t in (("del", old), ("ins", new)) if t)
    return " → ".join(both)
