"""Fixtures of tests of sessions, and of comparisons of sessions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from runtime.bundles import k_split


@pytest.fixture
def par(tmp_path: Path) -> Path:
    """`k_split` on two ranks."""
    return k_split(tmp_path / "model.par")


@pytest.fixture
def x() -> np.ndarray:
    """A feed for it."""
    return np.random.default_rng(1).standard_normal((4, 7)).astype(np.float32)
