"""Continuous batching: texts that join and leave between the steps of a paged decoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onnxpar.errors import OnnxparError
from onnxpar.llm.candidates import Candidates
from onnxpar.llm.page_pool import PagePool
from onnxpar.llm.paged_decoder import PagedDecoder
from onnxpar.llm.requests import End, Event, Failure, Token
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

    def run(self, pieces: Sequence[Piece]) -> list[tuple[Text, Token | Failure]]:
        """Computes pieces; returns the next token of each text that is complete."""
        complete = [piece.text for piece in pieces if piece.is_last]
        whole = any(text.has_missed or text.limits.needs_all for text in complete)
        found = list(self._choose(complete, self._decoder.run(pieces, whole)))
        again = [text for text, token in found if token is None]
        if again:
            # Computing a text's last token again writes the same into the caches.
            for text in again:
                text.has_missed = True
            last = [Piece(text, len(text.tokens) - 1, 1) for text in again]
            found += self._choose(again, self._decoder.run(last, whole=True))
        return [(text, token) for text, token in found if token is not None]

    def _choose(
        self, texts: Sequence[Text], candidates: Sequence[Candidates]
    ) -> Iterator[tuple[Text, Token | Failure | None]]:
        """Yields the next token of each text that is still wanted; None if it takes all logits to
        tell."""
        for text, each in zip(texts, candidates, strict=True):
            if not text.is_cancelled:
                try:
                    yield text, text.limits.choose(each, text.tokens, text.step)
                except OnnxparError as error:
                    yield text, Failure(error)

    def finish(
        self, pieces: Sequence[Piece], chosen: Sequence[tuple[Text, Token | Failure]]
    ) -> None:
        """Appends the tokens that a step has chosen; ends texts that are complete."""
        for piece in pieces:
            self._count(piece)
            self.scheduler.advance(piece)
        self.done.steps += 1
        self.done.generated_tokens += len(chosen)
        for text, token in chosen:
            if isinstance(token, Failure):
                self.end(text, token)
                continue
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
