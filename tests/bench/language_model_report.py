"""What bench_language_models.py prints."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench.peers import OTHERS

Found = Mapping[str, Sequence[Mapping[str, Any]]]
"""What each system answered, by round."""
SAME = 0.5
"""The least share of first tokens in which systems must agree: sums in other orders may change
one, above all where activations are rounded to 8 bits."""


def quiet(found: Found) -> Found:
    """The rounds in which others left all systems alone, but at least half of them, the quietest
    first."""
    rounds = list(zip(*found.values(), strict=True))
    others = [max(each["others"] for each in answers) for answers in rounds]
    count = max(sum(share <= OTHERS for share in others), -(-len(rounds) // 2))
    kept = sorted(range(len(rounds)), key=lambda number: others[number])[:count]
    return {name: [answers[number] for number in kept] for name, answers in found.items()}


def generated(title: str, found: Found) -> list[str]:
    """Times to tokens of a batch, and how many times faster than the first system."""
    found = quiet(found)
    texts = len(next(iter(found.values()))[0]["tokens"])
    lines = _heads(
        title,
        ["first ms", "its mean", "ms a token", "tokens/s", "first x", "token x", "same", "others"],
    )
    for name, rounds in found.items():
        first, mean, each = (_median(rounds, key) for key in ("first", "mean_first", "each"))
        numbers = [_ms(first), _ms(mean), _ms(each), f"{texts / each:.1f}"]
        ratios = [_ratio(found, name, key) for key in ("first", "each")]
        lines.append(_row(name, [*numbers, *ratios, f"{same(found, name):.0%}", _others(rounds)]))
    return lines


def served(title: str, found: Found) -> list[str]:
    """Requests and tokens per second, seconds that clients waited, and how many times more requests
    than the first system."""
    found = quiet(found)
    lines = _heads(
        title, ["requests/s", "tokens/s", "first s", "whole s", "requests x", "first x", "others"]
    )
    for name, rounds in found.items():
        requests = statistics.median(len(each["whole"]) / each["seconds"] for each in rounds)
        tokens = statistics.median(each["tokens"] / each["seconds"] for each in rounds)
        waits = [_wait(rounds, key) for key in ("first", "whole")]
        numbers = [f"{requests:.2f}", f"{tokens:.1f}", *(f"{wait:.2f}" for wait in waits)]
        ratios = [_ratio(found, name, "seconds"), _ratio(found, name, "first", statistics.median)]
        lines.append(_row(name, [*numbers, *ratios, _others(rounds)]))
    return lines


def held(title: str, found: Mapping[str, Mapping[str, Sequence[int]]]) -> list[str]:
    """The most memory of each process: once it was started, and at the end."""
    lines = _heads(title, ["started, MB", "at the end, MB", "of its ranks, MB"])
    for name, when in found.items():
        start, end = (f"{when[key][0] / 1e6:.0f}" for key in ("started", "ended"))
        ranks = ", ".join(f"{size / 1e6:.0f}" for size in when["ended"][1:])
        lines.append(_row(name, [start, end, ranks or "-"]))
    return lines


def write_plot(path: Path, about: Mapping[str, str], tables: Mapping[str, Found]) -> None:
    """Draws how many times faster than the first system the last one is, to the first token and to
    each further one, by batch, as quartiles of rounds."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "onnxpar"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, 2, figsize=(8, 0.3 * len(tables) + 0.8), sharey=True, layout="constrained"
    )
    base, name = (list(next(iter(tables.values())))[i] for i in (0, -1))
    kinds = {"first": "speed to the first token", "each": "speed of further tokens"}
    for ax, (key, what) in zip(axes, kinds.items(), strict=True):
        quartiles = [_quartiles(quiet(found), name, key) for found in tables.values()]
        middle = [q[1] for q in quartiles]
        away = [[q[1] - q[0] for q in quartiles], [q[2] - q[1] for q in quartiles]]
        bars = ax.barh(list(tables), middle, xerr=away, color="#00897b", ecolor="#455a64")
        ax.bar_label(bars, [f" {ratio:.2f}" for ratio in middle], padding=3, fontsize=8)
        ax.axvline(1, color="#455a64", linewidth=0.8)
        ax.set_title(f"{what}, {name} / {base}", fontsize=9, loc="left")
        ax.tick_params(labelsize=8)
        ax.set_xlim(0, max(1.6, max(q[2] for q in quartiles) * 1.15))
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.supxlabel(f"{about['date']}, {about['machine']}", x=0.99, ha="right", fontsize=6)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _quartiles(found: Found, name: str, key: str) -> list[float]:
    """Of the ratios of rounds."""
    base = next(iter(found.values()))
    ratios = [its[key] / mine[key] for mine, its in zip(found[name], base, strict=True)]
    return [float(q) for q in np.quantile(ratios, (0.25, 0.5, 0.75))]


def same(found: Found, name: str) -> float:
    """The share of texts whose first token is that of the first system."""
    pairs = [
        (mine[0], its[0])
        for ours, theirs in zip(found[name], next(iter(found.values())), strict=True)
        for mine, its in zip(ours["tokens"], theirs["tokens"], strict=True)
    ]
    return sum(mine == its for mine, its in pairs) / len(pairs)


def _heads(title: str, columns: Sequence[str]) -> list[str]:
    return ["", _row(title, columns), "|---" * (len(columns) + 1) + "|"]


def _row(name: str, cells: Sequence[str]) -> str:
    return f"| {' | '.join([name, *cells])} |"


def _median(rounds: Sequence[Mapping[str, Any]], key: str) -> float:
    return statistics.median(each[key] for each in rounds)


def _wait(rounds: Sequence[Mapping[str, Any]], key: str) -> float:
    """Of a usual request of a usual round."""
    return statistics.median(statistics.median(each[key]) for each in rounds)


def _ratio(found: Found, name: str, key: str, of: Callable[[Any], float] = float) -> str:
    """The median of the ratios of rounds; 2 is twice as fast as the first system."""
    base = next(iter(found.values()))
    ratios = [of(its[key]) / of(mine[key]) for mine, its in zip(found[name], base, strict=True)]
    return f"{statistics.median(ratios):.2f}"


def _others(rounds: Sequence[Mapping[str, Any]]) -> str:
    """Cores that others used meanwhile."""
    return f"{_median(rounds, 'others'):.2f}"


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"
