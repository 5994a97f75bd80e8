from __future__ import annotations

from collections.abc import Callable

import pytest
from runtime.fixtures import par as par
from runtime.fixtures import x as x

from onnxpar.runtime.session.session import InferenceSession, Session
from onnxpar.runtime.session.threads import ThreadSession


@pytest.fixture(params=["threads", pytest.param("processes", marks=pytest.mark.processes)])
def open_session(request: pytest.FixtureRequest) -> Callable[..., Session]:
    """Opens a session of either kind."""
    return ThreadSession if request.param == "threads" else InferenceSession
