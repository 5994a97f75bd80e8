"""Continuous batching: texts that join and leave between the steps of a paged decoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from onnxpar.base.errors import OnnxparError
from onnxpar.llm.next_tokens import Candidates
from onnxpar.llm.page_pool import PagePool
from onnxpar.llm.paged_decoder import PagedDecoder
from onnxpar.llm.requests import End, Event, Failure, PromptTokens, Token, tell
from onnxpar.llm.scheduler import Piece, Scheduler, Step, Text

Choice = tuple[Text, Token | Failure | None]
"""(text, its next token). The token is None if only the logits of the whole vocabulary can tell
it."""
MOST_TOKENS = 8
"""Most tokens that ranks choose in a call. More would save little, and delay new requests."""


@dataclass
class Done:
    """Counts of the work so far.

    prompt_tokens     tokens of prompts, of which `cached_tokens` were in the caches already
    generated_tokens  new tokens
    steps             runs of the ranks
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0


class Batching:
    """The texts of a decoder. The caller repeats `next`, `run` and `finish`; only during `run` may
    other threads add texts. A call of the ranks may be several steps, if each text goes on with its
    likeliest token, and no text waits."""

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

    def release(self) -> list[Text]:
        """Removes all texts, and returns them as if none of their tokens were in the caches."""
        texts = self.texts
        for text in texts:
            self.scheduler.remove(text)
        return texts

    def take(self, texts: Sequence[Text]) -> None:
        """Adds texts that were released elsewhere; those that have begun wait before all others."""
        begun = [text for text in texts if text.step]
        self.scheduler.waiting.extendleft(reversed(begun))
        self.scheduler.waiting.extend(text for text in texts if not text.step)

    def end(self, text: Text, event: Event) -> None:
        """Removes a text, and tells its listener."""
        self.scheduler.remove(text)
        tell(text, event)

    def next(self) -> Step | None:
        """Returns the next step; None if there is no text."""
        pieces = self.scheduler.next()
        return Step(pieces, self._times(pieces)) if pieces else None

    def _times(self, pieces: Sequence[Piece]) -> int:
        """The number of steps that ranks take in a call: a power of two, because a call takes
        longer if the last one had another number of steps."""
        if self.scheduler.waiting or not all(map(_goes_on, pieces)):
            return 1
        left = min(piece.text.most - len(piece.text.tokens) for piece in pieces)
        most = max(min(left, MOST_TOKENS // len(pieces), self._decoder.most_steps(len(pieces))), 1)
        times = 1 << most.bit_length() - 1
        return times if self.scheduler.has_room(pieces, times) else 1

    def run(self, step: Step) -> list[tuple[Text, Token | Failure]]:
        """Computes a step; returns the next tokens of each text that is read to its end, in order.
        Texts whose token the candidates do not tell are computed again, with all logits. If the
        ranks die, no text has changed: texts with a constraint, which records each chosen token,
        get all logits at once, so that no second call follows a choice."""
        complete = [piece.text for piece in step.pieces if piece.is_last]
        whole = any(text.has_missed or text.limits.needs_all for text in complete)
        steps = self._decoder.run(step.pieces, whole, step.times)
        steps = [_without_told(step.pieces, steps[0]), *steps[1:]]
        choices = list(self._choose(complete, steps[0]))
        again = [text for text, token in choices if token is None]
        choices += self._following(complete, steps, choices)
        if again:
            # Computing a text's last token again writes the same into the caches.
            for text in again:
                text.has_missed = True
            last = [Piece(text, len(text.tokens) - 1, 1) for text in again]
            choices += self._choose(again, *self._decoder.run(last, whole=True))
        return [(text, token) for text, token in choices if token is not None]

    def _choose(self, texts: Sequence[Text], candidates: Sequence[Candidates]) -> Iterator[Choice]:
        """Yields the next token of each text that is still wanted; None if only the logits of the
        whole vocabulary can tell it."""
        for text, each in zip(texts, candidates, strict=True):
            if not text.is_cancelled:
                try:
                    yield text, text.limits.choose(each, text.tokens, text.step)
                except OnnxparError as error:
                    yield text, Failure(error)

    def _following(
        self, texts: Sequence[Text], steps: Sequence[Sequence[Candidates]], chosen: Sequence[Choice]
    ) -> Iterator[Choice]:
        """Yields the tokens that texts choose in the steps after the first one, as long as the
        ranks went on with the tokens that were chosen.

        steps   the candidates of the texts in each of these steps
        chosen  the tokens of the first step
        """
        at: Sequence[int] = range(len(texts))
        for before, following in pairwise(steps):
            last = dict(chosen)
            at = [i for i in at if _is_token(last.get(texts[i]), before[i].first)]
            chosen = list(self._choose([texts[i] for i in at], [following[i] for i in at]))
            yield from chosen

    def finish(self, step: Step, chosen: Sequence[tuple[Text, Token | Failure]]) -> None:
        """Appends the tokens that a step has chosen; ends texts that are complete."""
        for piece in step.pieces:
            self._count(piece)
            self.scheduler.advance(piece)
        self.done.steps += step.times
        grown: set[Text] = set()
        for text, token in chosen:
            if text in grown:
                if text.is_cancelled or text not in self.scheduler.running:
                    continue  # it has ended with an earlier token
                self.scheduler.advance(Piece.next(text, 1))
            grown.add(text)
            if isinstance(token, Failure):
                self.end(text, token)
                continue
            self.done.generated_tokens += 1
            if text.limits.tells_prompt and not text.step:
                tell(text, PromptTokens(text.told))
            text.tokens.append(token.id)
            tell(text, token)
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


def _without_told(pieces: Sequence[Piece], candidates: Sequence[Candidates]) -> list[Candidates]:
    """Records the tokens of prompts that listeners want to know, with their probabilities; returns
    the other candidates, among which tokens are to be chosen."""
    chosen = []
    picks = [(piece, place) for piece in pieces for place in piece.picks]
    for (piece, place), each in zip(picks, candidates, strict=True):
        text = piece.text
        if place + 1 == len(text.tokens):
            chosen.append(each)
        else:
            token, top = text.tokens[place + 1], each.logprobs(text.limits.top_logprobs)
            text.told.append(Token(token, each.logprob(token), top))
    return chosen


def _goes_on(piece: Piece) -> bool:
    """True if a piece is the last token of a text whose next token is the likeliest one, so that
    ranks can go on with it."""
    text = piece.text
    is_plain = text.limits.is_plain and text.step >= text.limits.min_new_tokens
    return piece.is_last and piece.count == 1 and is_plain and not text.has_missed


def _is_token(token: Token | Failure | None, id_: int) -> bool:
    return isinstance(token, Token) and token.id == id_
