"""Ranks take several steps in a call while the likeliest token of each text is the next one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from committed import MODELS
from runtime.bundles import wait_until
from sharded import sharded

from onnxpar.graph.paged_attention import too_old
from onnxpar.llm import paged_decoder
from onnxpar.llm.engine import Engine
from onnxpar.llm.generator import Generator
from onnxpar.llm.next_tokens import Candidates
from onnxpar.llm.requests import End, Event, Limits, Token
from onnxpar.llm.sampling import Sampling
from onnxpar.llm.scheduler import Piece

pytestmark = pytest.mark.skipif(too_old() is not None, reason=str(too_old()))
TIMEOUT = 30.0


@pytest.fixture(scope="module")
def par() -> Path:
    return sharded(MODELS / "llm" / "llama", devices=2)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many steps each call of the ranks was; they are as many as there may be."""
    found: list[int] = []
    run = paged_decoder.PagedDecoder.run

    def noted(self: Any, pieces: Sequence[Piece], whole: bool = False, times: int = 1) -> Any:
        found.append(times)
        return run(self, pieces, whole, times)

    monkeypatch.setattr(paged_decoder, "MOMENT", 1e9)
    monkeypatch.setattr(paged_decoder.PagedDecoder, "run", noted)
    yield found


@pytest.fixture
def llama(par: Path, calls: list[int]) -> Iterator[Generator]:
    with Generator(par, timeout=TIMEOUT) as generator:
        generator.generate("warm", max_new_tokens=4, eos_token_id=[])
        calls.clear()
        yield generator


@pytest.fixture(scope="module")
def singly(par: Path) -> dict[str, list[int]]:
    """The tokens of prompts, a step at a time."""
    with pytest.MonkeyPatch.context() as patch, Generator(par, timeout=TIMEOUT) as generator:
        patch.setattr(paged_decoder, "MOMENT", 0.0)
        return {
            prompt: generator.generate(prompt, max_new_tokens=40, eos_token_id=[])[0].tokens
            for prompt in ("a", "one two", "three")
        }


@pytest.mark.slow
def test_one_text(llama: Generator, singly: dict[str, list[int]], calls: list[int]) -> None:
    (found,) = llama.generate("one two", max_new_tokens=40, eos_token_id=[])
    assert found.tokens == singly["one two"] and len(found.logprobs) == 40
    assert calls == [1, 8, 8, 8, 8, 4, 2, 1], "the prompt, then powers of two"


def test_texts_of_several_lengths(
    llama: Generator, singly: dict[str, list[int]], calls: list[int]
) -> None:
    found = llama.generate(list(singly), max_new_tokens=40, eos_token_id=[])
    assert [c.tokens for c in found] == list(singly.values())
    assert max(calls) == 2, "at most 8 tokens in a call"


def test_a_text_that_ends_within_a_call(
    llama: Generator, singly: dict[str, list[int]], calls: list[int]
) -> None:
    tokens = singly["a"]
    at = next(i for i in range(3, 40) if tokens[i] not in tokens[:i] and i % 8 not in (0, 1))
    (found,) = llama.generate("a", max_new_tokens=40, eos_token_id=tokens[at])
    assert found.tokens == tokens[: at + 1] and found.reason == "stop"
    assert llama.generate("a", max_new_tokens=40, eos_token_id=[])[0].tokens == tokens
    assert max(calls) == 8


