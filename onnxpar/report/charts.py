"""HTML charts of compute, communication and memory over the time of a run. Bars stretch with the
width of the page, text does not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

from onnxpar.report.explain import COLLECTIVE, Step
from onnxpar.report.plan_text import size_text

WIDTH = 1000
"""The width of a chart in SVG units, whatever its width on the screen."""
LANES = ("compute", "communication")
TICKS = 6
"""Most time marks after zero on an axis, so that they fit on a phone."""
_LANE, _CURVE, _MARGIN = 28, 140, 2
_NEAR_END = 0.94
"""Labels beyond this fraction of the width stand to the left of their marks, so that they stay on
the page."""


@dataclass
class Bar:
    """A bar of the timeline: a rank computes or communicates (`lane`) from `start` for some
    `seconds`. `names` are the nodes."""

    lane: str
    start: float
    seconds: float
    names: list[str]


def timeline(steps: Sequence[Step]) -> str:
    """Returns a chart, as HTML, of the steps of a rank one after the other: compute above,
    communication below. Neighbouring bars that are too short to see are merged."""
    total = seconds_of(steps)
    scale = WIDTH / total if total else 0.0
    lanes = [(lane, [bar for bar in bars(steps) if bar.lane == lane]) for lane in LANES]
    rows = []
    for lane, own in lanes:
        rects = "\n".join(_rect(bar, scale) for bar in merged(own, 1 / scale if scale else 0.0))
        rows.append(_row(lane, _svg(rects, _LANE)))
    takes = [f"{sum(b.seconds for b in own) * 1e3:.3f} ms of {lane}" for lane, own in lanes]
    return _chart("timeline", " and ".join(takes), [*rows, _axis(total)])


def _rect(bar: Bar, scale: float) -> str:
    more = f" and {len(bar.names) - 1} more" if len(bar.names) > 1 else ""
    title = escape(f"{bar.names[0]}{more}: {bar.seconds * 1e3:.4f} ms")
    left, wide = bar.start * scale, max(bar.seconds * scale, 0.5)
    return (
        f'<rect class="{bar.lane}" x="{left:.1f}" y="0" width="{wide:.1f}" height="{_LANE}">'
        f"<title>{title}</title></rect>"
    )


def memory_curve(steps: Sequence[Step]) -> str:
    """Returns a chart, as HTML, of the bytes of live activations, over the same time axis as
    `timeline`."""
    total = seconds_of(steps)
    scale = WIDTH / total if total else 0.0
    peak = max((step.alive for step in steps), default=0)
    path, start = ["M"], 0.0
    columns: dict[int, int] = {}
    for step in steps:
        column = round(start * scale)
        columns[column] = max(step.alive, columns.get(column, 0))
        start += step.predicted.total
    floor_at = _MARGIN + _CURVE
    height = 0.0
    for column, alive in sorted(columns.items()):
        y = floor_at - (_CURVE * alive / peak if peak else 0)
        height = height or y
        path.append(f"{column},{height:.1f} {column},{y:.1f}")
        height = y
    path.append(f"{WIDTH},{height or floor_at:.1f} {WIDTH},{floor_at}")
    path.append(f"0,{floor_at}Z")
    curve = _svg(f'<path class="memory" d="{" ".join(path)}"/>', floor_at)
    label = f"peak {size_text(peak)}"
    return _chart("memory", f"activations: {label}", [_row(label, curve), _axis(total)])


def seconds_of(steps: Iterable[Step]) -> float:
    """Returns the predicted seconds of all steps together."""
    return sum(step.predicted.total for step in steps)


def bars(steps: Iterable[Step]) -> Iterator[Bar]:
    """Yields a bar of the compute of each step, followed by a bar of its communication."""
    start = 0.0
    for step in steps:
        name = f"{step.op} {step.name}"
        for lane, seconds in zip(
            LANES, (step.predicted.compute, step.predicted.communication), strict=True
        ):
            if seconds:
                is_inside = lane == LANES[1] and step.kind != COLLECTIVE
                yield Bar(lane, start, seconds, [name + (" (inside the op)" if is_inside else "")])
            start += seconds


def merged(lane: Iterable[Bar], least: float) -> list[Bar]:
    """Returns the bars of a lane, in which bars shorter than `least` seconds are merged with
    neighbours that are nearer than `least` seconds."""
    joined: list[Bar] = []
    for bar in lane:
        last = joined[-1] if joined else None
        near = last is not None and bar.start - (last.start + last.seconds) < least
        if last is not None and near and min(bar.seconds, last.seconds) < least:
            last.seconds = bar.start + bar.seconds - last.start
            last.names += bar.names
        else:
            joined.append(bar)
    return joined


def ticks(total: float) -> list[tuple[float, str]]:
    """Returns the marks of a time axis of `total` milliseconds, as (position from 0 to 1, label).
    They are 1, 2 or 5 times a power of ten milliseconds apart."""
    if total <= 0:
        return [(0.0, "0 ms")]
    least = total / TICKS
    power = 10.0 ** floor(log10(least))
    step = next(times * power for times in (1, 2, 5, 10) if times * power >= least * (1 - 1e-9))
    digits = max(0, -floor(log10(step * (1 + 1e-9))))
    count = floor(total / step * (1 + 1e-9))
    labels = ["0 ms", *(f"{i * step:,.{digits}f}" for i in range(1, count + 1))]
    return [(i * step / total, label) for i, label in enumerate(labels)]


def _axis(total: float) -> str:
    """Returns the time axis below a chart, as HTML; `total` is in seconds."""
    marks = []
    for at, label in ticks(total * 1e3):
        side = ' class="last"' if at > _NEAR_END else ""
        marks.append(f'<i style="left:{at:.2%}"{side}>{label}</i>')
    return f'<div class="lane axis"><b></b><div class="ticks">{"".join(marks)}</div></div>'


def _row(label: str, drawing: str) -> str:
    return f'<div class="lane"><b>{escape(label)}</b>{drawing}</div>'


def _svg(parts: str, height: int) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" height="{height}" preserveAspectRatio="none">\n'
        f"{parts}\n</svg>"
    )


def _chart(name: str, label: str, rows: Iterable[str]) -> str:
    inside = "\n".join(rows)
    role = f'role="img" aria-label="{escape(label)}"'
    return f'<div id="{name}" class="chart" {role}>\n{inside}\n</div>'
