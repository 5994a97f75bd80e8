"""A rank that dies, stops, ends or is late is an error that names it, on every other rank."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from native.processes import RankProcess, start_ranks

MANY = 1_000_000
TIMEOUT = 2.5
COLLECTIVE = r"AllReduce 'node2?' \(tag 1\)"
"""The one under way, or the one beside it in another stream."""


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[RankProcess]]:
    processes = start_ranks(3, tmp_path, TIMEOUT)
    yield processes
    for rank in processes:
        with suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGKILL)
        rank.process.join()


def start_all(ranks: list[RankProcess], runs: int, which: str = "") -> None:
    for rank in ranks:
        rank.start(runs, which)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("which", "victim"), [("", 0), ("", 2), ("in two", 0), ("in two", 2), ("two streams", 2)]
)
def test_a_rank_killed_in_a_collective(ranks: list[RankProcess], which: str, victim: int) -> None:
    start_all(ranks, MANY, which)
    time.sleep(0.1)
    killed = time.monotonic()
    os.kill(ranks[victim].pid, signal.SIGKILL)
    for rank in ranks:
        if rank is not ranks[victim]:
            message, raised = rank.finish()
            pid = ranks[victim].pid
            assert re.search(rf"{COLLECTIVE}: rank {victim} \(pid {pid}\) died", message), message
            assert raised - killed < 3


@pytest.mark.matrix
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_between_collectives(ranks: list[RankProcess], victim: int) -> None:
    start_all(ranks, 1)
    assert [rank.finish()[0] for rank in ranks] == ["", "", ""]
    ranks[victim].process.kill()
    ranks[victim].process.join()
    survivors = [rank for rank in ranks if rank is not ranks[victim]]
    for _ in range(2):
        begun = time.monotonic()
        start_all(survivors, 1)
        for rank in survivors:
            message, raised = rank.finish()
            assert re.search(rf"{COLLECTIVE}: rank {victim} \(pid \d+\) died", message), message
            assert raised - begun < 3


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("which", ["", "in two"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_stopped_rank(ranks: list[RankProcess], victim: int, which: str) -> None:
    start_all(ranks, 1)
    assert [rank.finish()[0] for rank in ranks] == ["", "", ""]
    os.kill(ranks[victim].pid, signal.SIGSTOP)
    survivors = [rank for rank in ranks if rank is not ranks[victim]]
    begun = time.monotonic()
    start_all(survivors, 1, which)
    for rank in survivors:
        message, raised = rank.finish()
        named = rf"{COLLECTIVE}.*rank {victim} \(pid {ranks[victim].pid}\).* does not respond"
        assert re.search(named, message), message
        assert raised - begun < TIMEOUT + 2.5


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("which", ["", "in two"])
def test_a_late_rank(ranks: list[RankProcess], which: str) -> None:
    start_all(ranks[:2], 1, which)
    for rank in ranks[:2]:
        message, _ = rank.finish()
        assert re.search(
            rf"{COLLECTIVE} has waited for 2.5 s: rank 2 \(pid \d+\) has not arrived, "
            "it is not in a collective",
            message,
        ), message
    ranks[2].start(1, which)
    assert "rank 2" in ranks[2].finish()[0]


@pytest.mark.matrix
@pytest.mark.parametrize("leaver", [0, 2])
def test_a_rank_that_ends_too_early(ranks: list[RankProcess], leaver: int) -> None:
    start_all(ranks, 1)
    assert [rank.finish()[0] for rank in ranks] == ["", "", ""]
    survivors = [rank for rank in ranks if rank is not ranks[leaver]]
    start_all(survivors, 1)
    time.sleep(0.1)
    begun = time.monotonic()
    ranks[leaver].close()
    for rank in survivors:
        message, raised = rank.finish()
        left = rf"{COLLECTIVE}: rank {leaver} \(pid \d+\) left the world before {COLLECTIVE}"
        assert re.search(left, message), message
        assert raised - begun < 3


@pytest.mark.slow
def test_a_rank_that_ends_when_it_is_done(ranks: list[RankProcess]) -> None:
    """Ranks that do not need it any more go on, even without the hub that it served."""
    start_all(ranks, 1)
    assert [rank.finish()[0] for rank in ranks] == ["", "", ""]
    ranks[0].close()
    ranks[0].process.join()
    for rank in ranks[1:]:
        rank.start(1, "pair")
    assert [rank.finish()[0] for rank in ranks[1:]] == ["", ""]
    begun = time.monotonic()
    start_all(ranks[1:], 1)
    for rank in ranks[1:]:
        message, raised = rank.finish()
        lost = rf"{COLLECTIVE}: lost the connection to rank 0 .* has left"
        assert re.search(lost, message), message
        assert raised - begun < 3
