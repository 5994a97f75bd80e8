"""Tokens of prompts, with their probabilities by onnxruntime; and answers that may not end yet."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from committed import MODELS
from sharded import sharded

from onnxpar.base.arrays import Array
from onnxpar.llm.engine import Engine
from onnxpar.llm.generator import Generator
from onnxpar.llm.next_tokens import Candidates
from onnxpar.llm.requests import End, Event, Limits, PromptTokens, Token
from onnxpar.llm.sampling import Sampling

LLAMA = MODELS / "llm" / "llama"
TIMEOUT = 30.0
Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def par() -> Path:
    return sharded(LLAMA, devices=2)


@pytest.fixture(scope="module")
def logprobs() -> Callable[[Sequence[int]], Array]:
    """The logarithms of probabilities behind each token of a text, by onnxruntime and the unsplit
    model."""
    session = ort.InferenceSession(LLAMA / "model.onnx")

    def of(tokens: Sequence[int]) -> Array:
        feeds = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, len(tokens)), int)}
        for port in session.get_inputs()[2:]:
            feeds[port.name] = np.zeros((1, 2, 0, 16), np.float32)
        logits = np.float64(session.run(["logits"], feeds)[0][0])
        largest = logits.max(-1, keepdims=True)
        return logits - largest - np.log(np.exp(logits - largest).sum(-1, keepdims=True))

    return of


@pytest.fixture
def start(par: Path) -> Iterator[Start]:
    engines: list[Engine] = []

    def started(**options: Any) -> Engine:
        engines.append(Engine(par, timeout=TIMEOUT, **options))
        return engines[-1]

    yield started
    for engine in engines:
        engine.close()


def submit(engine: Engine, prompt: Sequence[int], **limits: Any) -> queue.Queue[Event]:
    events: queue.Queue[Event] = queue.Queue()
    engine.submit(prompt, Limits(**limits), events.put)
    return events


def events_of(events: queue.Queue[Event]) -> list[Event]:
    found = [events.get(timeout=TIMEOUT)]
    while isinstance(found[-1], Token | PromptTokens):
        found.append(events.get(timeout=TIMEOUT))
    return found


def check(events: Sequence[Event], prompt: Sequence[int], wanted: Array, top: int) -> None:
    """Compares what is told with onnxruntime."""
    told, first = events[:2]
    assert isinstance(told, PromptTokens) and isinstance(first, Token)
    assert [token.id for token in told.tokens] == prompt[1:]
    for place, token in enumerate([*told.tokens, first]):
        assert token.logprob == pytest.approx(wanted[place, token.id], abs=1e-4)
        best = sorted(wanted[place])[::-1][:top]
        assert [logprob for _, logprob in token.top] == pytest.approx(best, abs=1e-4)
        assert [wanted[place, each] for each, _ in token.top] == pytest.approx(best, abs=1e-4)
    assert not any(isinstance(event, PromptTokens) for event in events[1:])


def test_prompts_are_told(start: Start, logprobs: Callable[[Sequence[int]], Array]) -> None:
    """In steps of a few tokens, beside other texts, and again where the caches have them."""
    engine, rng = start(step_tokens=9), np.random.default_rng(0)
    for number, sampling in enumerate((Sampling(), Sampling(True, 0.7, 0, seed=3))):
        prompts = [rng.integers(3, 320, length).tolist() for length in (1, 2, 20, 40)] * 2
        limits = {"sampling": sampling, "tells_prompt": True, "max_new_tokens": 3}
        others = [submit(engine, prompt, max_new_tokens=20) for prompt in prompts[:4]]
        each = [submit(engine, p, **limits, top_logprobs=at % 4) for at, p in enumerate(prompts)]
        for at, (prompt, events) in enumerate(zip(prompts, each, strict=True)):
            check(events_of(events), prompt, logprobs(prompt), at % 4)
        for prompt, events in zip(prompts, others, strict=False):
            first = events_of(events)[0]
            assert isinstance(first, Token) and first.id == logprobs(prompt)[-1].argmax(), number
    assert engine.counts.cached_tokens == 0  # a prompt that is told is computed


def test_a_prompt_is_told_once_though_it_waits_again(
    start: Start, logprobs: Callable[[Sequence[int]], Array]
) -> None:
    engine, rng = start(step_tokens=16, kv_memory=9 * 4096), np.random.default_rng(1)
    prompts = [rng.integers(3, 320, 50).tolist() for _ in range(4)]
    each = [submit(engine, p, tells_prompt=True, max_new_tokens=40) for p in prompts]
    for prompt, events in zip(prompts, each, strict=True):
        check(events_of(events), prompt, logprobs(prompt), 0)
    assert engine.counts.preemptions


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(True, top_k=0, seed=1)])
def test_an_answer_may_not_end_yet(
    start: Start, logprobs: Callable[[Sequence[int]], Array], sampling: Sampling
) -> None:
    engine, prompt = start(), [5, 6, 7]
    bias = Sampling(**{**vars(sampling), "logit_bias": {9: 100.0}})
    found = events_of(submit(engine, prompt, sampling=bias, ends=frozenset([9]), min_new_tokens=4))
    assert found[-1] == End("stop")
    tokens = [event.id for event in found[:-1] if isinstance(event, Token)]
    assert len(tokens) == 5 and tokens[4] == 9 and 9 not in tokens[:4]
    if not sampling.do_sample:
        for place in range(4):
            wanted = logprobs([*prompt, *tokens[:place]])[-1]
            wanted[9] = -np.inf
            assert tokens[place] == wanted.argmax()


def test_min_new_tokens_of_a_generator(par: Path) -> None:
    with Generator(par, timeout=TIMEOUT) as generator:
        options = {"max_new_tokens": 9, "eos_token_id": [9], "logit_bias": {9: 100.0}}
        short, long = (generator.generate("ab", min_new_tokens=n, **options)[0] for n in (0, 6))
        assert short.tokens == [9] and long.reason == "stop"
        assert len(long.tokens) == 7 and 9 not in long.tokens[:6]


class Few:
    """Allows a few tokens."""

    def __init__(self, *tokens: int) -> None:
        self._tokens = tokens

    def allowed(self) -> Array:
        return np.isin(np.arange(10), self._tokens)

    def accept(self, token: int) -> None:
        pass


def test_a_constraint_may_end_a_text_too_soon() -> None:
    """If it allows nothing else."""
    candidates = Candidates.all(np.arange(10.0))
    for few, wanted in ((Few(3, 9), 3), (Few(9), 9)):
        limits = Limits(ends=frozenset([9]), min_new_tokens=2, constraint=few)
        token, later = (limits.choose(candidates, [5] * (1 + n), n) for n in (0, 2))
        assert token is not None and token.id == wanted
        assert later is not None and later.id == 9


def test_a_stop_string_may_be_a_special_token(par: Path) -> None:
    with Generator(par, timeout=TIMEOUT) as generator:
        options = {"max_new_tokens": 9, "logit_bias": {2: 100.0}}
        for stops in ("<pad>", ["xyz", "<pad>"]):
            (found,) = generator.generate("ab", stop_strings=stops, **options)
            assert (found.tokens, found.text, found.reason) == ([2], "", "stop")
        (found,) = generator.generate("ab", stop_strings=["pad>"], **options)
        assert found.tokens == [2] * 9 and found.reason == "length"
