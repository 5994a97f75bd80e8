"""The plan as one self-contained HTML page: it loads nothing from elsewhere, and works without its
scripts, which only filter the tables and choose the rank."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from onnxpar.base.errors import OnnxparError, StrategyError
from onnxpar.base.shown import html_of
from onnxpar.base.write_file import whole_file
from onnxpar.compiler.plan import Plan
from onnxpar.graph.typical import sizes_text
from onnxpar.report.charts import memory_curve, timeline
from onnxpar.report.compare_strategies import Candidates
from onnxpar.report.explain import Explained
from onnxpar.report.layout_key import layout_key
from onnxpar.report.page_tables import collectives, ms_text, nodes, number, row, table, tensors
from onnxpar.report.pass_tables import passes
from onnxpar.report.plan_text import load_rows, size_text
from onnxpar.report.proof_text import proof_text
from onnxpar.report.rank_tables import rank_tables
from onnxpar.report.walk import Walk

_SEARCH = (
    '<form class="search" role="search" hidden><label>Filter the tables '
    '<input type="search" placeholder="MatMul [-, tp]" autocomplete="off" '
    'spellcheck="false"></label><output></output></form>'
)
"""The search box. The script shows it; without scripts it would do nothing, and so stays hidden."""


def write_page(
    path: str | os.PathLike[str],
    explained: Explained,
    candidates: Candidates | None,
    walk: Walk | None = None,
) -> None:
    """Writes the HTML page of a plan to a file; if that fails, leaves no half-written file.

    candidates  a table of compared strategies to add; None: there is none
    walk        the changes by each pass, and the ranks' graphs, to add

    Errors: OnnxparError.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise OnnxparError(f"{path.parent}: no such folder for the page")
    text = page(explained, candidates, walk)
    with whole_file(path) as file:
        file.write(text)


def page(
    explained: Explained, candidates: Candidates | None = None, walk: Walk | None = None
) -> str:
    """Returns the HTML page of a plan; parameters as for `write_page`."""
    plan = explained.plan
    scripts = [_part("search.js"), *([_part("rank.js")] if walk is not None else ())]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(plan.model)} over {plan.mesh.size} ranks</title>\n"
        f"<style>{_part('document.css')}</style>\n</head>\n<body>\n"
        f"{core(explained, candidates, walk)}\n<script>{''.join(scripts)}</script>\n"
        "</body>\n</html>\n"
    )


def core(
    explained: Explained, candidates: Candidates | None = None, walk: Walk | None = None
) -> str:
    """Returns the body of the page, without the tags of a document, for a notebook; parameters as
    for `write_page`."""
    parts = [
        *_header(explained),
        *(_candidates(candidates) if candidates is not None else ()),
        *(_which(explained.plan) if candidates is not None else ()),
        "<h2>Timeline of a rank</h2>",
        "<p>Predicted by the cost model: the rank runs its nodes and collectives one after the "
        "other.</p>",
        timeline(explained.steps),
        "<h2>Activation memory of a rank</h2>",
        "<p>Bytes of activations that the rank holds at each moment of the timeline.</p>",
        memory_curve(explained.steps),
        *layout_key(),
        _SEARCH,
        *_section(tensors(explained.plan)),
        *_section(nodes(explained)),
        *_section(collectives(explained)),
    ]
    if walk is not None:
        parts += _section(passes(walk.steps))
        parts += _section(rank_tables(explained, walk.ranks))
    return _block(parts)


def _section(parts: Iterable[str]) -> Iterator[str]:
    """Yields the HTML of tables under one heading; the search box hides the section if nothing in
    it matches."""
    yield "<section>"
    yield from parts
    yield "</section>"


def explained_of(plan: Plan) -> Explained:
    """Returns the predicted steps of a plan. Errors: StrategyError for a manual program, which has
    none."""
    explained = plan.explained
    if not isinstance(explained, Explained):
        raise StrategyError("of a manual program nothing is predicted; use `run --profile`")
    return explained


@html_of.register
def _(plan: Plan) -> str | None:
    return core(plan.explained) if isinstance(plan.explained, Explained) else None


