"""The engine: requests that join late, are read in chunks, share a beginning, wait again, are
cancelled, or lose their ranks get the tokens that they get alone."""

from __future__ import annotations

import os
import queue
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from committed import MODELS
from runtime.bundles import pids, wait_until
from sharded import sharded

import onnxpar
from onnxpar.base.errors import InputError, ModelError, RunError
from onnxpar.llm.engine import FAILED, READY, Engine, Generation
from onnxpar.llm.generator import Generator
from onnxpar.llm.language_model import LanguageModel
from onnxpar.llm.paged_decoder import count_pages, page_bytes
from onnxpar.llm.requests import Busy, End, Event, Failure, Limits, Token
from onnxpar.llm.sampling import Sampling
from onnxpar.runtime.launch.lead import Lead
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.states.host_memory import HostMemory

TIMEOUT = 30.0
Make = Callable[..., Engine]


class Client:
    """Collects the events of a request."""

    def __init__(self) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self.tokens: list[int] = []
        self.received = threading.Semaphore(0)
        self.end: Event | None = None
        self.ended = threading.Event()

    def __call__(self, event: Event) -> None:
        assert self.end is None, "nothing comes after the end"
        if isinstance(event, Token):
            self.tokens.append(event.id)
            self.received.release()
        else:
            self.end = event
            self.ended.set()

    def wait(self) -> list[int]:
        """The tokens, after the end."""
        assert self.ended.wait(TIMEOUT), "the request did not end"
        return self.tokens

    def wait_for(self, tokens: int) -> None:
        """Returns after so many more tokens."""
        for _ in range(tokens):
            assert self.received.acquire(timeout=TIMEOUT), "no token came"


def send(engine: Engine, prompt: Sequence[int], new: int = 40) -> tuple[Client, Generation]:
    client = Client()
    return client, engine.submit(prompt, Limits(max_new_tokens=new), client)


@pytest.fixture(scope="module")
def par() -> Path:
    return sharded(MODELS / "llm" / "llama", devices=2)


@pytest.fixture(scope="module")
def alone() -> Iterator[Callable[[Sequence[int], int], list[int]]]:
    """The tokens of a prompt alone, from the model with caches of its own."""
    dense = sharded(MODELS / "llm" / "llama", devices=1, page_size=0)
    with Generator(dense, timeout=TIMEOUT) as generator:
        known: dict[tuple[tuple[int, ...], int], list[int]] = {}

        def tokens(prompt: Sequence[int], new: int = 40) -> list[int]:
            key = tuple(prompt), new
            if key not in known:
                (found,) = generator.generate(prompt, max_new_tokens=new, eos_token_id=[])
                known[key] = found.tokens
            return known[key]

        tokens.encode = generator.tokenizer.encode  # type: ignore[attr-defined]
        yield tokens


@pytest.fixture
def make(par: Path) -> Iterator[Make]:
    engines: list[Engine] = []

    def start(**options: object) -> Engine:
        engines.append(Engine(par, timeout=TIMEOUT, **options))  # type: ignore[arg-type]
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def prompts(number: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 320, rng.integers(1, longest)).tolist() for _ in range(number)]


@pytest.mark.slow
def test_requests_join_late(make: Make, alone: Callable[..., list[int]]) -> None:
    engine = make()
    given = prompts(4)
    clients = []
    for prompt in given:
        clients.append(send(engine, prompt)[0])
        clients[-1].wait_for(5)
    for prompt, client in zip(given, clients, strict=True):
        assert client.wait() == alone(prompt)
        assert client.end == End("length")
    assert engine.counts.running == engine.counts.used_pages == 0


