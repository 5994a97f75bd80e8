"""Decides which tokens of which texts the next step computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.llm.page_pool import PagePool
from onnxpar.llm.requests import Limits, Listener, Token


@dataclass(eq=False)
class Text:
    """A text that is generated.

    tokens    its prompt and the generated tokens
    prompt    the number of tokens of the prompt
    most        the most tokens that it may have, prompt included
    limits      how its tokens are chosen
    listen      called with its events
    pages     its pages of the caches, in order
    done      how many of its tokens are in the caches
    cached      how many of its prompt's tokens were in the caches when it began, from earlier texts
    told        the tokens of its prompt but the first, as far as they are computed, if the listener
                wants to know their probabilities
    is_counted  True once the tokens of its prompt are counted
    has_missed  True once a token could be chosen only with the logits of all tokens
    losses    how often ranks died while it ran
    """

    tokens: list[int]
    prompt: int
    most: int
    limits: Limits
    listen: Listener
    pages: list[int] = field(default_factory=list)
    done: int = 0
    cached: int = 0
    told: list[Token] = field(default_factory=list)
    is_counted: bool = False
    has_missed: bool = False
    losses: int = 0
    is_cancelled: bool = False

    @property
    def step(self) -> int:
        """The number of generated tokens."""
        return len(self.tokens) - self.prompt

    @property
    def is_telling(self) -> bool:
        """True if the listener wants to know the prompt's probabilities, and some are not computed
        yet."""
        return self.limits.tells_prompt and len(self.told) < self.prompt - 1

    @property
    def changed(self) -> Array:
        """The ids of the tokens whose logits biases and penalties change before the next token is
        chosen."""
        return self.limits.sampling_at(self.step).changed(self.tokens, self.step)

    @property
    def left(self) -> int:
        """The number of tokens that are not in the caches yet."""
        return len(self.tokens) - self.done


@dataclass(frozen=True)
class Piece:
    """The part of a text that one step reads: `count` tokens, from token number `begin` on."""

    text: Text
    begin: int
    count: int

    @staticmethod
    def next(text: Text, most: int) -> Piece:
        """Returns the next piece of a text: the tokens that are not in the caches yet, at most
        `most`."""
        return Piece(text, text.done, min(text.left, most))

    @property
    def is_last(self) -> bool:
        """True if the piece ends with the text's last token, so that the next token can be
        chosen."""
        return self.begin + self.count == len(self.text.tokens)

    @property
    def picks(self) -> list[int]:
        """The places, in the text, of tokens after which logits are needed: to choose the next
        token, or to tell the listener the probability of the next token of the prompt."""
        text, end = self.text, self.begin + self.count
        told = range(len(text.told), min(end, text.prompt - 1)) if text.is_telling else ()
        return [*told, *([end - 1] if self.is_last else [])]

    def asked(self, place: int) -> Array:
        """Returns the tokens whose logits are needed behind the token at `place`, ascending: the
        next token of the prompt, or the tokens whose logits biases and penalties change."""
        following = self.text.tokens[place + 1 : place + 2]
        return np.array(following) if following else self.text.changed


@dataclass(frozen=True)
class Step:
    """The work of one call of the ranks.

    pieces  the parts of texts to read
    times   the number of steps; after the first, each text goes on with its likeliest token
    """

    pieces: Sequence[Piece]
    times: int = 1


class Scheduler:
    """The running texts and the waiting texts, each the oldest first.

    pool         the pages of the caches
    max_running  most texts that run together
    step_tokens  most tokens that a step reads

    Each step reads the last token of every text that is generated, and is filled up with tokens of
    prompts. If there are too few pages, the texts that began last wait again.
    """

    def __init__(self, pool: PagePool, max_running: int, step_tokens: int) -> None:
        self.pool = pool
        self.max_running, self.step_tokens = max_running, step_tokens
        self.running: list[Text] = []
        self.waiting: deque[Text] = deque()
        self.preemptions = 0

    def next(self) -> list[Piece]:
        """Returns the pieces of the next step, after taking pages for them; waiting texts may
        begin."""
        budget = max(self.step_tokens, len(self.running))
        pieces: list[Piece] = []
        for text in sorted(self.running, key=lambda text: text.left > 1):
            room = budget - sum(piece.count for piece in pieces)
            if text in self.running and room and self._reserve(text, min(text.left, room)):
                pieces.append(Piece.next(text, room))
        pieces = [piece for piece in pieces if piece.text in self.running]
        room = budget - sum(piece.count for piece in pieces)
        while room and self.waiting and len(self.running) < self.max_running:
            piece = self._admitted(self.waiting[0], room)
            if piece is None:
                break
            pieces.append(piece)
            room -= piece.count
        return pieces

    def has_room(self, pieces: Sequence[Piece], times: int) -> bool:
        """Takes the free pages that the texts of these pieces need for `times` steps; returns False
        if there are too few."""
        return all(self._extend(piece.text, times) for piece in pieces)

    def advance(self, piece: Piece) -> None:
        """Records that a step has computed a piece: its tokens are in the caches."""
        text, size = piece.text, self.pool.page_size
        before = text.done // size
        text.done += piece.count
        for at in range(before, text.done // size):
            self.pool.publish(text.pages, at, text.tokens[at * size : (at + 1) * size])

    def remove(self, text: Text) -> None:
        """Removes a text that ends, and frees its pages."""
        if text in self.running:
            self.running.remove(text)
        else:
            self.waiting.remove(text)
        self._release(text)

    def _release(self, text: Text) -> None:
        """Frees the pages of a text; none of its tokens are in the caches then."""
        self.pool.release(text.pages)
        text.pages, text.done = [], 0

    def _reserve(self, text: Text, count: int) -> bool:
        """Takes pages for the next `count` tokens of a running text. If no page is free, takes the
        pages of texts that began later; these texts wait again. Returns False if the text itself
        must wait again."""
        while not self._extend(text, count):
            last = self.running[-1]
            self._preempt(last)
            if last is text:
                return False
        return True

    def _extend(self, text: Text, count: int) -> bool:
        """Takes free pages for the next `count` tokens of a text. Returns False if there are too
        few; the text keeps the pages that it got."""
        while len(text.pages) * self.pool.page_size < text.done + count:
            page = self.pool.take()
            if page is None:
                return False
            text.pages.append(page)
        return True

    def _preempt(self, text: Text) -> None:
        """Lets a running text wait again, before all others, and frees its pages."""
        self.running.remove(text)
        self._release(text)
        self.waiting.appendleft(text)
        self.preemptions += 1

    def _admitted(self, text: Text, room: int) -> Piece | None:
        """Lets a waiting text run, if there are pages for all its tokens and the next one, and
        returns its first piece, of at most `room` tokens; None if there are too few pages."""
        if not text.is_telling:  # tokens that are told must be computed
            text.pages = self.pool.shared_prefix(text.tokens)
        text.done = len(text.pages) * self.pool.page_size
        if not self._extend(text, text.left + 1):
            self._release(text)
            return None
        text.cached = max(text.cached, min(text.done, text.prompt))
        self.waiting.popleft()
        self.running.append(text)
        return Piece.next(text, room)
