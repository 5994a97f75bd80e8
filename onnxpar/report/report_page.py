"""The plan as one HTML page that stands alone: nothing is fetched, and nothing runs in it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import accumulate
from pathlib import Path

from onnxpar.base.shown import html_of
from onnxpar.compiler.plan import Plan
from onnxpar.errors import OnnxparError, StrategyError
from onnxpar.files.write_file import whole_file
from onnxpar.open_sizes.typical import sizes_text
from onnxpar.report.candidates import Candidates
from onnxpar.report.charts import memory_curve, timeline
from onnxpar.report.explain import COLLECTIVE, CUT, NODE, Block, Explained, Operand, Step
from onnxpar.report.report import size_text

NODES_ROOM, COLLECTIVES_ROOM = 1_300_000, 300_000
"""Characters of rows; of what is longer, the page tells how much is left out."""
OPEN = 3
"""Blocks that are unfolded."""

_STYLE = """
. { --line: #8885; --talk: #d9602b; --compute: #3f7fbf;
  --mild: #8882; --hot: #d9602b2e; --cut: #c9a22733;
  font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; }
h1 { font-size: 1.5em; margin-bottom: 0; } h2 { font-size: 1.2em; margin-top: 2em; }
table { border-collapse: collapse; width: 100%; } .wide { overflow-x: auto; }
th, td { text-align: left; padding: 2px 10px 2px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; } th { font-weight: 600; }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
code { font: 12px/1.45 ui-monospace, monospace; overflow-wrap: anywhere; }
code span { white-space: nowrap; }
code i { opacity: .65; font-style: normal; }
tr.collective { background: var(--hot); } tr.cut { background: var(--cut); }
tr.winner { font-weight: 600; } summary { cursor: pointer; padding: 4px 0; }
details { border-left: 3px solid var(--line); padding-left: 10px; margin: 6px 0; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: currentColor; }
.end { text-anchor: end; } .middle { text-anchor: middle; }
.axis { stroke: currentColor; fill: none; opacity: .6; }
.compute { fill: var(--compute); } .talk { fill: var(--talk); }
.memory { fill: var(--compute); fill-opacity: .35; stroke: var(--compute); }
.facts { display: flex; flex-wrap: wrap; gap: 6px 28px; padding: 0; list-style: none; }
"""

"""The first rule is of the block that all others are in."""

Cell = tuple[str, str]
"""HTML of a cell, and its class."""
_NODE_HEADS = (
    ("op", ""),
    ("node", ""),
    ("reads", ""),
    ("makes", ""),
    ("ms", "n"),
    ("sends", "n"),
)
_COLLECTIVE_HEADS = (
    ("tensor", ""),
    ("kind", ""),
    ("layouts", ""),
    ("groups", "n"),
    ("sends", "n"),
    ("ms", "n"),
)


def write_page(
    path: str | os.PathLike[str], explained: Explained, candidates: Candidates | None
) -> None:
    """Writes the page, whole or not at all. Errors: OnnxparError."""
    path = Path(path)
    if not path.parent.is_dir():
        raise OnnxparError(f"{path.parent}: no such folder for the page")
    text = page(explained, candidates)
    with whole_file(path) as file:
        file.write(text)


def page(explained: Explained, candidates: Candidates | None = None) -> str:
    """The page of a plan, and of the candidates beside it."""
    plan = explained.plan
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(plan.model)} over {plan.mesh.size} ranks</title>\n"
        "<style>:root { color-scheme: light dark; }</style>\n</head>\n<body>\n"
        f"{core(explained, candidates)}\n</body>\n</html>\n"
    )


def core(explained: Explained, candidates: Candidates | None = None) -> str:
    """The page without the tags of a document, for a notebook to show among others."""
    parts = [
        *_header(explained),
        *(_candidates(candidates) if candidates is not None else ()),
        "<h2>A rank over time</h2>",
        "<p>What a rank does by the cost model, one step after the other.</p>",
        timeline(explained.steps),
        "<h2>Activations of a rank over the schedule</h2>",
        memory_curve(explained.steps),
        "<h2>Nodes in order</h2>",
        *_blocks(explained),
        "<h2>Collectives in order</h2>",
        *_collectives(explained),
    ]
    return _block(parts)


def explained_of(plan: Plan) -> Explained:
    """The steps of a plan. Errors: StrategyError where there are none."""
    found = plan.explained
    if not isinstance(found, Explained):
        raise StrategyError("of a manual program nothing is predicted; use `run --profile`")
    return found


@html_of.register
def _(plan: Plan) -> str | None:
    return core(plan.explained) if isinstance(plan.explained, Explained) else None


@html_of.register
def _(candidates: Candidates) -> str:
    return _block(_candidates(candidates))


def _block(parts: Iterable[str]) -> str:
    """Parts in a block with a style that leaves what is around it alone."""
    body = "\n".join(parts)
    return f'<div class="onnxpar">\n<style>{_scoped(_STYLE)}</style>\n{body}\n</div>'


def _scoped(style: str) -> str:
    """A style whose selectors are of what is in the block."""

    def rule(found: re.Match[str]) -> str:
        selectors = [s.strip() for s in found[1].split(",")]
        inside = (".onnxpar" if s == "." else f".onnxpar {s}" for s in selectors)
        return f"{', '.join(inside)} {{{found[2]}}}\n"

    return re.sub(r"([^{}]+)\{([^{}]*)\}\s*", rule, style)


def _header(explained: Explained) -> Iterator[str]:
    plan, seconds = explained.plan, explained.predicted
    how = f", {escape(plan.preset)}" if plan.preset else ""
    yield f"<h1>{escape(plan.model)}</h1>"
    yield f"<p>{plan.mesh.size} ranks, mesh <b>{plan.mesh}</b>{how}</p>"
    facts = {
        "predicted": f"{_ms(seconds.total)} ms a run",
        "on one rank": f"{_ms(plan.predicted.one_rank if plan.predicted else 0.0)} ms",
        "compute": f"{_ms(seconds.compute)} ms",
        "communication": f"{_ms(seconds.communication)} ms",
        "sent by a rank": size_text(sum(c.bytes for c in plan.collectives)),
    }
    for key, size in plan.memory.items():
        if size:
            facts[f"{key.removesuffix('_per_rank')} of a rank"] = size_text(size)
    items = "".join(f"<li>{escape(k)}: <b>{escape(v)}</b></li>" for k, v in facts.items())
    yield f'<ul class="facts">{items}</ul>'
    if plan.typical:
        yield f"<p>Sizes are open; costs are at {escape(sizes_text(plan.typical))}.</p>"
    for note in plan.notes:
        yield f"<p>Note: {escape(note)}</p>"


def _candidates(candidates: Candidates) -> Iterator[str]:
    kinds = list(dict.fromkeys(k for c in candidates.found for k in c.sent))
    yield f"<h2>Candidates</h2>\n<p>{escape(candidates.why)}.</p>"
    times = ("run, ms", "compute", "communication", "memory", *kinds)
    heads = [("strategy", ""), ("mesh", ""), *map(_number, times)]
    rows = []
    for candidate in candidates.rows:
        seconds, sent = candidate.predicted, candidate.sent
        mesh = "" if candidate is candidates.one_rank else str(candidate.mesh)
        cells = [(escape(candidate.strategy), ""), (mesh, "")]
        for each in (candidate.seconds, seconds.compute, seconds.communication):
            cells.append(_number(_ms(each)))
        cells.append(_number(size_text(candidate.held)))
        cells += [_number(size_text(sent[k]) if k in sent else "-") for k in kinds]
        rows.append(_row("winner" if candidate is candidates.winner else "", cells))
    yield from _table("candidates", heads, rows)
    if candidates.refused:
        yield "<details><summary>What does not apply</summary><ul>"
        for refused in candidates.refused:
            what = f"{refused.strategy} {refused.mesh}: {refused.reason}"
            yield f"<li>{escape(what)}</li>"
        yield "</ul></details>"


def _blocks(explained: Explained) -> Iterator[str]:
    yield "<p>Reshards are marked: what ranks tell each other, and local cuts.</p>"
    room = NODES_ROOM
    for number, block in enumerate(explained.blocks()):
        yield f"<details{' open' if number < OPEN else ''}><summary>{_title(block)}</summary>"
        rows = [_row(step.kind if step.kind != NODE else "", _cells(step)) for step in block.steps]
        shown = _fitting(rows, room)
        room -= sum(map(len, shown))
        yield from _table("", _NODE_HEADS, shown)
        if len(shown) < len(rows):
            yield f"<p>and {len(rows) - len(shown)} more nodes</p>"
        yield "</details>"


def _fitting(rows: Sequence[str], room: int) -> list[str]:
    """As many of the first rows as have room."""
    ends = accumulate(map(len, rows))
    return [row for row, end in zip(rows, ends, strict=True) if end <= room]


def _title(block: Block) -> str:
    name = block.name or "nodes"
    if block.times > 1:
        name += f" to {block.last}" if block.last != block.name else ""
        name += f", {block.times} times alike"
    seconds = sum(step.predicted.total for step in block.steps)
    talk = sum(step.kind == COLLECTIVE for step in block.steps)
    told = f", {talk} collectives" if talk > 1 else ", a collective" if talk else ""
    each = " each" if block.times > 1 else ""
    count = f"{len(block.steps)} nodes" if len(block.steps) > 1 else "a node"
    return f"<b>{escape(name)}</b>: {count}{told}, {_ms(seconds)} ms{each}"


def _cells(step: Step) -> Iterator[Cell]:
    yield "&nbsp;" * 4 * step.depth + escape(step.op), ""
    yield f"<code>{escape(step.name)}</code>", ""
    yield _operands(step.operands), ""
    yield _operands(step.results), ""
    yield _number(f"{step.predicted.total * 1e3:.4f}")
    yield _number(size_text(step.sent) if step.sent else "")


def _operands(tensors: Iterable[Operand]) -> str:
    return "<br>".join(
        f"<code>{escape(t.name)} <i>{escape(t.shape)}</i> <span>{escape(t.layout)}</span></code>"
        for t in tensors
    )


def _collectives(explained: Explained) -> Iterator[str]:
    if not explained.plan.collectives:
        yield "<p>No collectives.</p>"
        return
    yield "<p>What a collective inside an op takes is told with the first of that op.</p>"
    seconds = {s.name: s.predicted.communication for s in explained.steps if s.kind != CUT}
    rows = []
    for entry in explained.plan.collectives:
        within = seconds.pop(entry.name, None) or seconds.pop(entry.name.split("::")[0], None)
        size = len(entry.group)
        cells = [
            (f"<code>{escape(entry.tensor)}</code>", ""),
            (escape(entry.kind), ""),
            (f"<code>{escape(entry.before)} → {escape(entry.after)}</code>", ""),
            _number(f"{entry.groups} of {size} ranks"),
            _number(size_text(entry.bytes)),
            _number("" if within is None else f"{within * 1e3:.4f}"),
        ]
        rows.append(_row("", cells))
    shown = _fitting(rows, COLLECTIVES_ROOM)
    yield from _table("collectives", _COLLECTIVE_HEADS, shown)
    if len(shown) < len(rows):
        yield f"<p>and {len(rows) - len(shown)} more</p>"


def _table(name: str, heads: Iterable[Cell], rows: Iterable[str]) -> Iterator[str]:
    mark = f' id="{name}"' if name else ""
    yield f'<div class="wide"><table{mark}><thead><tr>'
    yield "".join(_cell("th", text, kind) for text, kind in heads)
    yield "</tr></thead><tbody>"
    yield from rows
    yield "</tbody></table></div>"


def _row(kind: str, cells: Iterable[Cell]) -> str:
    inside = "".join(_cell("td", text, of) for text, of in cells)
    return f'<tr class="{kind}">{inside}</tr>' if kind else f"<tr>{inside}</tr>"


def _cell(tag: str, text: str, kind: str) -> str:
    return f'<{tag} class="{kind}">{text}</{tag}>' if kind else f"<{tag}>{text}</{tag}>"


def _number(text: str) -> Cell:
    return text, "n"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
