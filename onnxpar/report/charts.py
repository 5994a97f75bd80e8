"""Charts over the seconds of a run, as SVG that stands in a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from onnxpar.report.explain import COLLECTIVE, Step
from onnxpar.report.report import size_text

_LEFT, _WIDTH, _TICKS = 110, 1000, 5
_LANES = {"compute": "compute", "talk": "communication"}
_LANE, _CURVE = 28, 140


@dataclass
class Bar:
    """What a rank does from `start` on, in seconds."""

    lane: str
    start: float
    seconds: float
    names: list[str]


def timeline(steps: Sequence[Step]) -> str:
    """What a rank does, one step after the other: compute above, communication below. Neighbours
    that are too short to be seen are one bar."""
    total = seconds_of(steps)
    scale = _WIDTH / total if total else 0.0
    parts = []
    for row, (lane, label) in enumerate(_LANES.items()):
        top = 4 + row * (_LANE + 6)
        parts.append(f'<text x="{_LEFT - 8}" y="{top + 19}" class="end">{label}</text>')
        for bar in merged((b for b in bars(steps) if b.lane == lane), 1 / scale if scale else 0.0):
            more = f" and {len(bar.names) - 1} more" if len(bar.names) > 1 else ""
            title = escape(f"{bar.names[0]}{more}: {bar.seconds * 1e3:.4f} ms")
            left, wide = _LEFT + bar.start * scale, max(bar.seconds * scale, 0.5)
            parts.append(
                f'<rect class="{lane}" x="{left:.1f}" y="{top}" width="{wide:.1f}" '
                f'height="{_LANE}"><title>{title}</title></rect>'
            )
    height = 4 + len(_LANES) * (_LANE + 6)
    return _svg("timeline", [*parts, *_axis(total, height)], height + 24)


def memory_curve(steps: Sequence[Step]) -> str:
    """The bytes of activations that are alive, over the same seconds."""
    total = seconds_of(steps)
    scale = _WIDTH / total if total else 0.0
    peak = max((step.alive for step in steps), default=0)
    path, start = ["M"], 0.0
    columns: dict[int, int] = {}
    for step in steps:
        column = round(start * scale)
        columns[column] = max(step.alive, columns.get(column, 0))
        start += step.predicted.total
    height = 0.0
    for column, alive in sorted(columns.items()):
        y = 8 + _CURVE * (1 - alive / peak) if peak else 8 + _CURVE
        height = height or y
        path.append(f"{_LEFT + column},{height:.1f} {_LEFT + column},{y:.1f}")
        height = y
    path.append(f"{_LEFT + _WIDTH},{height:.1f} {_LEFT + _WIDTH},{8 + _CURVE}")
    path.append(f"{_LEFT},{8 + _CURVE}Z")
    parts = [
        f'<path class="memory" d="{" ".join(path)}"/>',
        f'<text x="{_LEFT - 8}" y="16" class="end">{size_text(peak)}</text>',
        f'<text x="{_LEFT - 8}" y="{_CURVE + 8}" class="end">0</text>',
    ]
    return _svg("memory", [*parts, *_axis(total, 8 + _CURVE)], _CURVE + 32)


def seconds_of(steps: Iterable[Step]) -> float:
    """How long the steps take, one after the other."""
    return sum(step.predicted.total for step in steps)


def bars(steps: Iterable[Step]) -> Iterator[Bar]:
    """Each step as a bar for its compute and one for its communication after that."""
    start = 0.0
    for step in steps:
        name = f"{step.op} {step.name}"
        for lane, seconds in (
            ("compute", step.predicted.compute),
            ("talk", step.predicted.communication),
        ):
            if seconds:
                within = " (within)" if lane == "talk" and step.kind != COLLECTIVE else ""
                yield Bar(lane, start, seconds, [name + within])
            start += seconds


def merged(lane: Iterable[Bar], least: float) -> list[Bar]:
    """The bars of a lane; those shorter than the least are one with what is nearer than that."""
    found: list[Bar] = []
    for bar in lane:
        last = found[-1] if found else None
        near = last is not None and bar.start - (last.start + last.seconds) < least
        if last is not None and near and min(bar.seconds, last.seconds) < least:
            last.seconds = bar.start + bar.seconds - last.start
            last.names += bar.names
        else:
            found.append(bar)
    return found


def _axis(total: float, top: float) -> Iterator[str]:
    yield f'<path class="axis" d="M{_LEFT},{top}h{_WIDTH}"/>'
    for i in range(_TICKS + 1):
        x = _LEFT + _WIDTH * i / _TICKS
        yield f'<path class="axis" d="M{x:.0f},{top}v5"/>'
        place = "end" if i == _TICKS else "middle"
        unit = " ms" if i == _TICKS else ""
        yield f'<text x="{x:.0f}" y="{top + 19}" class="{place}">{total * i / _TICKS * 1e3:.3f}'
        yield f"{unit}</text>"


def _svg(name: str, parts: Iterable[str], height: float) -> str:
    inside = "\n".join(parts)
    width = _LEFT + _WIDTH + 10
    return (
        f'<svg id="{name}" role="img" aria-label="{name}" viewBox="0 0 {width} {height:.0f}">'
        f"\n{inside}\n</svg>"
    )
