"""Engines with the same model: each takes requests, and goes on with those of one that loses its
ranks."""

from __future__ import annotations

import os
import queue
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from committed import MODELS
from llm.test_engine import TIMEOUT, Client, alone, par, prompts
from runtime.bundles import pids, wait_until
from sharded import sharded

from onnxpar.base.errors import InputError, RankError
from onnxpar.llm.embedder import Embedder
from onnxpar.llm.encoder import Tokens
from onnxpar.llm.engine import FAILED, READY, Engine, Generation
from onnxpar.llm.replicas import EmbedderReplicas, EngineReplicas
from onnxpar.llm.requests import Busy, End, Failure, Limits
from onnxpar.llm.sampling import Sampling
from onnxpar.llm.worker import STARTING

__all__ = ["alone", "par"]
Make = Callable[..., EngineReplicas]
Alone = Callable[..., list[int]]


@pytest.fixture
def make(par: Path) -> Iterator[Make]:
    made: list[EngineReplicas] = []

    def start(folder: Path = par, replicas: int = 2, **options: Any) -> EngineReplicas:
        made.append(EngineReplicas(folder, replicas=replicas, timeout=TIMEOUT, **options))
        return made[-1]

    yield start
    for each in made:
        each.close()


def send(
    replicas: EngineReplicas, prompt: Sequence[int], new: int = 40, **limits: Any
) -> tuple[Client, Generation]:
    client = Client()
    return client, replicas.submit(prompt, Limits(max_new_tokens=new, **limits), client)


def kill(engine: Engine | Embedder, rank: int = 1) -> None:
    os.kill(pids(engine._session)[rank], signal.SIGKILL)


def running(replicas: EngineReplicas) -> list[int]:
    """How many texts each engine has."""
    return [counts.running + counts.waiting for _, counts in replicas.each()]


def hold_back(engine: Engine, monkeypatch: pytest.MonkeyPatch, until: Callable[[], bool]) -> None:
    """Lets the ranks of an engine start again only when something holds."""
    start = engine._start

    def late() -> Any:
        assert wait_until(until, TIMEOUT)
        return start()

    monkeypatch.setattr(engine, "_start", late)


