"""One dimension of a strategy's entry: text as layouts are printed, and the shortest entry."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from onnxpar.errors import StrategyError
from onnxpar.layout.layout import Dim, Factor, Product, leaves
from onnxpar.layout.mesh import Axes, Axis, Mesh

Piece = tuple[Axes, tuple[int, ...] | None]
"""What a splittable leaf is split over, and the sizes of its parts where they are by hand."""

_AXIS = r"[^\W\d]\w*(?::\(\d+\)\d+)?"
_PIECE = re.compile(rf"{_AXIS}(?:\.{_AXIS})*(?:\{{\d+(?:,\d+)*\}})?|\d+|-")
_BETWEEN = re.compile(r"[\s()]*(?:[*+][\s()]*)?")


def is_cut(ask: Any) -> bool:
    """Whether an entry speaks of each leaf of a dimension by itself: `2*tp`."""
    return isinstance(ask, str) and bool(re.search(r"[*+]", ask))


def read_pieces(text: str, dim: Dim, mesh: Mesh, what: str) -> list[Piece]:
    """What a text such as `2*tp*16` says of each splittable leaf of a dimension. Errors:
    StrategyError where the dimension has other leaves, naming them."""
    found = [leaf for leaf in leaves(dim) if leaf.size > 1]
    words = _words(text, what)
    agree = (
        not word.isdigit() or int(word) == leaf.size
        for word, leaf in zip(words, found, strict=False)
    )
    if len(words) != len(found) or not all(agree):
        own = dim_text(dim, [((), None)] * len(found), mesh)
        raise StrategyError(f"{what}: {text!r} is not how the dimension is made: {own}")
    return [((), None) if w.isdigit() or w == "-" else read_piece(w, mesh, what) for w in words]


def read_piece(text: str, mesh: Mesh, what: str) -> Piece:
    """Reads `dp.tp:(1)2`, or `tp{9,1}`. Errors: StrategyError."""
    if not _PIECE.fullmatch(text):
        raise StrategyError(f"{what}: {text!r} is no axis; write tp, dp.tp, tp:(1)2 or tp{{2,1}}")
    names, _, sizes = text.partition("{")
    axes = tuple(_axis(name, mesh, what) for name in names.split("."))
    return axes, tuple(map(int, sizes[:-1].split(","))) if sizes else None


def _words(text: str, what: str) -> list[str]:
    words, at = [], _BETWEEN.match(text).end()  # type: ignore[union-attr]
    while at < len(text):
        word = _PIECE.match(text, at)
        if word is None:
            raise StrategyError(f"{what}: {text!r} is no layout of a dimension, see {text[at:]!r}")
        words.append(word[0])
        at = _BETWEEN.match(text, word.end()).end()  # type: ignore[union-attr]
    return words


def _axis(text: str, mesh: Mesh, what: str) -> Axis:
    """An axis, or a part of one: the inverse of `Mesh.text`."""
    name, _, part = text.partition(":")
    whole = mesh.axis(name)
    if not part:
        return whole
    found = re.fullmatch(r"\((\d+)\)(\d+)", part)
    pre, size = (int(found[1]), int(found[2])) if found else (0, 0)
    if not pre * size or whole.size % (pre * size):
        raise StrategyError(f"{what}: {text!r} is no part of the axis {name}={whole.size}")
    return Axis(name, size, pre)


def dim_text(dim: Dim, pieces: Sequence[Piece], mesh: Mesh) -> str:
    """The text of a dimension whose splittable leaves are split so, which `read_pieces` reads."""
    given = iter(pieces)

    def text(dim: Dim, nested: bool) -> str:
        if isinstance(dim, Factor):
            return piece_text(next(given), mesh) or str(dim.size) if dim.size > 1 else ""
        joint = "*" if isinstance(dim, Product) else "+"
        found = [t for t in (text(child, True) for child in dim.children) if t]
        joined = joint.join(found)
        return f"({joined})" if nested and len(found) > 1 else joined

    return text(dim, False)


def piece_text(piece: Piece, mesh: Mesh) -> str:
    """`dp.tp:(1)2`, `tp{9,1}`; nothing where it is whole."""
    axes, parts = piece
    sizes = "{" + ",".join(map(str, parts)) + "}" if parts and axes else ""
    return ".".join(map(mesh.text, axes)) + sizes


def axis_names(entry: object) -> Iterator[str]:
    """The axes that an entry names, as text, in lists, or as keys of sizes by hand."""
    if isinstance(entry, str):
        yield from re.findall(r"[^\W\d]\w*", entry)
    elif isinstance(entry, Mapping):
        yield from map(str, entry)
    elif isinstance(entry, Sequence):
        for part in entry:
            yield from axis_names(part)
