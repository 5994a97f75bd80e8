"""The time limit of a search is of CPU time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from onnxpar.search import patience
from onnxpar.search.patience import Patience


class Clocks:
    """Stands for the module `time`: CPU time, and time on the clock, of which three times as much
    passes."""

    def __init__(self) -> None:
        self.spent = 0.0

    def process_time(self) -> float:
        return self.spent

    def monotonic(self) -> float:
        return 100 + 3 * self.spent


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clocks]:
    found = Clocks()
    monkeypatch.setattr(patience, "time", found)
    yield found


def test_other_load_does_not_use_up_the_limit(clocks: Clocks) -> None:
    mine = Patience(10.0)
    with mine.spending():
        clocks.spent += 4
        with mine.spending():
            clocks.spent += 2
        assert mine.left == 4 and not mine.is_out
        assert mine.on_the_clock(2) == 6
    clocks.spent += 50
    assert (mine.left, mine.spent, mine.passed) == (4, 6, 18)
    with mine.spending():
        clocks.spent += 4
        assert mine.is_out
    again = mine.renewed(5.0)
    assert again.left == 5 and again.on_the_clock(2) == 2
