"""The loss of a run as a picture."""

from __future__ import annotations

import json
from pathlib import Path


def draw_losses(metrics: Path, picture: Path) -> None:
    """Draws the loss over the steps, and where there are any the losses of evaluations, from a file
    of metrics, one JSON object a line."""
    from matplotlib.figure import Figure  # takes a second to import

    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "loss" in row]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([r["step"] for r in steps], [r["loss"] for r in steps], label="loss", linewidth=1)
    evaluated = [row for row in rows if "eval_loss" in row]
    if evaluated:
        at = [row["step"] for row in evaluated]
        axes.plot(at, [r["eval_loss"] for r in evaluated], "o-", label="evaluation")
        axes.legend()
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)