@pytest.mark.slow
@pytest.mark.processes
def test_another_one_goes_on_while_ranks_start_again(
    make: Make, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the next token of each answer, greedy or drawn; also of those that wait."""
    told: list[str] = []
    replicas = make(max_running=2, tell=told.append)
    draws = Sampling(do_sample=True, temperature=1.5, seed=7)
    drawn = send(replicas, [5, 6], 60, sampling=draws)[0].wait()
    sent = [send(replicas, [5, n], 60)[0] for n in range(3, 10)]
    sent.append(send(replicas, [5, 6], 60, sampling=draws)[0])
    for client in sent[:3]:
        client.wait_for(3)
    assert running(replicas) == [4, 4]
    first = replicas.workers[0]
    hold_back(first, monkeypatch, lambda: all(client.ended.is_set() for client in sent))
    kill(first)
    for number, client in zip(range(3, 10), sent, strict=False):
        assert client.wait() == alone([5, number], 60) and client.end == End("length", 0)
    assert sent[-1].wait() == drawn
    assert wait_until(lambda: first.status == READY, TIMEOUT)
    counts = replicas.counts
    assert counts.restarts == 1 and counts.continued == 2 and counts.used_pages == 0
    assert counts.prompt_tokens == 2 * 9
    assert told[0].startswith("replica 0: ") and told[0].endswith("; new ranks start")
    assert told[1] == "replica 0: the ranks run again"
    assert send(replicas, [5, 6])[0].wait() == alone([5, 6])


@pytest.mark.slow
@pytest.mark.processes
def test_both_die(make: Make, alone: Alone) -> None:
    """Then requests wait for the first ranks that start again."""
    replicas = make(max_running=2)
    sent = [send(replicas, [5, n], 100)[0] for n in range(3, 9)]
    sent[0].wait_for(3)
    for engine in replicas.workers:
        kill(engine)
    for number, client in zip(range(3, 9), sent, strict=True):
        assert client.wait() == alone([5, number], 100)
    assert replicas.counts.restarts == 2 and replicas.status == READY


@pytest.mark.slow
@pytest.mark.processes
def test_one_that_cannot_start_again_is_tried_later(
    par: Path, tmp_path: Path, make: Make, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others go on with its requests; if none starts, they fail, and so does the whole."""
    monkeypatch.setattr("onnxpar.llm.worker._PAUSE", 0.1)
    copy = tmp_path / "copy.par"
    shutil.copytree(par, copy)
    replicas = make(copy)
    first, second = replicas.workers
    sent = [send(replicas, [5, n], 100)[0] for n in range(3, 7)]
    sent[0].wait_for(3)
    copy.rename(tmp_path / "elsewhere.par")
    kill(first)
    assert wait_until(lambda: first.status == FAILED, TIMEOUT)
    for number, client in zip(range(3, 7), sent, strict=True):
        assert client.wait() == alone([5, number], 100)
    assert replicas.status == READY and send(replicas, [5, 6])[0].wait() == alone([5, 6])
    (tmp_path / "elsewhere.par").rename(copy)
    assert wait_until(lambda: first.status == READY, TIMEOUT)
    copy.rename(tmp_path / "elsewhere.par")
    last, _ = send(replicas, [5, 6], 400)
    last.wait_for(2)
    for engine in replicas.workers:
        kill(engine)
    last.wait()
    assert isinstance(last.end, Failure) and "there is no folder" in str(last.end.error)
    assert wait_until(lambda: replicas.status == FAILED, TIMEOUT)
    with pytest.raises(Busy, match="failed"):
        send(replicas, [5])
    assert second.status == FAILED


def test_prompts_with_the_same_beginning_come_together(make: Make) -> None:
    """Unless that replica has more to do than what it would save."""
    replicas = make(max_running=4)
    shared = prompts(1, 200, seed=3)[0] + [5] * 100
    send(replicas, shared, 1)[0].wait()
    assert replicas.counts.cached_tokens == 0
    for number in range(3, 6):
        send(replicas, [7, number], 300)[0].wait_for(1)
    assert running(replicas) == [2, 1]
    for end in range(3, 6):
        send(replicas, [*shared, end], 1)[0].wait()
    first, second = (counts for _, counts in replicas.each())
    assert first.cached_tokens > 3 * len(shared) - 3 * 32 and second.cached_tokens == 0
    assert [first.prompt_tokens, second.prompt_tokens] == [4 * len(shared) + 3 + 4, 2]


@pytest.mark.slow
def test_requests_go_where_least_is_to_do(make: Make) -> None:
    replicas = make(max_running=2, max_waiting=1)
    for wanted in ([1, 0], [1, 1], [2, 1], [2, 2], [3, 2], [3, 3]):
        send(replicas, [5, sum(wanted)], 400)
        assert running(replicas) == wanted
    with pytest.raises(Busy, match=r"\d requests wait already"):
        send(replicas, [5])
    is_down, is_full, tokens, texts = replicas.workers[0].burden([5, 6, 7])
    assert (is_down, is_full, texts) == (False, True, 3) and tokens >= 3 + 3
    assert not make().workers[0].burden([5])[1]


@pytest.mark.slow
@pytest.mark.processes
def test_requests_that_wait_for_ranks_which_do_not_start_move_on(
    make: Make, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both replicas are down at first; the other one is up again when this one gives up."""
    replicas = make()
    first, second = replicas.workers
    sent = [send(replicas, [5, n], 60)[0] for n in range(3, 7)]
    for client in sent:
        client.wait_for(2)

    def fail() -> Any:
        assert wait_until(lambda: second.status == READY, TIMEOUT)
        raise RankError("no memory is left")

    monkeypatch.setattr(first, "_start", fail)
    hold_back(second, monkeypatch, lambda: bool(first.status == STARTING and first._requests()))
    kill(second)
    assert wait_until(lambda: second.status == STARTING, TIMEOUT)
    kill(first)
    for number, client in zip(range(3, 7), sent, strict=True):
        assert client.wait() == alone([5, number], 60)
    assert wait_until(lambda: first.status == FAILED, TIMEOUT) and replicas.status == READY


@pytest.mark.slow
def test_all_have_the_same_room(make: Make) -> None:
    """A share of the memory each."""
    replicas = make(replicas=3)
    assert len({engine._pages for engine in replicas.workers}) == 1
    with pytest.raises(InputError, match=r"--kv-memory is .* GB in all, and this host has"):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        make(kv_memory=memory / 3)
    make(replicas=1, kv_memory=4096 * 24)
    with pytest.raises(InputError, match="--replicas 0: must be at least 1"):
        make(replicas=0)


@pytest.mark.slow
@pytest.mark.processes
def test_logs_and_ends(make: Make, tmp_path: Path) -> None:
    replicas = make(log_dir=tmp_path, max_running=1)
    assert sorted(str(f.relative_to(tmp_path)) for f in tmp_path.glob("*/*")) == [
        f"replica.{n}/rank.{rank}" for n in range(2) for rank in range(2)
    ]
    sent = [send(replicas, [5], 20)[0] for _ in range(4)]
    for client in sent:
        client.wait()
        assert client.end == End("length", 0)
    other = make()
    endless = [send(other, [5], 400)[0] for _ in range(3)]
    other.close()
    for client in endless:
        client.wait()
        assert client.end == End("cancelled")


@pytest.mark.slow
@pytest.mark.processes
def test_requests_that_are_cancelled_while_they_move(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """End, wherever they are then."""
    replicas = make(max_running=2)
    sent = [send(replicas, [5, n], 400) for n in range(3, 7)]
    sent[0][0].wait_for(2)
    first = replicas.workers[0]
    move = first.hand_over
    assert move is not None

    def cancelling(requests: Sequence[Any]) -> Sequence[Any]:
        assert len(requests) == 2
        for _, generation in sent:
            generation.cancel()
        return move(requests)

    monkeypatch.setattr(first, "hand_over", cancelling)
    kill(first)
    for client, _ in sent:
        client.wait()
        assert isinstance(client.end, End) and client.end.reason == "cancelled"
    assert wait_until(lambda: running(replicas) == [0, 0], TIMEOUT)


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_die_at_random(make: Make, alone: Alone) -> None:
    """While requests come: no token is lost, or comes twice."""
    rng = random.Random(1)
    replicas = make(max_running=4, step_tokens=24)
    jobs: list[tuple[list[int], int, Client, Generation]] = []
    for number, prompt in enumerate(prompts(40, 50, seed=1)):
        new = rng.choice((5, 20, 40))
        jobs.append((prompt, new, *send(replicas, prompt, new)))
        if number % 10 == 7:
            engine = rng.choice(replicas.workers)
            if engine.status == READY:
                with suppress(ProcessLookupError):  # it has just lost its ranks
                    kill(engine, rng.randrange(2))
        time.sleep(rng.choice((0, 0.01, 0.05)))
    for prompt, new, client, _ in jobs:
        tokens = client.wait()
        if isinstance(client.end, Failure):  # it has lost its ranks three times
            assert "was killed" in str(client.end.error)
            assert tokens == alone(prompt, new)[: len(tokens)]
        else:
            assert tokens == alone(prompt, new)
    assert replicas.counts.restarts >= 1


@pytest.mark.slow
@pytest.mark.processes
def test_embedders() -> None:
    par = sharded(MODELS / "embed" / "bert", devices=2, preset="data-parallel")
    texts = [Tokens([5 + i % 50] * 100) for i in range(600)]
    with EmbedderReplicas(par, replicas=2, batch_tokens=200, timeout=TIMEOUT) as replicas:
        events: list[queue.Queue[Any]] = [queue.Queue() for _ in range(3)]
        for each in events:
            replicas.submit(texts, each.put)
        first, second = replicas.workers
        assert [len(e._requests()) for e in replicas.workers] == [2, 1]
        assert wait_until(lambda: first.counts.steps > 3, TIMEOUT)
        kill(first)
        found = [each.get(timeout=TIMEOUT) for each in events]
        wanted = second._result(texts)
        for results in found:
            np.testing.assert_allclose(results, wanted, atol=1e-5)
        assert wait_until(lambda: first.status == READY, TIMEOUT)
        counts = replicas.counts
        assert counts.restarts == 1 and counts.continued == 1
        assert counts.prompt_tokens == 4 * 600 * 100
        assert replicas.longest == first.longest and replicas.model is first.model
        replicas.check(replicas.tokens("a text"))
