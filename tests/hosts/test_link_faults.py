"""Random faults of links: an error that names the two ends within the timeout, or the right answer;
never a hang, and never a wrong answer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hosts.faulty_rank import Wrong, compare
from hosts.faulty_worlds import Ended, judge, run_all, table
from hosts.hosts import why_not
from hosts.link_faults import KINDS, TIMEOUT, draw

SEEDS = [0, 11, 2, 13, 4, 5, 6, 7, 8, 18, 19]
"""All kinds; at the start and while running, small and large, collectives and models."""
PARTITION = 18
"""A link between two ranks is cut while they run, of which neither is rank 0."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that hosts share, which have a /tmp of their own."""
    if why_not():
        pytest.skip(why_not())
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="onnxpar-faults-") as made:
        yield Path(made)


def faults(seeds: Sequence[int], folder: Path) -> str:
    found: list[Ended] = []
    print(table(run_all(seeds, folder, 2, found.append)))
    return "\n".join(f"{each.how}: {each.case}\n{each.details}" for each in found if each.is_fault)


@pytest.mark.slow
def test_every_kind(folder: Path) -> None:
    assert {draw(seed).kind for seed in SEEDS} == {*KINDS}
    assert faults(SEEDS, folder) == ""


@pytest.mark.slow
def test_two_hundred(folder: Path) -> None:
    assert faults(range(200), folder) == ""


def end(rank: int, text: str = "", **changes: Any) -> dict[str, Any]:
    how = "error" if text else "right"
    found = {"end": how, "text": text, "phase": "running", "waited": TIMEOUT, "leaving": 0.0}
    return {**found, **changes}


def test_the_judge() -> None:
    case = draw(PARTITION)
    assert case.broken == {(1, 2)}
    assert case.counts == (1, 1, 2)
    good = "rank 1 (pid 7 on b) waits for rank 3 (pid 8 on c)"

    def how(*texts: str, **changes: Any) -> str:
        ends = [end(rank, text) for rank, text in enumerate(texts)]
        return judge(case, [*ends[:-1], {**ends[-1], **changes}]).how

    assert how("", "", "", "") == "right"
    assert how(good, good, good, good) == "error"
    assert how(good, good, good, "") == "some ranks alone"
    for bad in (
        "rank 1 (pid 7 on b) is gone",
        "rank 0 (pid 6 on a) waits for rank 1 (pid 7 on b)",
        "rank 1 (pid 7 on b) waits for rank 3 (pid 8 on a)",
        "rank 1 (pid 7) waits for rank 3 (pid 8)",
    ):
        assert how(good, good, good, bad) == "unnamed", bad
    assert how(good, good, good, "rank 1 waits for rank 3", phase="start") == "error"
    assert how(good, good, good, "rank 1 waits for 10.92.0.1:1", phase="start") == "unnamed"
    assert how(good, good, good, good, waited=2 * TIMEOUT + 3) == "late"
    assert how(good, good, good, good, leaving=10.0) == "late"
    for each in ("hang", "crash", "wrong", "traceback"):
        assert how(good, good, good, good, end=each) == each


def test_what_a_rank_calls_wrong() -> None:
    one = np.ones(3, "f4")
    compare(one, one.copy(), "the same bits")
    for other in (one * 2, one.astype("f8"), -one * 0 + 1 + np.float32(1e-7)):
        with pytest.raises(Wrong):
            compare(one, other, "others")
