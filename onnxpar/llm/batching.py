"""Continuous batching: texts join and leave the running batch between any two steps of a decoder
whose caches are in pages."""

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

    prompt_tokens     tokens of prompts, cached ones included
    cached_tokens     tokens of prompts that were in the caches already, from earlier texts
    generated_tokens  new tokens
    steps             runs of the ranks
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0


class Batching:
    """The texts of a decoder, running and waiting. The caller repeats `next`, `run` and `finish`;
    only during `run` may other threads add texts.

    decoder      runs the steps
    max_running  most texts that run together
    step_tokens  most tokens that a step reads

    A single call of the ranks may take several steps, if no text waits, and each text goes on with
    its likeliest token.
    """

    def __init__(self, decoder: PagedDecoder, max_running: int, step_tokens: int) -> None:
        self._decoder = decoder
        pool = PagePool(decoder.pages, decoder.page_size)
        self.scheduler = Scheduler(pool, max_running, step_tokens)
        self.done = Done()

    @property
    def texts(self) -> list[Text]:
        """All texts: first the running texts, then the waiting texts."""
        return [*self.scheduler.running, *self.scheduler.waiting]

    def add(self, text: Text) -> None:
        """Adds a text, which waits behind all others."""
        self.scheduler.waiting.append(text)

    def release(self) -> list[Text]:
        """Removes all texts and returns them, ready to begin anew on other ranks: with their tokens
        so far, but no tokens in caches."""
        texts = self.texts
        for text in texts:
            self.scheduler.remove(text)
        return texts

    def take(self, texts: Sequence[Text]) -> None:
        """Adds texts that another Batching released. Texts with new tokens wait before all others,
        texts without behind all others."""
        begun = [text for text in texts if text.step]
        self.scheduler.waiting.extendleft(reversed(begun))
        self.scheduler.waiting.extend(text for text in texts if not text.step)

    def end(self, text: Text, event: Event) -> None:
        """Removes a text, and tells its listener how it ended."""
        self.scheduler.remove(text)
        tell(text, event)

    def next(self) -> Step | None:
        """Returns the next step; None if there is no text."""
        pieces = self.scheduler.next()
        return Step(pieces, self._times(pieces)) if pieces else None

    def _times(self, pieces: Sequence[Piece]) -> int:
        """Returns the number of steps for one call of the ranks: 1, or more if all texts go on with
        their likeliest token. It is a power of two, because a call takes longer if the last call
        had another number of steps."""
        if self.scheduler.waiting or not all(map(_goes_on, pieces)):
            return 1
        left = min(piece.text.most - len(piece.text.tokens) for piece in pieces)
        most = max(min(left, MOST_TOKENS // len(pieces), self._decoder.most_steps(len(pieces))), 1)
        times = 1 << most.bit_length() - 1
        return times if self.scheduler.has_room(pieces, times) else 1

    def run(self, step: Step) -> list[tuple[Text, Token | Failure]]:
        """Computes a step on the ranks; returns pairs of a text and its next token, or the failure
        of its choice, in order. Only texts whose tokens are all read get a token.

        Where the likeliest tokens that ranks return do not suffice for the choice, the text's last
        token is computed again, and all logits are returned. Texts with a constraint get all logits
        at once: the constraint records each chosen token, so no later call of the ranks may fail.
        """
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
        """Yields a pair (text, next token) for each text that is not cancelled. The token is None
        if only the logits of the whole vocabulary can tell it. `candidates` has the candidate
        tokens of each text."""
        for text, each in zip(texts, candidates, strict=True):
            if not text.is_cancelled:
                try:
                    yield text, text.limits.choose(each, text.tokens, text.step)
                except OnnxparError as error:
                    yield text, Failure(error)

    def _following(
        self, texts: Sequence[Text], steps: Sequence[Sequence[Candidates]], chosen: Sequence[Choice]
    ) -> Iterator[Choice]:
        """Yields the tokens that texts choose in the steps after the first one. The ranks went on
        with each text's likeliest token: a text's tokens end with the first choice of another
        token.

        steps   the candidates of the texts in each step
        chosen  the tokens of the first step
        """
        at: Sequence[int] = range(len(texts))
        for before, following in pairwise(steps):
            last = dict(chosen)
            at = [i for i in at if _is_token(last.get(texts[i]), before[i].first)]
            chosen = list(self._choose([texts[i] for i in at], [following[i] for i in at]))
            yield from chosen

    def finish(self, step: Step, chosen: Sequence[tuple[Text, Token | Failure]]) -> None:
        """Appends the tokens that `run` returned to their texts, tells listeners, and ends texts
        that are complete."""
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
        """Counts the tokens of a text's prompt, once, when its first piece is computed."""
        text = piece.text
        if not text.is_counted:
            text.is_counted = True
            self.done.cached_tokens += text.cached
            self.done.prompt_tokens += text.prompt


def _without_told(pieces: Sequence[Piece], candidates: Sequence[Candidates]) -> list[Candidates]:
    """Takes out the candidates for tokens of prompts: records these tokens with their probabilities
    in `Text.told`, for listeners that want to know them. Returns the other candidates, from which
    new tokens are chosen."""
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
    """True if ranks may choose the text's next token themselves and go on: the piece is the last
    token of the text, and the next token is its likeliest one, whatever came before."""
    text = piece.text
    is_plain = text.limits.is_plain and text.step >= text.limits.min_new_tokens
    return piece.is_last and piece.count == 1 and is_plain and not text.has_missed


def _is_token(token: Token | Failure | None, id_: int) -> bool:
    return isinstance(token, Token) and token.id == id_