@pytest.mark.slow
def test_a_listener_that_fails_ends_its_request_alone(
    make: Make, alone: Callable[..., list[int]]
) -> None:
    """Whether with a token or at its end."""
    engine = make()

    def fails(event: Event) -> None:
        raise RuntimeError("nobody listens")

    def fails_at_the_end(event: Event) -> None:
        if not isinstance(event, Token):
            fails(event)

    with pytest.warns(UserWarning, match="its listener failed: RuntimeError: nobody listens"):
        engine.submit([5, 6, 7], Limits(max_new_tokens=30), fails)
        engine.submit([5, 6, 8], Limits(max_new_tokens=3), fails_at_the_end)
        client, _ = send(engine, [9, 10])
        assert client.wait() == alone([9, 10])
    assert send(engine, [5, 6])[0].wait() == alone([5, 6])
    assert engine.status == READY
    assert engine.counts.running == engine.counts.used_pages == 0


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("step_tokens", [1, 7, 64])
def test_prompts_are_read_in_chunks(
    make: Make, alone: Callable[..., list[int]], step_tokens: int
) -> None:
    engine, given = make(step_tokens=step_tokens), prompts(5, 100, seed=1)
    clients = [send(engine, prompt, 20)[0] for prompt in given]
    assert [c.wait() for c in clients] == [alone(p, 20) for p in given]
    assert engine.counts.steps >= sum(map(len, given)) / max(step_tokens, 5)


@pytest.mark.slow
def test_a_beginning_is_read_once(make: Make, alone: Callable[..., list[int]]) -> None:
    engine = make()
    common = prompts(1, 90, seed=3)[0][:70] + [7] * 48
    for number, end in enumerate(([9, 10], [11], [9, 10], [], [12] * 20)):
        client, _ = send(engine, [*common, *end], 20)
        assert client.wait() == alone([*common, *end], 20)
        pages = (len(common) + (1 if end == [9, 10] and number else 0) - 1) // 16
        assert isinstance(client.end, End)
        assert client.end.cached >= 16 * pages if number else client.end.cached == 0
    counts = engine.counts
    assert counts.prompt_tokens == 5 * len(common) + 25 and counts.cached_tokens > 0
    assert counts.used_pages == 0


def test_an_answer_is_a_beginning_too(make: Make, alone: Callable[..., list[int]]) -> None:
    engine, prompt = make(), [5] * 20
    first = send(engine, prompt)[0].wait()
    client, _ = send(engine, [*prompt, *first, 9], 10)
    assert client.wait() == alone([*prompt, *first, 9], 10)
    assert client.end == End("length", cached=48)


@pytest.mark.slow
def test_texts_wait_again_if_pages_are_few(make: Make, alone: Callable[..., list[int]]) -> None:
    engine = make(kv_memory=4096 * 9)
    assert engine.counts.pages == 9
    given = prompts(6, 30, seed=4)
    clients = [send(engine, prompt)[0] for prompt in given]
    assert [c.wait() for c in clients] == [alone(p) for p in given]
    counts = engine.counts
    assert counts.preemptions > 0 and counts.used_pages == 0


@pytest.mark.slow
def test_a_text_ends_where_the_cache_does(make: Make, alone: Callable[..., list[int]]) -> None:
    engine = make(kv_memory=4096 * 3)
    assert engine.longest == 48
    client, _ = send(engine, [5] * 20, 100)
    assert client.wait() == alone([5] * 20)[:28]
    with pytest.raises(
        InputError, match=r"48 tokens, and the cache has room for 48; .*--kv-memory"
    ):
        send(engine, [5] * 48)
    with pytest.raises(InputError, match="give at least 8,192 bytes"):
        make(kv_memory=5000)
    with pytest.raises(
        InputError, match=r"--kv-memory is 9000.0 GB a rank, 18000.0 GB in all, and this"
    ):
        make(kv_memory="9TB")


def test_the_room_of_hosts(par: Path) -> None:
    """Under a launcher, the caches fit on each host of the ranks."""

    class Led(Lead):
        def __init__(self) -> None: ...

        hosts = (HostMemory("a", 1, 4_000_000, 8_000_000), HostMemory("b", 2, 2_000_000, 3_000_000))

    bundle = Bundle.load(par)
    model = LanguageModel.of(bundle)
    each = page_bytes(bundle, model)
    pages = count_pages(bundle, model, None, 10_000, {"start_ranks": Led()})
    assert pages == 500_000 // (2 * each) > 2
    with pytest.raises(InputError, match=r"0\.0 GB in all, and host b has 0\.0 GB of memory"):
        count_pages(bundle, model, 1_600_000, 16, {"start_ranks": Led()})
    assert count_pages(bundle, model, 1_400_000, 16, {"start_ranks": Led()}) == 1_400_000 // each


