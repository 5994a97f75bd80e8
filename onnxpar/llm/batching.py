"""Continuous batching: texts that join and leave between the steps of a paged decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.llm.page_pool import PagePool
from onnxpar.llm.paged_decoder import PagedDecoder
from onnxpar.llm.requests import End, Event, Token
from onnxpar.llm.sampling import log_total
from onnxpar.llm.scheduler import Piece, Scheduler, Text


@dataclass
class Done:
    """What was done so far.

    prompt_tokens     tokens of prompts, of which `cached_tokens` were in the caches already
    generated_tokens  new tokens
    steps             runs of the ranks
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0


class Batching:
    """The texts of a decoder. A step is `next`, `run` and `finish`; only `run` may go on while
    other threads add texts."""

    def __init__(self, decoder: PagedDecoder, max_running: int, step_tokens: int) -> None:
        self._decoder = decoder
        pool = PagePool(decoder.pages, decoder.page_size)
        self.scheduler = Scheduler(pool, max_running, step_tokens)
        self.done = Done()

    @property
    def texts(self) -> list[Text]:
        """The texts that run, and those that wait."""
        return [*self.scheduler.running, *self.scheduler.waiting]

    def add(self, text: Text) -> None:
        """Adds a text, which waits behind all others."""
        self.scheduler.waiting.append(text)

    def end(self, text: Text, event: Event) -> None:
        """Removes a text, and tells its listener."""
        self.scheduler.remove(text)
        text.listen(event)

    def next(self) -> list[Piece]:
        """Returns the pieces of the next step; none if there is no text."""
        return self.scheduler.next()

    def run(self, pieces: Sequence[Piece]) -> list[tuple[Text, Token]]:
        """Computes pieces; returns the next token of each text that is complete."""
        logits = self._decoder.run(pieces)
        complete = [piece.text for piece in pieces if piece.is_last]
        return [
            (text, _chosen(text, row))
            for text, row in zip(complete, logits, strict=False)
            if not text.is_cancelled
        ]

    def finish(self, pieces: Sequence[Piece], chosen: Sequence[tuple[Text, Token]]) -> None:
        """Appends the tokens that a step has chosen; ends texts that are complete."""
        for piece in pieces:
            self._count(piece)
            self.scheduler.advance(piece)
        self.done.steps += 1
        self.done.generated_tokens += len(chosen)
        for text, token in chosen:
            text.tokens.append(token.id)
            text.listen(token)
            if text.is_cancelled:
                continue  # by its listener
            if token.id in text.limits.ends:
                self.end(text, End("stop", text.cached))
            elif len(text.tokens) >= text.most:
                self.end(text, End("length", text.cached))

    def _count(self, piece: Piece) -> None:
        """Counts the tokens of a prompt, with its first piece."""
        text = piece.text
        if not text.is_counted:
            text.is_counted = True
            self.done.cached_tokens += text.cached
            self.done.prompt_tokens += text.prompt


def _chosen(text: Text, logits: Array) -> Token:
    """The next token of a text."""
    limits = text.limits
    if limits.constraint is not None:
        logits = np.where(limits.constraint.allowed(), logits, -np.inf)
    step = len(text.tokens) - text.prompt
    token, logprob = limits.sampling.choose(logits, text.tokens, limits.row, step)
    if limits.constraint is not None:
        limits.constraint.accept(token)
    if not limits.top_logprobs:
        return Token(token, logprob)
    best = np.argsort(-logits, kind="stable")[: limits.top_logprobs]
    total = log_total(logits)
    return Token(token, logprob, [(int(t), float(logits[t]) - total) for t in best])
