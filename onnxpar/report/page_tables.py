"""Tables on a plan's page: tensors, nodes and collectives, in blocks that can be collapsed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import accumulate

from onnxpar.compiler.plan import Plan, Port
from onnxpar.layout.mesh import Mesh
from onnxpar.report.explain import COLLECTIVE, CUT, NODE, UPDATE, Block, Explained, Operand, Step
from onnxpar.report.plan_text import shape_text, size_text

TENSORS_ROOM, NODES_ROOM, COLLECTIVES_ROOM = 300_000, 1_300_000, 300_000
"""Most characters of HTML in the rows of each section. Further rows are left out, and the page says
how many."""
OPEN = 3
"""So many blocks of nodes are expanded at first."""
FEW = 20
"""A block of tensors with at most this many rows is expanded at first."""

Cell = tuple[str, str]
"""(HTML of a cell, its CSS class)."""
_PORT_HEADS = (("tensor", ""), ("type", ""), ("shape", ""), ("layout", ""))
_WEIGHT_HEADS = (
    ("tensor", ""),
    ("type", ""),
    ("shape", ""),
    ("layout", ""),
    ("size", "n"),
    ("per rank", "n"),
)
_NODE_HEADS = (
    ("op", ""),
    ("node", ""),
    ("inputs", ""),
    ("outputs", ""),
    ("ms", "n"),
    ("sent per rank", "n"),
)
_COLLECTIVE_HEADS = (
    ("tensor", ""),
    ("kind", ""),
    ("layout before → after", ""),
    ("groups", "n"),
    ("sent per rank", "n"),
    ("ms", "n"),
)


class Room:
    """The number of characters of HTML that a section may still have."""

    def __init__(self, left: int) -> None:
        self.left = left

    def fitting(self, rows: Sequence[str]) -> list[str]:
        """Returns as many of the first rows as fit, and subtracts their lengths from `left`."""
        ends = accumulate(map(len, rows))
        shown = [row for row, end in zip(rows, ends, strict=True) if end <= self.left]
        self.left -= sum(map(len, shown))
        return shown


def tensors(plan: Plan) -> Iterator[str]:
    """Yields the HTML of the section of tensors: a block each for inputs, states, outputs and
    weights."""
    yield "<h2>Tensors</h2>"
    room = Room(TENSORS_ROOM)
    follows = dict(plan.states)
    kinds = {
        "inputs": [p for p in plan.inputs if p.name not in follows],
        "states": [p for p in plan.inputs if p.name in follows],
        "outputs": [p for p in plan.outputs if p.name not in follows.values()],
    }
    for kind, ports in kinds.items():
        rows = [row("", _port(port, plan.mesh)) for port in ports]
        title = f"<b>{counted(len(rows), kind)}</b>"
        if kind == "states":
            title += ", which ranks can keep between runs"
        yield from folded(title, kind, _PORT_HEADS, rows, room, len(rows) <= FEW)
    rows = []
    for weight in plan.weights:
        cells = [code(weight.name), (escape(weight.dtype), ""), (shape_text(weight.shape), "")]
        sizes = (number(size_text(s)) for s in (weight.bytes, weight.bytes_per_rank))
        rows.append(row("", [*cells, code(weight.layout_text), *sizes]))
    title = f"<b>{counted(len(rows), 'weights')}</b>"
    yield from folded(title, "weights", _WEIGHT_HEADS, rows, room, len(rows) <= FEW)


def _port(port: Port, mesh: Mesh) -> Iterator[Cell]:
    yield code(port.name)
    yield escape(port.dtype or port.type), ""
    yield escape(shape_text(port.shape if port.open is None else port.open.shape)), ""
    yield code("" if port.layout is None else port.layout.text(mesh))


def counted(count: int, kind: str) -> str:
    """Returns `1 input` or `3 inputs`; `kind` is the plural."""
    return f"{count} {kind if count != 1 else kind.removesuffix('s')}"


def nodes(explained: Explained) -> Iterator[str]:
    """Yields the HTML of the section of nodes, by block (layer), with the reshards between them."""
    yield "<h2>Nodes, in the order in which they run</h2>"
    yield (
        '<p><span class="mark collective">Collectives</span> and '
        '<span class="mark cut">local steps</span> change the layout of a tensor. In a collective, '
        "ranks communicate; in a local step, each rank keeps a part of what it holds. "
        "<code>a@1</code> is tensor <code>a</code> in its new layout. Blocks that repeat are "
        "listed once.</p>"
    )
    room = Room(NODES_ROOM)
    for place, block in enumerate(explained.blocks()):
        rows = [row(step.kind if step.kind != NODE else "", _cells(step)) for step in block.steps]
        yield from folded(_title(block), "", _NODE_HEADS, rows, room, place < OPEN)


def _title(block: Block) -> str:
    name = "optimizer" if block.name == UPDATE else block.name
    if block.last != block.name:
        name += f" to {block.last}"
    times = f"{block.times} times " if block.times > 1 else ""
    each = " each time" if block.times > 1 else ""
    seconds = sum(step.predicted.total for step in block.steps)
    own = sum(step.kind == COLLECTIVE for step in block.steps)
    count = len(block.steps) - own
    counts = [times + counted(count, "nodes")]
    if own:
        counts.append(counted(own, "collectives"))
    what, took = " and ".join(counts), f", {ms_text(seconds)} ms{each}"
    return f"<b>{escape(name)}</b>: {what}{took}" if name else f"<b>{what}</b>{took}"


def _cells(step: Step) -> Iterator[Cell]:
    yield "&nbsp;" * 4 * step.depth + escape(step.op), ""
    yield code(step.name)
    yield operands_html(step.operands), "operands"
    yield operands_html(step.results), "operands"
    yield number(f"{step.predicted.total * 1e3:.4f}")
    yield number(size_text(step.sent) if step.sent else "")


def operands_html(tensors: Iterable[Operand]) -> str:
    """Returns a line of HTML for each tensor: its name, shape and layout."""
    return "<br>".join(
        f"<code>{escape(t.name)} <i>{escape(t.shape)}</i> <span>{escape(t.layout)}</span></code>"
        for t in tensors
    )


def collectives(explained: Explained) -> Iterator[str]:
    """Yields the HTML of the section of collectives, in the order in which they run."""
    yield "<h2>Collectives, in the order in which they run</h2>"
    entries = explained.plan.collectives
    if not entries:
        yield "<p>No collectives: in a run, ranks do not communicate.</p>"
        return
    if any("::" in entry.name for entry in entries):
        yield (
            "<p>“in NODE” is a collective inside an op, such as a softmax over a sharded "
            "dimension. The time of all collectives in one op stands with the first of them.</p>"
        )
    seconds = {s.name: s.predicted.communication for s in explained.steps if s.kind != CUT}
    rows = []
    for entry in entries:
        within = seconds.pop(entry.name, None) or seconds.pop(entry.name.split("::")[0], None)
        cells = [
            code(entry.tensor),
            (escape(entry.kind), ""),
            (f"<code>{escape(entry.before)} → {escape(entry.after)}</code>", ""),
            number(f"{counted(entry.groups, 'groups')} of {len(entry.group)}"),
            number(size_text(entry.bytes)),
            number("" if within is None else f"{within * 1e3:.4f}"),
        ]
        rows.append(row("", cells))
    title = f"<b>{counted(len(rows), 'collectives')}</b>"
    room = Room(COLLECTIVES_ROOM)
    yield from folded(title, "collectives", _COLLECTIVE_HEADS, rows, room, True)


def folded(
    title: str, name: str, heads: Iterable[Cell], rows: Sequence[str], room: Room, is_open: bool
) -> Iterator[str]:
    """Yields the HTML of a table that can be collapsed, with as many rows as fit into `room`;
    nothing if there are no rows.

    name  the id of the table
    """
    if not rows:
        return
    shown = room.fitting(rows)
    yield f'<details class="block"{" open" if is_open else ""}><summary>{title}</summary>'
    yield from table(name, heads, shown)
    if len(shown) < len(rows):
        yield f"<p>{len(rows) - len(shown):,} more rows are left out, to keep the page small.</p>"
    yield "</details>"


def table(name: str, heads: Iterable[Cell], rows: Iterable[str]) -> Iterator[str]:
    """Yields the HTML of a table in a box that scrolls horizontally. `name` is its id, or empty."""
    mark = f' id="{name}"' if name else ""
    yield f'<div class="wide"><table{mark}><thead><tr>'
    yield "".join(_cell("th", text, kind) for text, kind in heads)
    yield "</tr></thead><tbody>"
    yield from rows
    yield "</tbody></table></div>"


def row(kind: str, cells: Iterable[Cell]) -> str:
    """Returns the HTML of a row of a table; `kind` is its CSS class, or empty."""
    inside = "".join(_cell("td", text, of) for text, of in cells)
    return f'<tr class="{kind}">{inside}</tr>' if kind else f"<tr>{inside}</tr>"


def _cell(tag: str, text: str, kind: str) -> str:
    return f'<{tag} class="{kind}">{text}</{tag}>' if kind else f"<{tag}>{text}</{tag}>"


def number(text: str) -> Cell:
    """Returns a cell that is aligned to the right."""
    return text, "n"


def code(text: str) -> Cell:
    """Returns a cell with a name or a layout in a fixed-width font; an empty cell if `text` is
    empty."""
    return f"<code>{escape(text)}</code>" if text else "", ""


def ms_text(seconds: float) -> str:
    """Returns seconds as milliseconds with three decimals."""
    return f"{seconds * 1e3:,.3f}"