def test_cancelled_requests_leave_at_once(make: Make, alone: Callable[..., list[int]]) -> None:
    engine, given = make(max_running=2), prompts(6, seed=5)
    sent = [send(engine, prompt, 400) for prompt in given]
    sent[0][0].wait_for(3)
    for client, generation in sent[:5]:
        generation.cancel()
        client.wait()
        assert client.end == End("cancelled")
        generation.cancel()  # has no effect
    last = sent[5][0]
    last.wait_for(40)
    assert last.tokens[:40] == alone(given[5])
    sent[5][1].cancel()
    last.wait()
    assert engine.counts.used_pages == 0


def test_a_full_queue_refuses(make: Make) -> None:
    engine = make(max_running=1, max_waiting=1)
    first, running = send(engine, [5], 400)
    first.wait_for(1)
    _, waiting = send(engine, [5], 400)
    with pytest.raises(Busy, match="1 requests wait already"):
        send(engine, [6])
    waiting.cancel()
    running.cancel()
    first.wait()


def test_closing_cancels(make: Make) -> None:
    engine = make(max_running=1)
    sent = [send(engine, [5], 400)[0] for _ in range(3)]
    sent[0].wait_for(1)
    engine.close()
    for client in sent:
        client.wait()
        assert client.end == End("cancelled")


@pytest.mark.slow
@pytest.mark.processes
def test_requests_go_on_when_ranks_die(make: Make, alone: Callable[..., list[int]]) -> None:
    """Those that run with their next token, and those that wait."""
    engine = make(max_running=2)
    sent = [send(engine, [5, number], 100)[0] for number in range(3, 7)]
    sent[0].wait_for(3)
    os.kill(pids(engine._session)[1], signal.SIGKILL)
    for number, client in zip(range(3, 7), sent, strict=True):
        assert client.wait() == alone([5, number], 100) and client.end == End("length", 0)
    counts = engine.counts
    assert engine.status == READY and counts.restarts == 1 and counts.continued == 2
    assert counts.prompt_tokens == 8 and counts.used_pages == 0


@pytest.mark.slow
@pytest.mark.processes
def test_a_request_that_loses_its_ranks_again_and_again_fails(
    make: Make, alone: Callable[..., list[int]]
) -> None:
    """They may die of it; another one that waits does not."""
    engine = make(max_running=1)
    first, second = (send(engine, [5, number], 400)[0] for number in (3, 4))
    for losses in range(3):
        first.wait_for(2)
        assert engine.counts.restarts == losses
        os.kill(pids(engine._session)[0], signal.SIGKILL)
        assert wait_until(lambda n=losses: engine.counts.restarts == n + 1, TIMEOUT)
    first.wait()
    assert isinstance(first.end, Failure) and "was killed" in str(first.end.error)
    assert first.tokens == alone([5, 3], 400)[: len(first.tokens)]
    second.wait_for(40)
    assert second.tokens[:40] == alone([5, 4])


@pytest.mark.processes
def test_drawn_tokens_and_schemas_go_on_when_ranks_die(make: Make) -> None:
    """A seed draws the same tokens; a constraint has seen each token once."""

    class Even:
        """Takes even tokens, and counts all."""

        def __init__(self) -> None:
            self.accepted: list[int] = []

        def allowed(self) -> np.ndarray:
            return np.arange(320) % 2 == len(self.accepted) % 2

        def accept(self, token: int) -> None:
            self.accepted.append(token)

    draws = Sampling(do_sample=True, temperature=1.5, seed=7, frequency_penalty=0.5)
    engine = make(max_running=3)

    def ask() -> tuple[list[list[int]], list[int]]:
        even = Even()
        limits = [
            Limits(draws, max_new_tokens=60),
            Limits(draws, max_new_tokens=60, row=1, constraint=even),
            Limits(max_new_tokens=60, top_logprobs=70),
        ]
        clients = [Client() for _ in limits]
        for client, limit in zip(clients, limits, strict=True):
            engine.submit([5, 6], limit, client)
        clients[1].wait_for(7)
        if engine.counts.restarts < wanted_restarts:
            os.kill(pids(engine._session)[1], signal.SIGKILL)
        return [client.wait() for client in clients], even.accepted

    wanted_restarts = 0
    undisturbed, accepted = ask()
    assert accepted == undisturbed[1]
    wanted_restarts = 1
    assert ask() == (undisturbed, accepted)
    assert engine.counts.continued == 3


