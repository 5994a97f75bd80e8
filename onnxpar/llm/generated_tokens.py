"""Generates texts together, and yields their tokens step by step: one source for each kind of
decoder."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from onnxpar.base.arrays import Array
from onnxpar.llm.batching import Batching
from onnxpar.llm.decoder import Decoder
from onnxpar.llm.decoder_prompt import Beginning
from onnxpar.llm.generation_rules import GenerationRules, RuledText
from onnxpar.llm.next_tokens import Candidates
from onnxpar.llm.prompt_encoder import Input, PromptEncoder
from onnxpar.llm.requests import Event, Failure, Limits, Token
from onnxpar.llm.scheduler import Text

Step = Sequence[tuple[int, Token]]
"""The tokens that come together, with the numbers of their texts."""


class TokenSource(Protocol):
    """Generates texts on a decoder."""

    def follow(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[Limits], ended: Collection[int]
    ) -> Iterator[Step]:
        """Yields the new tokens of each step as pairs of the text's number and the token, until all
        texts have ended. `limits` has one entry for each prompt. The caller adds the number of a
        text to `ended` when it wants no more of its tokens."""
        ...


class BatchSource:
    """Generates texts on a decoder that computes one batch at a time, from its beginning to its
    end. `given` are further inputs of the batch, by name."""

    def __init__(self, decoder: Decoder, given: Mapping[str, Array] | None = None) -> None:
        self._decoder, self._given = decoder, given

    def follow(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[Limits], ended: Collection[int]
    ) -> Iterator[Step]:
        """Implements `TokenSource.follow`. Errors: InputError if another batch has begun
        meanwhile."""
        texts = [list(prompt) for prompt in prompts]
        batch, logits = self._decoder.start(prompts, self._given)
        while True:
            step = []
            for row, own in enumerate(limits):
                if row not in ended:
                    count = len(texts[row]) - len(prompts[row])
                    token = own.choose(Candidates.all(logits[row]), texts[row], count)
                    assert token is not None, "the candidates are all"
                    step.append((row, token))
                    texts[row].append(token.id)
            yield step
            if len(ended) == len(texts):
                return
            logits = self._decoder.step(batch, [text[-1] for text in texts])


class EncodedSource:
    """Generates texts on a decoder behind an encoder, which reads the prompts.

    inputs      the prompts for the encoder
    beginning   the first tokens of each text
    rules       which tokens may follow
    vocabulary  the number of tokens
    """

    def __init__(
        self,
        decoder: Decoder,
        encoder: PromptEncoder,
        inputs: Sequence[Input],
        beginning: Beginning,
        rules: GenerationRules,
        vocabulary: int,
    ) -> None:
        self._decoder, self._encoder, self._inputs = decoder, encoder, inputs
        self._beginning, self._rules, self._vocabulary = beginning, rules, vocabulary

    def follow(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[Limits], ended: Collection[int]
    ) -> Iterator[Step]:
        """Implements `TokenSource.follow`. Of `prompts`, only the number counts: the encoder reads
        `inputs` instead."""
        inputs = self._encoder.read(self._inputs)

        def first_logits(tokens: Sequence[int]) -> Array:
            return self._decoder.start([tokens] * len(prompts), inputs)[1]

        texts = self._beginning.of_each(len(prompts), first_logits)
        ruled = [
            replace(
                own, constraint=RuledText(self._rules, self._vocabulary, text, own.max_new_tokens)
            )
            for text, own in zip(texts, limits, strict=True)
        ]
        yield from BatchSource(self._decoder, inputs).follow(texts, ruled, ended)


class PagedSource:
    """Generates texts on a decoder whose caches are in pages. Several callers, in different
    threads, may iterate over `follow` at once: their texts share the steps."""

    def __init__(self, batching: Batching) -> None:
        self._batching = batching
        self._lock = threading.Lock()

    def follow(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[Limits], ended: Collection[int]
    ) -> Iterator[Step]:
        """Implements `TokenSource.follow`. A thread that wants a token, and has none waiting, runs
        a step of all threads' texts."""
        come: deque[tuple[int, Token]] = deque()
        failed: list[Failure] = []

        def text(row: int) -> Text:
            def listen(event: Event) -> None:
                if isinstance(event, Token):
                    come.append((row, event))
                elif isinstance(event, Failure):
                    failed.append(event)

            tokens, own = list(prompts[row]), limits[row]
            return Text(tokens, len(tokens), len(tokens) + own.max_new_tokens, own, listen)

        texts = [text(row) for row in range(len(prompts))]
        try:
            with self._lock:
                for each in texts:
                    self._batching.add(each)
            while len(ended) < len(texts):
                with self._lock:
                    self._leave([texts[row] for row in ended])
                    if not come:
                        self._step()
                    step = _next_step(come)
                if failed:
                    raise failed[0].error
                if step:
                    yield step
        finally:
            with self._lock:
                self._leave(texts)

    def _step(self) -> None:
        """Runs a step of all texts; the caller holds the lock."""
        step = self._batching.next()
        if step is not None:
            self._batching.finish(step, self._batching.run(step))

    def _leave(self, texts: Sequence[Text]) -> None:
        """Removes each of these texts that has not ended; the caller holds the lock."""
        for text in self._batching.texts:
            if text in texts:
                self._batching.scheduler.remove(text)


def _next_step(come: deque[tuple[int, Token]]) -> list[tuple[int, Token]]:
    """Removes the first tokens from `come`, at most one for each text, and returns them with the
    numbers of their texts."""
    step: dict[int, Token] = {}
    while come and come[0][0] not in step:
        row, token = come.popleft()
        step[row] = token
    return list(step.items())
