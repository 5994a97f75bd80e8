from __future__ import annotations

from collections.abc import Callable

import pytest
from runtime.fixtures import par as par
from runtime.fixtures import x as x

from onnxpar.runtime.session import InferenceSession, Session
from onnxpar.runtime.threads import ThreadSession


def pytest_itemcollected(item: pytest.Item) -> None:
    """Processes are the subject of these tests."""
    item.add_marker("processes")


@pytest.fixture(params=["threads", "processes"])
def open_session(request: pytest.FixtureRequest) -> Callable[..., Session]:
    """Opens a session of either kind."""
    return ThreadSession if request.param == "threads" else InferenceSession
