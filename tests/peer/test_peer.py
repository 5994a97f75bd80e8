"""A fixed part of ONNX's own test-suite, split in every way: `run.py` does all of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from peer.outcome import BAD, RUNS, Outcome
from peer.parts import part_of
from peer.report import summary
from peer.workers import Worker

PART = "1/800"


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


@pytest.mark.slow
@pytest.mark.peer
def test_every_split_of_a_part(worker: Worker) -> None:
    outcomes: list[Outcome] = []
    for case in part_of(worker.count(), PART):
        outcomes += worker.try_case(case)
    bad = [str(o) for o in outcomes if o.kind in BAD]
    assert not bad, "\n".join(bad)
    print("\n".join(summary(outcomes)))
    assert sum(o.kind == "split" for o in outcomes) > sum(o.kind in RUNS for o in outcomes) / 2
