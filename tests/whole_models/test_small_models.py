"""Small models, each of which needs one part of the compiler, agree and cost what they must."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_models import MODELS, check_small

COLLECTIVES = {
    "mlp": ["AllReduce"],
    "gate": ["AllReduce"],
    "residual": ["AllReduce"],
    "scatter": ["ReduceScatter"],
    "swap": ["AllToAll"],
    "axes change places": ["CollectivePermute"],
    "gather": ["AllGather"],
    "slice": [],
    "table": ["AllReduce"],
    "heads": ["AllReduce"],
    "fused": [],
    "mean": ["AllReduce"],
    "peak": ["AllReduce"],
    "groups": [],
    "turned": [],
    "readers": ["AllGather"],
    "square": ["AllGather"],
    "segments": [],
    "cut": [],
    "deadlock": ["AllReduce", "AllReduce"],
    "bent": ["AllReduce", "AllReduce"],
    "scattered segments": ["ReduceScatter"],
    "gathered segments": ["AllGather"],
    "concat": [],
}


@pytest.mark.parametrize("name", MODELS)
def test_small_model(name: str, tmp_path: Path) -> None:
    plan = check_small(name, tmp_path)
    assert [c.kind for c in plan.collectives] == COLLECTIVES[name]


def test_5_heads_over_2_ranks_are_3_and_2(tmp_path: Path) -> None:
    plan = check_small("heads", tmp_path)
    projections = [w for w in plan.weights if w.shape == (15, 15)]
    assert [w.layout_text for w in projections] == ["[-, tp{9,6}]", "[-, tp{9,6}]", "[tp{9,6}, -]"]
    assert {w.bytes_per_rank for w in projections} == {15 * 9 * 4}
