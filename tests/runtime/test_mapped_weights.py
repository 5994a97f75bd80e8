"""Weights stay in their files while ranks run: a table may be larger than memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from large_table import FEEDS, LIMIT, WIDTH, needs_proc, peaks, write_model

import onnxpar

pytestmark = pytest.mark.processes


@pytest.mark.matrix
@needs_proc
@pytest.mark.parametrize(
    "how", [{"preset": "table-parallel"}, {"strategy": {"tensors": {"w": ["tp", None]}}}]
)
def test_ranks_read_only_rows_that_are_used(how: dict[str, object], tmp_path: Path) -> None:
    model = write_model(tmp_path)
    mesh = "dp=2" if "preset" in how else "tp=2"
    onnxpar.shard(model, tmp_path / "m.par", mesh=mesh, **how)  # type: ignore[arg-type]
    before = len(peaks())
    with onnxpar.InferenceSession(tmp_path / "m.par") as session:
        (y,) = session.run(["y"], FEEDS)
        ranks = peaks()
    assert len(ranks) >= before + 2
    assert max(ranks) < LIMIT
    np.testing.assert_array_equal(y, np.repeat([[2.0], [0], [1], [0]], WIDTH, axis=1))
