"""What tests of gradient rules share."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

import pytest

import onnxpar.training.gradients
from onnxpar.testing.gradient_proof import prove_gradient, prove_linear_gradient
from onnxpar.training.gradients import reverse


@pytest.fixture
def prove() -> Callable[..., None]:
    """Fails where a case's gradients are wrong; see `prove_gradient`."""

    def check(case, wrt=None, results=1):
        assert prove_gradient(case, wrt, results) == []

    return check


@pytest.fixture
def prove_linear() -> Callable[..., None]:
    """The same in float32 alone; see `prove_linear_gradient`."""

    def check(case, wrt=None, results=1):
        assert prove_linear_gradient(case, wrt, results) == []

    return check


ASKED: Counter[str] = Counter()
"""Passed tests by op whose gradient they asked."""


@pytest.fixture(autouse=True)
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes which rules a test asks."""
    found: set[str] = set()
    request.node.asked = found
    entry_of = reverse.entry_of

    def spy(node: Any) -> Any:
        entry = entry_of(node)
        if entry is not None:
            found.add(f"{node.domain}.{node.op}" if node.domain else node.op)
        return entry

    monkeypatch.setattr(reverse, "entry_of", spy)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if call.when == "call" and report.passed:
        ASKED.update(getattr(item, "asked", ()))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--write-gradients"):
        text = json.dumps(dict(sorted(ASKED.items())), indent=0)
        (files(onnxpar.training.gradients) / "proof.json").write_text(text + "\n", encoding="utf-8")
