"""The tokens of texts that are generated together, as they come."""

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
    """Generates texts."""

    def follow(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[Limits], ended: Collection[int]
    ) -> Iterator[Step]:
        """Yields the tokens of texts, until all have ended. The caller adds to `ended` the numbers
        of texts for which it wants no more tokens."""
        ...


class BatchSource:
    """Generates texts on a decoder that runs one batch at a time, from its beginning to its end;
    `given` are further inputs of the batch."""

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
    """Generates texts on a decoder behind an encoder: the encoder reads the prompts, and the texts
    begin as the model prescribes."""

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
        """Implements `TokenSource.follow`; of `prompts`, only the lengths count, which are those of
        the beginnings."""
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
    """Generates texts on a decoder whose caches are in pages. Several calls may follow texts at
    once."""

    def __init__(self, batching: Batching) -> None:
        self._batching = batching
        self._lock = threading.Lock()

    def follow(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[Limits], ended: Collection[int]
    ) -> Iterator[Step]:
        """Implements `TokenSource.follow`. The thread that wants the next token runs a step of all
        texts."""
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
        """Runs a step; the lock is held."""
        step = self._batching.next()
        if step is not None:
            self._batching.finish(step, self._batching.run(step))

    def _leave(self, texts: Sequence[Text]) -> None:
        """Removes the texts that have not ended; the lock is held."""
        for text in self._batching.texts:
            if text in texts:
                self._batching.scheduler.remove(text)


def _next_step(come: deque[tuple[int, Token]]) -> list[tuple[int, Token]]:
    """Takes the tokens out of `come`, up to the second token of a text."""
    step: dict[int, Token] = {}
    while come and come[0][0] not in step:
        row, token = come.popleft()
        step[row] = token
    return list(step.items())