@html_of.register
def _(candidates: Candidates) -> str:
    return _block(_candidates(candidates))


def _block(parts: Iterable[str]) -> str:
    """Returns these parts as a block whose style does not affect the page around it."""
    body = "\n".join(parts)
    return f'<div class="onnxpar">\n<style>{_part("block.css")}</style>\n{body}\n</div>'


def _part(name: str) -> str:
    """Returns the content of a file with a style or script of the page."""
    return (Path(__file__).parent / "page" / name).read_text(encoding="utf-8")


def _header(explained: Explained) -> Iterator[str]:
    plan, seconds = explained.plan, explained.predicted
    how = f", strategy <b>{escape(plan.preset)}</b>" if plan.preset else ""
    yield f"<h1>{escape(plan.model)}</h1>"
    yield f"<p>{plan.mesh.size} ranks, mesh <b>{plan.mesh}</b>{how}</p>"
    alone = plan.predicted.one_rank if plan.predicted else 0.0
    facts = {
        "one run": f"{ms_text(seconds.total)} ms",
        "compute": f"{ms_text(seconds.compute)} ms",
        "communication": f"{ms_text(seconds.communication)} ms",
        f"one run on {'the fastest' if plan.loads else 'one'} rank": f"{ms_text(alone)} ms",
        "sent per rank": size_text(sum(c.bytes for c in plan.collectives)),
    }
    for key, size in plan.memory.items():
        if size:
            facts[f"{key.removesuffix('_per_rank')} per rank"] = size_text(size)
    items = (f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())
    yield f'<dl class="facts">{"".join(items)}</dl>'
    if plan.loads:
        heads, rows = load_rows(plan.to_json()["loads"])
        cells = [(escape(head), "n" if i else "") for i, head in enumerate(heads)]
        body = (row("", [number(f"{c:,}" if isinstance(c, int) else c) for c in r]) for r in rows)
        yield from table("loads", cells, body)
    yield "<p>Times are predictions of the cost model.</p>"
    if plan.proof is not None:
        yield f"<p>The search: {escape(proof_text(plan.proof.to_json()))}.</p>"
    if plan.typical:
        sizes = escape(sizes_text(plan.typical))
        yield f"<p>The model leaves sizes open. Shapes, times and bytes are for {sizes}.</p>"
    for note in plan.notes:
        yield f"<p>Note: {escape(note)}</p>"


def _which(plan: Plan) -> Iterator[str]:
    """Yields a line that names the strategy whose plan the page shows; it need not be the
    fastest."""
    strategy = escape(f"{plan.preset or 'the strategy'} {plan.mesh}")
    yield f"<p>The rest of this page shows the plan of <b>{strategy}</b>.</p>"


def _candidates(candidates: Candidates) -> Iterator[str]:
    kinds = list(dict.fromkeys(k for c in candidates.found for k in c.sent))
    yield f"<h2>Candidates</h2>\n<p>{escape(candidates.why)}.</p>"
    heads = [("strategy", ""), ("mesh", "")]
    heads += map(number, ("run, ms", "compute, ms", "communication, ms", "memory per rank"))
    heads += [number(f"{kind}, sent") for kind in kinds]
    rows = []
    for candidate in candidates.rows:
        seconds, sent = candidate.predicted, candidate.sent
        mesh = "" if candidate is candidates.one_rank else str(candidate.mesh)
        cells = [(escape(candidate.strategy), ""), (mesh, "")]
        for each in (candidate.seconds, seconds.compute, seconds.communication):
            cells.append(number(ms_text(each)))
        cells.append(number(size_text(candidate.held)))
        cells += [number(size_text(sent[k]) if k in sent else "-") for k in kinds]
        rows.append(row("winner" if candidate is candidates.winner else "", cells))
    yield from table("candidates", heads, rows)
    if candidates.refused:
        yield "<details><summary>Strategies that do not apply</summary><ul>"
        for refused in candidates.refused:
            what = f"{refused.strategy} {refused.mesh}: {refused.reason}"
            yield f"<li>{escape(what)}</li>"
        yield "</ul></details>"
