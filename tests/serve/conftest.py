"""Servers of scripted engines, for a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from serve.servers import Served, serving


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Starts servers with settings, which end with the test."""
    with ExitStack() as ends:
        yield lambda **settings: ends.enter_context(serving(**settings))


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    """A server with default settings."""
    return serve()