def test_a_wrong_guess_is_dropped(
    llama: Generator,
    singly: dict[str, list[int]],
    calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the ranks computed behind another token than that which was chosen is not used."""
    best, number = Candidates.best, iter(range(10**6))

    def other(*arrays: Any) -> Candidates:
        found = best(*arrays)
        return replace(found, first=-1) if next(number) % 3 == 2 else found

    monkeypatch.setattr(Candidates, "best", other)
    (found,) = llama.generate("one two", max_new_tokens=40, eos_token_id=[])
    assert found.tokens == singly["one two"]
    assert max(calls) == 8 and sum(calls) > 40


def test_tokens_of_a_call_come_one_by_one(llama: Generator, singly: dict[str, list[int]]) -> None:
    seen = [len(c.tokens) for _, c in llama.follow("a", max_new_tokens=20, eos_token_id=[])]
    assert seen == list(range(1, 21))
    stop = llama.tokenizer.decode(singly["three"])[3:6]
    (cut,) = llama.generate("three", max_new_tokens=40, eos_token_id=[], stop_strings=stop)
    assert cut.text == llama.tokenizer.decode(singly["three"])[:3]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "seed": 3},
        {"repetition_penalty": 1.2},
        {"logit_bias": {7: 2.0}},
    ],
)
def test_others_take_single_steps(
    options: dict[str, Any], llama: Generator, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = llama.generate("a", max_new_tokens=20, eos_token_id=[], **options)
    assert max(calls) == 1
    monkeypatch.setattr(paged_decoder, "MOMENT", 0.0)
    assert llama.generate("a", max_new_tokens=20, eos_token_id=[], **options)[0] == found


def test_requests_of_an_engine(par: Path, singly: dict[str, list[int]], calls: list[int]) -> None:
    """One is cancelled by its listener within a call, one has few pages, one comes later."""
    with Engine(par, timeout=TIMEOUT, kv_memory=12 * 2 * 2 * 16 * 16 * 4 * 2) as engine:
        told: dict[str, list[Event]] = {prompt: [] for prompt in singly}
        ended = {prompt: threading.Event() for prompt in singly}
        made: dict[str, Any] = {}

        def submit(prompt: str, most: int) -> None:
            def listen(event: Event) -> None:
                told[prompt].append(event)
                if prompt == "three" and len(told[prompt]) == 5:
                    made[prompt].cancel()
                if not isinstance(event, Token):
                    ended[prompt].set()

            tokens = engine.tokenizer.encode(prompt)
            with engine._changed:
                made[prompt] = engine.submit(tokens, Limits(max_new_tokens=most), listen)

        for prompt, most in (("three", 40), ("a", 40), ("one two", 33)):
            submit(prompt, most)
            assert ended[prompt].wait(TIMEOUT)
        counts = engine.counts
    ids = {p: [e.id for e in events if isinstance(e, Token)] for p, events in told.items()}
    assert ids == {
        "three": singly["three"][:5],
        "a": singly["a"],
        "one two": singly["one two"][:33],
    }
    assert [events[-1] for events in told.values()] == [
        End("length"),
        End("length"),
        End("cancelled"),
    ]
    assert max(calls) == 8
    assert counts.generated_tokens == 5 + 40 + 33 and counts.used_pages == 0


def test_nothing_comes_behind_the_end(
    par: Path, singly: dict[str, list[int]], calls: list[int]
) -> None:
    tokens = singly["a"]
    at = next(i for i in range(3, 40) if tokens[i] not in tokens[:i] and i % 8 not in (0, 7))
    with Engine(par, timeout=TIMEOUT) as engine:
        events, ended = [], threading.Event()

        def listen(event: Event) -> None:
            events.append(event)
            if not isinstance(event, Token):
                ended.set()

        limits = Limits(max_new_tokens=40, ends=frozenset([tokens[at]]))
        engine.submit(engine.tokenizer.encode("a"), limits, listen)
        assert ended.wait(TIMEOUT) and wait_until(lambda: engine.counts.running == 0, TIMEOUT)
        assert engine.counts.generated_tokens == at + 1
    assert [e.id for e in events[:-1]] == tokens[: at + 1] and events[-1] == End("stop")
    assert max(calls) == 8


def test_nobody_waits_for_several_steps(par: Path, calls: list[int]) -> None:
    """While a request waits, ranks take single steps, so that it can come between them."""
    at_end: list[int] = []
    with Engine(par, timeout=TIMEOUT, max_running=1) as engine:
        ended = [threading.Event(), threading.Event()]

        def listen(event: Event, number: int) -> None:
            if not isinstance(event, Token):
                at_end.append(len(calls))
                ended[number].set()

        with engine._changed:
            for number in range(2):
                each = partial(listen, number=number)
                engine.submit([5, 6, 7], Limits(max_new_tokens=24), each)
        assert all(event.wait(TIMEOUT) for event in ended)
    first, second = calls[: at_end[0]], calls[at_end[0] :]
    assert set(first) == {1} and max(second) == 8


def test_what_is_plain() -> None:
    assert Limits().is_plain and Limits(top_logprobs=3).is_plain
    for sampling in (Sampling(do_sample=True), Sampling(presence_penalty=1.0)):
        assert not Limits(sampling).is_plain
    assert not Limits(top_logprobs=65).is_plain
