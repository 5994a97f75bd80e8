"""Calls and answers between a session and its ranks, which must never miss a ring."""

from __future__ import annotations

import ctypes
import multiprocessing
import random
import threading
import time

import pytest

from onnxpar.runtime.ranks.doorbell import Doorbell
from onnxpar.runtime.ranks.library import library

CALLS = 10_000
ASLEEP = 0.3
"""Seconds after which a thread that waits has begun to sleep."""


def test_a_ring_wakes_those_who_wait_for_it_beside_those_who_wait_for_the_next() -> None:
    """A rank that has answered a call waits for the next one, while another rank may still sleep
    until the first."""
    memory = (ctypes.c_uint32 * 16)()
    bell = ctypes.cast(memory, ctypes.c_void_p)
    woken: dict[int, bool] = {}

    def wait(count: int) -> None:
        woken[count] = bool(library().onnxpar_bell_wait(bell, count, 0, 20_000))

    threads = [threading.Thread(target=wait, args=(count,)) for count in (1, 2)]
    for thread in threads:
        thread.start()
        time.sleep(ASLEEP)
    for count, thread in enumerate(threads, 1):
        library().onnxpar_bell_ring(bell, count)
        thread.join(10)
        assert woken.get(count), f"count {count}"


def work(draw: random.Random) -> None:
    """Takes up to some 40 us."""
    sum(range(int(1000 * draw.random() ** 3)))


def answer_all(fd: int, rank: int, ranks: int, spins: bool) -> None:
    """Is a rank."""
    bell = Doorbell(fd, ranks, spins)
    draw = random.Random(rank)
    for _ in range(CALLS):
        again = bell.wait_for_call()
        work(draw)
        bell.answer(rank, again)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("spins", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_no_call_and_no_answer_is_missed(ranks: int, spins: bool) -> None:
    """Over many calls, in which ranks look, sleep and are woken in any order."""
    context = multiprocessing.get_context("fork")
    bell = Doorbell.create(ranks, spins)
    processes = [
        context.Process(target=answer_all, args=(bell.fd, rank, ranks, spins), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    draw = random.Random(ranks)
    try:
        for call in range(CALLS):
            work(draw)
            bell.call(again=call % 3 > 0)
            assert any(bell.wait_for_answers(1.0) for _ in range(20)), f"call {call}"
            assert all(bell.is_again(rank) == (call % 3 > 0) for rank in range(ranks))
    finally:
        for process in processes:
            process.kill()
            process.join()
        bell.close()
