"""The table on a plan's page that shows the graph of a rank beside the model's."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator
from html import escape
from itertools import groupby

from onnxpar.layout.mesh import Mesh
from onnxpar.report.explain import NODE, Explained, Step, repeated
from onnxpar.report.page_tables import Room, code, counted, folded, operands_html, row
from onnxpar.report.pass_tables import TAG
from onnxpar.report.rank_graph import Part, RankGraph, RankNode, Texts

RANKS_ROOM = 900_000
"""Most characters of HTML in the rows of this section."""
FEW = 3
"""More nodes of a rank for one node of the model are folded away."""
_HEADS = (("op", ""), ("node", ""), ("in the model", ""), ("on the rank", ""))
Pair = tuple[Step, tuple[RankNode, ...]]
"""A step of the model's graph, and the nodes that ranks run for it."""


class _Varying:
    """Collects texts that differ between ranks, so that the page has each list of them once."""

    def __init__(self) -> None:
        self.lists: dict[Texts, int] = {}

    def html(self, texts: Texts) -> str:
        """Returns the HTML of rank 0's text, marked so that a script can replace it by another
        rank's."""
        if len(texts) == 1:
            return escape(texts[0])
        number = self.lists.setdefault(texts, len(self.lists))
        return f'<b data-of="{number}">{escape(texts[0])}</b>'


def rank_tables(explained: Explained, graph: RankGraph) -> Iterator[str]:
    """Yields the HTML of the section of ranks: a table of the model's nodes with the nodes of a
    rank beside them, and the texts of other ranks for the script."""
    mesh, varying = explained.plan.mesh, _Varying()
    yield "<h2>A rank's graph beside the model's</h2>"
    yield (
        "<p>Each node of the model with the whole shapes of its tensors, and what a rank runs for "
        "it, with the shapes that the rank holds. <code>[:, 4:8]</code> are the elements of an "
        "input or a weight that it has.</p>"
    )
    yield _choice(mesh, graph.ranks)
    pairs = [(step, tuple(graph.nodes.get(step.name, ()))) for step in explained.steps]
    room, number = Room(RANKS_ROOM), 0
    for name, group in groupby(pairs, key=lambda pair: pair[0].block):
        for part, times in repeated(list(group), _sign):
            rows = [_row(pair, varying) for pair in part]
            title = f"<b>{escape(name)}</b>: " if name else ""
            title += f"{times} times " if times > 1 else ""
            title += counted(len(part), "nodes")
            yield from folded(title, f"rank-{number}", _HEADS, rows, room, number == 0)
            number += 1
    texts = json.dumps(list(varying.lists)).replace("<", "\\u003c")
    yield f'<script type="application/json" class="texts">{texts}</script>'


def _choice(mesh: Mesh, ranks: int) -> str:
    """Returns a field for choosing a rank, hidden until the script shows it."""
    options = []
    for rank in range(ranks):
        at = ", ".join(f"{n}={mesh.coordinate((mesh.axis(n),), rank)}" for n in mesh.sizes)
        options.append(f'<option value="{rank}">{rank}: {escape(at)}</option>')
    more = f" of {mesh.size:,}; the page has the first {ranks}" if ranks < mesh.size else ""
    return (
        f'<form class="rank" hidden><label>Rank <select>{"".join(options)}</select>{more}'
        "</label></form><noscript><p>Rank 0.</p></noscript>"
    )


def _sign(pair: Pair) -> Hashable:
    """Returns a key that is equal for pairs that are equal except for names."""
    step, nodes = pair
    own = tuple((o.shape, o.layout) for o in (*step.operands, *step.results))
    parts = tuple((n.op, *map(_part_sign, (*n.operands, *n.results))) for n in nodes)
    return step.op, own, parts, tuple(TAG.sub("", a) for n in nodes for a in n.attributes)


def _part_sign(part: Part) -> Hashable:
    return part.shapes, part.spans, part.layout


def _row(pair: Pair, varying: _Varying) -> str:
    step, nodes = pair
    tensors = operands_html(step.operands), operands_html(step.results)
    own = "<br>".join(_node(node, varying) for node in nodes)
    if len(nodes) > FEW:
        ops = ", ".join(escape(node.op) for node in nodes)
        own = f"<details><summary>{len(nodes)} nodes: {ops}</summary>{own}</details>"
    cells = [(escape(step.op), ""), code(step.name), (_edges(*tensors), "operands")]
    return row(step.kind if step.kind != NODE else "", [*cells, (own or "nothing", "operands")])


def _node(node: RankNode, varying: _Varying) -> str:
    texts = tuple(text.strip(" {}") for text in node.attributes)
    edges = _edges(_parts(node.operands, varying), _parts(node.results, varying))
    return f"<b>{escape(node.op)}</b> <code><i>{varying.html(texts)}</i></code><br>{edges}"


def _edges(inputs: str, outputs: str) -> str:
    return "<br>".join(filter(None, (inputs, outputs and f"→ {outputs}")))


def _parts(parts: Iterable[Part], varying: _Varying) -> str:
    return "<br>".join(
        f"<code>{escape(part.name)} <i>{varying.html(part.shapes)} {varying.html(part.spans)}</i> "
        f"<span>{escape(part.layout)}</span></code>"
        for part in parts
    )
