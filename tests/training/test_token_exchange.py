"""In a training step, ranks exchange the chosen rows of both passes; steps are those of the dense
graph on one rank."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lowering.mixtures import SLOW
from training.expert_steps import mixture
from training.steps import check_training, write_step

from onnxpar.compiler.plan import Plan

STEPS = 4


def exchanged(plan: Plan) -> list[str]:
    """The tensors of which ranks exchange chosen rows."""
    return [c.tensor for c in plan.collectives if c.kind == "AllToAllV"]


def check(folder: Path, layout: str, text: str, count: int, **how: Any) -> Plan:
    """Trains on slow links; asserts that ranks exchange `count` tensors, and gather none."""
    step = write_step(text, folder, "mse", "adamw", **how)
    plan = check_training(step, layout, STEPS, topology=SLOW)
    kinds = Counter(c.kind for c in plan.collectives)
    assert len(exchanged(plan)) == count
    assert kinds["AllToAll"] == 1 and not kinds["AllGather"] and not kinds["ReduceScatter"]
    return plan


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "expert-parallel 2",
        "expert-parallel 3",
        "expert-parallel 4",
        "expert-parallel 5",
        "expert-parallel dp=2,ep=4",
        "expert-parallel dp=3,ep=3",
    ],
)
@pytest.mark.parametrize("rows", [12, 31])
def test_both_passes(layout: str, rows: int, tmp_path: Path) -> None:
    """Tokens and results, and the gradients of results."""
    check(tmp_path, layout, mixture(5, rows), 3)
