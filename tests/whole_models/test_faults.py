"""Every seeded fault of the compiler is noticed by a model that is right without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import FAULTS
from small_models import check_small

from onnxpar.base.errors import OnnxparError

RIGHT: set[tuple[str, str]] = set()
"""Models that are right without any fault, and the medium over which they were checked."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_noticed(
    name: str, medium: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model in FAULTS[name].models:
        if (model, medium) not in RIGHT:
            check_small(model, tmp_path)
            RIGHT.add((model, medium))
    FAULTS[name].plant(monkeypatch)
    for model in FAULTS[name].models:
        with pytest.raises((AssertionError, OnnxparError)) as noticed:
            check_small(model, tmp_path)
        assert "Traceback" not in str(noticed.value)


def test_there_are_twenty() -> None:
    assert len(FAULTS) >= 20
