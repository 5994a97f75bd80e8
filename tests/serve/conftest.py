"""Servers of scripted engines, for a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from serve.calling_model import calling_folder
from serve.scripted_engine import Engine
from serve.servers import Served, serving


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Starts servers with settings, which end with the test."""
    with ExitStack() as ends:
        yield lambda **settings: ends.enter_context(serving(**settings))


@pytest.fixture(scope="module")
def _calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(Engine(calling_folder(tmp_path_factory.mktemp("calling")))) as served:
        yield served


@pytest.fixture
def calling(_calling: Served) -> Served:
    """A server of a model that can call tools, for all tests of a module."""
    _calling.engine.renew()
    return _calling


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    """A server with default settings."""
    return serve()
