"""The table of tensors that only the ranks at one coordinate of an axis hold (layouts such as
`tp@2`)."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np

from onnxpar.report.text_table import size_text, table

MOST = 16
"""At most this many coordinates get a line of their own."""
_AT = re.compile(r"([^\W\d]\w*(?::\(\d+\)\d+)?)@(\d+)")


def held_lines(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of a table with a row for each coordinate (`tp@0`, `tp@1`, ...): number and
    bytes of the weights and states that only the ranks there hold, and the largest of them. Yields
    nothing if `plan`, the content of plan.json, has no such tensors."""
    by_axes: dict[tuple[str, ...], dict[str, list[tuple[int, str]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for name, layout, size in _tensors(plan):
        axes = [axis for axis, _ in _AT.findall(layout)]
        if axes:
            by_axes[tuple(axes)][".".join(f"{a}@{at}" for a, at in _AT.findall(layout))].append(
                (size, name)
            )
    for over, held in by_axes.items():
        rows = [
            (where, len(own), sum(size for size, _ in own), max(own, default=(0, "none"))[1])
            for where in _coordinates(over, dict(plan["mesh"]))
            for own in [held.get(where, [])]
        ]
        more = len(rows) - MOST
        heads = ("whole at", "tensors", "bytes", "largest")
        yield from table(rows[:MOST], heads)
        if more > 0:
            least, most = (f([size for _, _, size, _ in rows]) for f in (min, max))
            yield f"... and {more} more; from {size_text(least)} to {size_text(most)} each"
        yield ""


def _tensors(plan: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Yields (name, layout, bytes) of each weight, and of each state whose layout has a
    coordinate."""
    for weight in plan["weights"]:
        yield weight["name"], weight["layout_text"], weight["bytes"]
    states = {pair["input"] for pair in plan["states"]}
    for port in plan["inputs"]:
        if port["name"] in states and _AT.search(port.get("layout_text") or ""):
            size = math.prod(port["shape"]) * np.dtype(port["dtype"]).itemsize
            yield port["name"], port["layout_text"], size


def _coordinates(axes: tuple[str, ...], mesh: Mapping[str, int]) -> Iterator[str]:
    def size(axis: str) -> int:
        sub_axis = re.search(r"\(\d+\)(\d+)", axis)
        return int(sub_axis[1]) if sub_axis else mesh[axis]

    for at in product(*(range(size(axis)) for axis in axes)):
        yield ".".join(f"{axis}@{i}" for axis, i in zip(axes, at, strict=True))