def test_a_run_that_fails_on_ranks_that_can_continue(
    make: Make, alone: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails its requests; the ranks stay, and those that wait are next."""
    engine = make(max_running=1)
    run, fails = type(engine._batching).run, [True]

    def failing(self: Any, step: Any) -> Any:
        if fails:
            fails.clear()
            raise RunError("no memory is left")
        return run(self, step)

    monkeypatch.setattr(type(engine._batching), "run", failing)
    first, second = (send(engine, [5, number])[0] for number in (3, 4))
    first.wait()
    assert isinstance(first.end, Failure) and str(first.end.error) == "no memory is left"
    assert second.wait() == alone([5, 4]) and engine.counts.restarts == 0


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_that_die_while_idle_are_started_again(
    make: Make, alone: Callable[..., list[int]]
) -> None:
    engine = make()
    os.kill(pids(engine._session)[0], signal.SIGKILL)
    assert wait_until(lambda: engine.counts.restarts == 1 and engine.status == READY, TIMEOUT)
    assert send(engine, [5, 6])[0].wait() == alone([5, 6])


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_that_do_not_start_again_end_the_engine(par: Path, tmp_path: Path) -> None:
    copy, told = tmp_path / "copy.par", list[str]()
    shutil.copytree(par, copy)
    with Engine(copy, timeout=TIMEOUT, max_running=1, tell=told.append) as engine:
        sent = [send(engine, [5], 400)[0] for _ in range(2)]
        sent[0].wait_for(2)
        copy.rename(tmp_path / "elsewhere.par")
        os.kill(pids(engine._session)[0], signal.SIGKILL)
        for client in sent:
            client.wait()
            assert isinstance(client.end, Failure)
        assert wait_until(lambda: engine.status == FAILED, TIMEOUT)
        with pytest.raises(Busy, match="failed"):
            send(engine, [5])
    assert re.search("rank 0 was killed by SIGKILL .*; new ranks start", told[0])
    assert told[1].startswith("no ranks start: there is no folder")


@pytest.mark.slow
def test_answers_do_not_depend_on_company(make: Make, alone: Callable[..., list[int]]) -> None:
    """Requests come, grow and are cancelled at random."""
    rng = random.Random(6)
    engine = make(kv_memory=4096 * 24, max_running=5, step_tokens=24)
    shared = prompts(1, 80, seed=7)[0] * 2
    jobs: list[tuple[list[int], int, Client, Generation, bool]] = []
    for number, prompt in enumerate(prompts(60, 50, seed=8)):
        if number % 3 == 0:
            prompt = shared[: rng.randrange(20, 60)] + prompt[:5]
        new = rng.choice((1, 5, 20, 40))
        client, generation = send(engine, prompt, new)
        cancelled = rng.random() < 0.25
        jobs.append((prompt, new, client, generation, cancelled))
        time.sleep(rng.choice((0, 0, 0.01)))
        for _, _, _, old, is_cancelled in rng.sample(jobs, min(3, len(jobs))):
            if is_cancelled:
                old.cancel()
    for prompt, new, client, generation, cancelled in jobs:
        if cancelled:
            generation.cancel()
        tokens = client.wait()
        assert tokens == alone(prompt, new)[: len(tokens)]
        assert cancelled or len(tokens) == new
    counts = engine.counts
    assert counts.running == counts.waiting == counts.used_pages == 0
    assert counts.cached_tokens > 0


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_do_not_start_on_another_model(tmp_path: Path) -> None:
    """A folder that was written again meanwhile: answers would change without a word."""
    par, told = tmp_path / "m.par", []
    onnxpar.shard(MODELS / "llm" / "llama", par, devices=2)
    with Engine(par, timeout=TIMEOUT, tell=told.append) as engine:
        (tmp_path / "old").mkdir()
        par.rename(tmp_path / "old" / "m.par")
        onnxpar.shard(MODELS / "llm" / "llama_int4", par, devices=2)
        client, _ = send(engine, [5, 6], 400)
        client.wait_for(2)
        os.kill(pids(engine._session)[1], signal.SIGKILL)
        assert client.ended.wait(TIMEOUT) and isinstance(client.end, Failure)
        assert "was written again since the server started" in str(client.end.error)
    assert "was written again since the server started" in told[-1]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_attention_in_basic_ops_is_served(devices: int, tmp_path: Path) -> None:
    """Requests of a GPT-2 of Optimum join late, in chunks, share a beginning, and wait again."""
    folder = MODELS / "llm" / "gpt2_optimum"
    onnxpar.shard(folder, tmp_path / "m.par", devices=devices)
    onnxpar.shard(folder, tmp_path / "dense.par", devices=1, page_size=0)
    shared = prompts(1, 90, seed=9)[0][:40]
    given = [*prompts(4, 60, seed=10), *([*shared, *end] for end in ([5], [6, 7], [5]))]
    with Generator(tmp_path / "dense.par", timeout=TIMEOUT) as generator:
        made = [generator.generate(p, max_new_tokens=30, eos_token_id=[])[0] for p in given]
    with Engine(tmp_path / "m.par", timeout=TIMEOUT, step_tokens=16) as engine:
        clients = []
        for prompt in given:
            clients.append(send(engine, prompt, 30)[0])
            clients[-1].wait_for(3)
        assert [c.wait() for c in clients] == [c.tokens for c in made]
        assert engine.counts.cached_tokens >= 64
        assert engine.counts.running == engine.counts.used_pages == 0
        page = engine.counts.pages
    with Engine(tmp_path / "m.par", timeout=TIMEOUT, kv_memory=4096 * 14 * 4) as engine:
        assert engine.counts.pages < page
        clients = [send(engine, prompt, 30)[0] for prompt in given]
        assert [c.wait() for c in clients] == [c.tokens for c in made]


def test_the_same_seed_draws_the_same_tokens(make: Make) -> None:
    engine = make()
    sampling = Sampling(do_sample=True, seed=5, top_k=0)

    def draw(row: int, company: int) -> list[int]:
        clients = [Client() for _ in range(company + 1)]
        engine.submit([5, 6], Limits(sampling, 30, row=row), clients[0])
        for client in clients[1:]:
            engine.submit([8], Limits(max_new_tokens=30), client)
        return clients[0].wait()

    assert draw(0, 0) == draw(0, 3)
    assert draw(0, 0) != draw(1, 0)


def test_likeliest_tokens_are_told(make: Make) -> None:
    engine, events = make(), queue.Queue[Event]()
    engine.submit([5, 6], Limits(max_new_tokens=3, top_logprobs=4), events.put)
    for _ in range(3):
        token = events.get(timeout=TIMEOUT)
        assert isinstance(token, Token)
        assert token.top[0] == (token.id, token.logprob) and len(token.top) == 4
        chances = [logprob for _, logprob in token.top]
        assert chances == sorted(chances, reverse=True) and sum(np.exp(chances)) < 1


def test_models_without_pages_are_refused() -> None:
    with pytest.raises(ModelError, match="--page-size 16"):
        Engine(sharded(MODELS / "llm" / "llama", devices=1, page_size=0))


@pytest.mark.matrix
@pytest.mark.parametrize(
    "prompt,limits,named",
    [
        ([], Limits(), "no tokens"),
        ([320], Limits(), "token 320"),
        ([1], Limits(max_new_tokens=0), "max_new_tokens is 0"),
        ([1], Limits(top_logprobs=321), "top_logprobs is 321"),
        ([1], Limits(Sampling(top_p=2)), "top_p is 2"),
        ([1] * 512, Limits(), "512 tokens, and the model's context has room for 512"),
    ],
)
def test_bad_requests_are_refused(
    make: Make, prompt: list[int], limits: Limits, named: str
) -> None:
    with pytest.raises(InputError, match=named):
        make().submit(prompt, limits, lambda event: None)
