"""Reads and writes the item of one dimension in a strategy's entry as text, in the form in which
layouts are printed: `2*tp*16` splits the middle one of three factors over tp."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from onnxpar.base.errors import StrategyError
from onnxpar.layout.layout import Dim, Factor, Product, leaves
from onnxpar.layout.mesh import Axes, Axis, Mesh

LeafSplit = tuple[Axes, tuple[int, ...] | None]
"""The axes of a splittable leaf, and the sizes of its parts if the user gave them, else None."""

_AXIS = r"[^\W\d]\w*(?::\(\d+\)\d+)?(?:@\d+)?"
_SPLIT = re.compile(rf"{_AXIS}(?:\.{_AXIS})*(?:\{{\d+(?:,\d+)*\}})?|\d+|-")
_BETWEEN = re.compile(r"[\s()]*(?:[*+][\s()]*)?")


def is_cut(item: Any) -> bool:
    """True if a strategy's item splits each leaf (a part of a dimension) of a dimension separately,
    as `2*tp` does."""
    return isinstance(item, str) and bool(re.search(r"[*+]", item))


def read_splits(text: str, dim: Dim, mesh: Mesh, what: str) -> list[LeafSplit]:
    """Reads the split of each splittable leaf (a part of a dimension) of a dimension from a text
    such as `2*tp*16`. `what` names the dimension in errors. Errors: StrategyError, naming the
    leaves of the dimension, if the text does not match them."""
    splittable = [leaf for leaf in leaves(dim) if leaf.size > 1]
    words = _words(text, what)
    agree = (
        not word.isdigit() or int(word) == leaf.size
        for word, leaf in zip(words, splittable, strict=False)
    )
    if len(words) != len(splittable) or not all(agree):
        sizes = dim_text(dim, [((), None)] * len(splittable), mesh)
        raise StrategyError(
            f"{what}: {text!r} does not match the dimension, which consists of {sizes}; write an "
            "axis in place of each number to split"
        )
    return [((), None) if w.isdigit() or w == "-" else read_split(w, mesh, what) for w in words]


def read_split(text: str, mesh: Mesh, what: str) -> LeafSplit:
    """Reads the split of one leaf (a part of a dimension), such as `dp.tp:(1)2` or `tp{9,1}` (parts
    of 9 and 1 elements). `what` names the dimension in errors. Errors: StrategyError."""
    if not _SPLIT.fullmatch(text):
        raise StrategyError(
            f"{what}: {text!r} is not an axis; write tp, dp.tp, tp:(1)2, tp@0 or tp{{2,1}}"
        )
    names, _, sizes = text.partition("{")
    axes = tuple(_axis(name, mesh, what) for name in names.split("."))
    return axes, tuple(map(int, sizes[:-1].split(","))) if sizes else None


def _words(text: str, what: str) -> list[str]:
    """Returns the words of a text such as `2*tp*16`: 2, tp and 16."""
    words, at = [], _BETWEEN.match(text).end()  # type: ignore[union-attr]
    while at < len(text):
        word = _SPLIT.match(text, at)
        if word is None:
            raise StrategyError(
                f"{what}: {text!r} cannot be read from {text[at:]!r} on; write factors such as "
                "2*tp*16, or segments such as tp+tp"
            )
        words.append(word[0])
        at = _BETWEEN.match(text, word.end()).end()  # type: ignore[union-attr]
    return words


def named_axis(name: str, mesh: Mesh, what: str) -> Axis:
    """Returns the whole axis with this name. Errors: StrategyError that begins with `what` and
    lists the axes of the mesh."""
    if name not in mesh.sizes:
        known = ", ".join(mesh.sizes) or "none"
        raise StrategyError(
            f"{what}: mesh {mesh} has no axis {name!r}, only {known}; give another --mesh, or "
            "--search auto, which tries meshes with the axes of the strategy"
        )
    return mesh.axis(name)


def _axis(text: str, mesh: Mesh, what: str) -> Axis:
    """Reads an axis, a sub-axis `tp:(1)2`, or an axis at a coordinate, `tp@0`: the form of
    `Mesh.text`."""
    text, _, at = text.partition("@")
    axis = _undealt(text, mesh, what)
    if not at:
        return axis
    if int(at) >= axis.size:
        raise StrategyError(
            f"{what}: '{text}@{at}' is not a coordinate of {text}, which has {axis.size}; write "
            f"{text}@0 to {text}@{axis.size - 1}"
        )
    return replace(axis, at=int(at))


def _undealt(text: str, mesh: Mesh, what: str) -> Axis:
    """Reads an axis or sub-axis (a factor of a mesh axis) without a coordinate (`@`)."""
    name, _, part = text.partition(":")
    whole = named_axis(name, mesh, what)
    if not part:
        return whole
    match = re.fullmatch(r"\((\d+)\)(\d+)", part)
    pre, size = (int(match[1]), int(match[2])) if match else (0, 0)
    if not pre * size or whole.size % (pre * size):
        raise StrategyError(
            f"{what}: {text!r} is not a sub-axis of {name}={whole.size}; write {name}:(K)N, where "
            f"K*N divides {whole.size}"
        )
    return Axis(name, size, pre)


def dim_text(dim: Dim, splits: Sequence[LeafSplit], mesh: Mesh) -> str:
    """Returns the text of a dimension whose leaves (parts of dimensions) have these splits;
    `read_splits` reads it back."""
    remaining = iter(splits)

    def text(dim: Dim, nested: bool) -> str:
        if isinstance(dim, Factor):
            return split_text(next(remaining), mesh) or str(dim.size) if dim.size > 1 else ""
        joint = "*" if isinstance(dim, Product) else "+"
        texts = [t for t in (text(child, True) for child in dim.children) if t]
        joined = joint.join(texts)
        return f"({joined})" if nested and len(texts) > 1 else joined

    return text(dim, False)


def split_text(split: LeafSplit, mesh: Mesh) -> str:
    """Returns the text of a split, such as `dp.tp:(1)2` or `tp{9,1}`; empty for a whole leaf (a
    part of a dimension)."""
    axes, parts = split
    sizes = "{" + ",".join(map(str, parts)) + "}" if parts and axes else ""
    return ".".join(map(mesh.text, axes)) + sizes


def axis_names(entry: object) -> Iterator[str]:
    """Yields the names of axes in a strategy's entry: in texts, in lists, or as keys of sizes by
    hand."""
    if isinstance(entry, str):
        yield from re.findall(r"[^\W\d]\w*", entry)
    elif isinstance(entry, Mapping):
        yield from map(str, entry)
    elif isinstance(entry, Sequence):
        for part in entry:
            yield from axis_names(part)
