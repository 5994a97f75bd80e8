from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from runtime.bundles import k_split

from onnxpar.runtime.session import InferenceSession, Session
from onnxpar.runtime.threads import ThreadSession


@pytest.fixture
def par(tmp_path: Path) -> Path:
    """`k_split` on two ranks."""
    return k_split(tmp_path / "model.par")


@pytest.fixture
def x() -> np.ndarray:
    """A feed for it."""
    return np.random.default_rng(1).standard_normal((4, 7)).astype(np.float32)


@pytest.fixture(params=["threads", "processes"])
def open_session(request: pytest.FixtureRequest) -> Callable[..., Session]:
    """Opens a session of either kind."""
    return ThreadSession if request.param == "threads" else InferenceSession
