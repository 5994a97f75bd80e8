"""A plan says how evenly ranks compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import product, write

import onnxpar
from onnxpar.report.plan_text import plan_lines

ALL = 2 * 6 * 4 * 6
"""What [6, 4] by [4, 6] takes."""


@pytest.mark.parametrize(
    ("how", "most", "mean", "told"),
    [
        ({"mesh": "dp=2", "preset": "data-parallel"}, ALL // 2, ALL / 2, ", the same on all"),
        ({"mesh": "dp=4", "preset": "data-parallel"}, ALL // 3, ALL / 4, ", 1.33 times the mean"),
        ({"mesh": "dp=2", "strategy": {}}, ALL // 2, ALL / 2, ", the same on all"),
        (
            {"mesh": "tp=2", "strategy": {"shard": {"mm": [None, [None, {"tp": [1, 5]}]]}}},
            ALL // 6 * 5,
            ALL / 2,
            ", 1.67 times the mean",
        ),
        ({"mesh": "a=2", "search": "propagation"}, ALL, ALL, ", the same on all"),
    ],
)
def test_the_fullest_rank(
    how: dict[str, Any], most: int, mean: float, told: str, tmp_path: Path
) -> None:
    plan = onnxpar.plan(write(product(), tmp_path), **how)
    assert plan.flops == {"model": ALL, "per_rank": most, "mean": mean}
    lines = list(plan_lines(plan.to_json()))
    assert any(line.endswith(f"{most} FLOPs of {ALL}{told}") for line in lines)
