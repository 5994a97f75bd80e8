"""Draws the loss of a training run as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FEW = 30
"""With at most this many steps, each step gets a marker: a line through a single point is
invisible."""


def draw_losses(metrics: Path, picture: Path) -> None:
    """Draws the loss of each step, and of each evaluation if there are any, to the file `picture`.
    `metrics` is a file with one JSON object per line, as a run writes it."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    figure_of(rows).savefig(picture, dpi=120)


def figure_of(rows: Sequence[Mapping[str, float]]) -> Any:
    """Returns the picture as a matplotlib figure; `rows` are the objects of a metrics file."""
    from matplotlib.figure import Figure  # takes a second to import
    from matplotlib.ticker import MaxNLocator

    steps = [row for row in rows if "loss" in row]
    evaluated = [row for row in rows if "eval_loss" in row]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    style = "o-" if len(steps) <= FEW else "-"
    losses = [row["loss"] for row in steps]
    axes.plot([row["step"] for row in steps], losses, style, label="training loss", linewidth=1)
    if evaluated:
        at = [row["step"] for row in evaluated]
        axes.plot(at, [row["eval_loss"] for row in evaluated], "s-", label="evaluation loss")
        axes.legend()
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    return figure
