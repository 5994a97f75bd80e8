"""Fixtures for rule tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from onnxpar.rules.rule import rule_of
from onnxpar.testing.case import Case
from onnxpar.testing.proof import prove

EVERY = 20
"""Of as many splits of a case one is tested by default."""


@pytest.fixture
def prove_rule(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Checks a case's rule by its text and by the oracle; `missed` are the splits it may miss."""
    every = 1 if request.config.getoption("zoo") else EVERY

    def check(case: Case, text: str, missed: Sequence[str] = ()) -> None:
        proof = prove(case, every)
        assert proof.text == text
        assert proof.wrong == []
        assert proof.missed == list(missed)

    return check


@pytest.fixture
def rule_text() -> Callable[[Case], str]:
    """The text of a case's rule, from what the case itself says of shapes."""

    def text(case: Case) -> str:
        return rule_of(case.graph([v for v in case.values.values()][:1]).nodes[0]).text()

    return text
