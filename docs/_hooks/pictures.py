"""Draws the pictures of the site: `python docs/_hooks/pictures.py` writes them to docs/images.

A picture of a layout colours the elements that each rank holds, by `Layout.take` itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

import numpy as np

from onnxpar.layout.layout import Concat, Dim, Factor, Layout, Product
from onnxpar.layout.mesh import Mesh

FOLDER = Path(__file__).parents[1] / "images"
COLOURS = ("#ffb74d", "#4fc3f7", "#81c784", "#ba68c8")
"""A colour for each rank."""
REST = "#eceff1"
FONT = "font-family='system-ui, sans-serif'"
MONO = "font-family='ui-monospace, Menlo, Consolas, monospace'"
CELL = 12


def text(x: float, y: float, words: str, size: int = 13, more: str = "") -> str:
    """Words, centred at x, on a line at y."""
    style = f"font-size='{size}' text-anchor='middle' fill='#212121' {more or FONT}"
    return f"<text x='{x:g}' y='{y:g}' {style}>{escape(words)}</text>"


def box(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    """A rectangle with a thin edge."""
    where = f"x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}'"
    return f"<rect {where} fill='{fill}' stroke='#78909c' stroke-width='0.8' {more}/>"


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """A line with a head at its end."""
    line = f"<line x1='{x:g}' y1='{y:g}' x2='{to_x:g}' y2='{to_y:g}'"
    return f"{line} stroke='#455a64' stroke-width='1.4' marker-end='url(#head)'/>"


def picture(width: int, height: int, title: str, marks: Iterable[str]) -> str:
    """A whole SVG, on a light ground so that it can be read on a dark page, too."""
    head = (
        "<marker id='head' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' markerHeight='7' "
        "orient='auto-start-reverse'><path d='M0 0 L10 5 L0 10 z' fill='#455a64'/></marker>"
    )
    return "\n".join(
        (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
            f"width='{width}' height='{height}' role='img'>",
            f"<title>{escape(title)}</title><defs>{head}</defs>",
            f"<rect width='{width}' height='{height}' rx='8' fill='#ffffff'/>",
            *marks,
            "</svg>\n",
        )
    )


def grid(x: float, y: float, held: np.ndarray, colour: str, cell: int = CELL) -> Iterable[str]:
    """A matrix of elements; those that are held have the colour."""
    for (row, column), mine in np.ndenumerate(held):
        fill = colour if mine else REST
        yield box(x + column * cell, y + row * cell, cell, cell, fill)


def held_elements(layout: Layout, mesh: Mesh, rank: int) -> np.ndarray:
    """Which elements of the tensor a rank holds."""
    count = int(np.prod(layout.shape))
    whole = np.arange(count).reshape(layout.shape)
    split = Layout(layout.dims)
    return np.isin(whole, split.take(whole, mesh, rank))


def layout_picture(layout: Layout, mesh: Mesh, note: str = "") -> str:
    """One panel for each rank, side by side, with what the rank holds."""
    rows, columns = layout.shape
    panel, gap, left, top = columns * CELL, 18, 14, 44
    marks = [text(left, 22, f"{layout.text(mesh)}", 15, f"{MONO} style='text-anchor: start'")]
    if note:
        marks.append(
            text(left + 4 * (panel + gap) - gap, 22, note, 13, f"{FONT} style='text-anchor: end'")
        )
    for rank in range(mesh.size):
        x = left + rank * (panel + gap)
        marks += grid(x, top, held_elements(layout, mesh, rank), COLOURS[rank])
        name = f"rank {rank}"
        if layout.partial:
            name += f", term {mesh.coordinate(layout.partial, rank)}"
        marks.append(text(x + panel / 2, top + rows * CELL + 18, name))
    width = 2 * left + mesh.size * panel + (mesh.size - 1) * gap
    return picture(width, top + rows * CELL + 30, f"The layout {layout.text(mesh)}", marks)


def layouts() -> dict[str, str]:
    """The pictures of the page on layouts, by name of the file."""
    mesh = Mesh.parse("dp=2,tp=2")
    dp, tp = mesh.axis("dp"), mesh.axis("tp")

    def drawn(*dims: Dim, partial: bool = False, note: str = "") -> str:
        return layout_picture(Layout(dims, (tp,) if partial else ()), mesh, note)

    heads = Product((Factor(2), Factor(2, (tp,)), Factor(2)))
    qkv = Concat((Factor(4, (tp,)), Factor(2, (tp,)), Factor(2, (tp,))))
    return {
        "layout-whole.svg": drawn(Factor(4), Factor(8)),
        "layout-rows.svg": drawn(Factor(4, (dp,)), Factor(8)),
        "layout-columns.svg": drawn(Factor(4), Factor(8, (tp,))),
        "layout-both.svg": drawn(Factor(4, (dp,)), Factor(8, (tp,))),
        "layout-joint.svg": drawn(Factor(4), Factor(8, (dp, tp))),
        "layout-uneven.svg": drawn(Factor(4), Factor(8, (tp,), (5, 3))),
        "layout-partial.svg": drawn(Factor(4, (dp,)), Factor(8), partial=True),
        "layout-heads.svg": drawn(Factor(4), heads, note="2 groups, 2 heads, 2 elements"),
        "layout-segments.svg": drawn(Factor(4), qkv, note="Q of 4, K of 2, V of 2"),
    }


def node(x: float, y: float, words: str) -> list[str]:
    """An op of a graph, centred at (x, y)."""
    round_ = box(x - 35, y - 16, 70, 32, "#e8eaf6", "rx='6'")
    return [round_, text(x, y + 5, words, 13)]


def split_model() -> str:
    """A perceptron, whole and split over two ranks by columns and rows of its weights."""
    at = (34, 128, 222, 316, 486)
    marks = [text(90, 24, "model.onnx, unsplit", 14, f"{FONT} font-weight='bold'")]

    def chain(y: float, colour: str, columns: slice) -> None:
        first = np.zeros((4, 4), bool)
        first[:, columns] = True
        for x, name in ((at[1], "MatMul"), (at[2], "Relu"), (at[3], "MatMul")):
            marks.extend(node(x, y, name))
        marks.append(text(at[0], y + 5, "x", 15, MONO))
        marks.append(arrow(at[0] + 10, y, at[1] - 37, y))
        marks.append(arrow(at[1] + 35, y, at[2] - 37, y))
        marks.append(arrow(at[2] + 35, y, at[3] - 37, y))
        for x, held, name in ((at[1], first, "w1"), (at[3], first.T, "w2")):
            marks.extend(grid(x - 20, y - 78, held, colour, 10))
            marks.append(text(x + 34, y - 54, name, 13, MONO))
            marks.append(arrow(x, y - 36, x, y - 17))

    chain(118, "#b0bec5", slice(0, 4))
    marks += [arrow(at[3] + 35, 118, at[4] - 12, 118), text(at[4], 123, "y", 15, MONO)]
    marks.append("<line x1='14' y1='152' x2='506' y2='152' stroke='#cfd8dc'/>")
    for rank, y in ((0, 274), (1, 388)):
        marks.append(text(44, y - 60, f"rank {rank}", 14, f"{FONT} font-weight='bold'"))
        chain(y, COLOURS[rank], slice(2 * rank, 2 * rank + 2))
        marks += [arrow(at[3] + 35, y, 382, y), arrow(446, y, at[4] - 12, y)]
        marks.append(text(at[4], y + 5, "y", 15, MONO))
    marks.append(box(384, 256, 62, 150, "#fff9c4", "rx='6'"))
    marks += [text(415, 327, "All-", 13), text(415, 343, "Reduce", 13)]
    marks.append(text(260, 175, "sharded over tp=2: w1 by columns, w2 by rows", 14))
    return picture(520, 424, "A model, and its two ranks", marks)


def node_proof() -> str:
    """How the second product of the perceptron is proved: what ranks hold before and behind it."""
    marks = [text(290, 26, "MatMul of the model: y = r x w2", 15, MONO)]
    at = {"r": 100, "w2": 216, "p": 340, "y": 520}
    captions = {
        "r": ("related before", "columns"),
        "w2": ("compared with the", "model's: rows"),
        "p": ("lemma: a part of", "the sum over rows"),
        "y": ("arithmetic: all parts,", "each once: the whole"),
    }
    for rank, y in ((0, 60), (1, 150)):
        colour, mine = COLOURS[rank], slice(2 * rank, 2 * rank + 2)
        rows = np.zeros((4, 4), bool)
        rows[mine] = True
        marks.append(text(40, y + 28, f"rank {rank}", 14, f"{FONT} font-weight='bold'"))
        for name, held in (("r", rows.T), ("w2", rows), ("p", rows | True), ("y", rows | True)):
            marks += grid(at[name] - 24, y, held, COLOURS[2] if name == "y" else colour)
            marks.append(text(at[name], y + 64, name, 13, MONO))
        marks += [text(158, y + 30, "x", 18), arrow(250, y + 24, 306, y + 24)]
        marks += [arrow(370, y + 24, 400, y + 24), arrow(462, y + 24, 488, y + 24)]
    marks += [box(402, 54, 58, 150, "#fff9c4", "rx='6'")]
    marks += [text(431, 124, "All-", 13), text(431, 140, "Reduce", 13)]
    for name, lines in captions.items():
        marks += [text(at[name], 244 + 17 * i, line, 12) for i, line in enumerate(lines)]
    return picture(600, 276, "The proof of one node", marks)


def pictures() -> dict[str, str]:
    """All pictures, by name of the file."""
    return {"node-proof.svg": node_proof(), "split.svg": split_model(), **layouts()}


if __name__ == "__main__":
    for name, drawn in pictures().items():
        (FOLDER / name).write_text(drawn)
