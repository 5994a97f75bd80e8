"""Decides which tokens of which texts a step computes."""

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
    most      the most tokens that it may have
    pages     its pages of the caches, in order
    done      how many of its tokens are in the caches
    cached    how many tokens were in the caches when it began, from earlier texts
    told      the computed tokens of its prompt but the first, if the listener wants to know them
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
        """How many tokens were generated."""
        return len(self.tokens) - self.prompt

    @property
    def is_telling(self) -> bool:
        """True if tokens of its prompt are still to be told to the listener."""
        return self.limits.tells_prompt and len(self.told) < self.prompt - 1

    @property
    def changed(self) -> Array:
        """The tokens whose logits are changed before the next one is chosen."""
        return self.limits.sampling_at(self.step).changed(self.tokens, self.step)

    @property
    def left(self) -> int:
        """How many tokens are not in the caches yet."""
        return len(self.tokens) - self.done


@dataclass(frozen=True)
class Piece:
    """The part of a text that one step reads: `count` tokens from number `begin` on."""

    text: Text
    begin: int
    count: int

    @staticmethod
    def next(text: Text, most: int) -> Piece:
        """Returns the next tokens of a text, at most `most`."""
        return Piece(text, text.done, min(text.left, most))

    @property
    def is_last(self) -> bool:
        """True if the text then is complete, so that its next token can be chosen."""
        return self.begin + self.count == len(self.text.tokens)

    @property
    def picks(self) -> list[int]:
        """The places of the tokens after which a token is chosen, or a token of the prompt is
        told."""
        text, end = self.text, self.begin + self.count
        told = range(len(text.told), min(end, text.prompt - 1)) if text.is_telling else ()
        return [*told, *([end - 1] if self.is_last else [])]

    def asked(self, place: int) -> Array:
        """Returns the tokens whose logits are needed behind a pick, ascending."""
        following = self.text.tokens[place + 1 : place + 2]
        return np.array(following) if following else self.text.changed


@dataclass(frozen=True)
class Step:
    """The work of a call of the ranks: the pieces of texts, and the number of steps (`times`) that
    follow each other, in which each text goes on with its likeliest token."""

    pieces: Sequence[Piece]
    times: int = 1


class Scheduler:
    """The texts that run, and those that wait, the oldest first.

    Each step computes a token of every text that is generated, and fills up with tokens of prompts.
    If there are too few pages, the texts that began last wait again.
    """

    def __init__(self, pool: PagePool, max_running: int, step_tokens: int) -> None:
        self.pool = pool
        self.max_running, self.step_tokens = max_running, step_tokens
        self.running: list[Text] = []
        self.waiting: deque[Text] = deque()
        self.preemptions = 0

    def next(self) -> list[Piece]:
        """Returns the pieces of the next step, and takes pages for them."""
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
        """Takes free pages for `times` steps of texts; returns False if there are too few."""
        return all(self._extend(piece.text, times) for piece in pieces)

    def advance(self, piece: Piece) -> None:
        """Notes that a step has computed a piece."""
        text, size = piece.text, self.pool.page_size
        before = text.done // size
        text.done += piece.count
        for at in range(before, text.done // size):
            self.pool.publish(text.pages, at, text.tokens[at * size : (at + 1) * size])

    def remove(self, text: Text) -> None:
        """Ends a text."""
        if text in self.running:
            self.running.remove(text)
        else:
            self.waiting.remove(text)
        self._release(text)

    def _release(self, text: Text) -> None:
        self.pool.release(text.pages)
        text.pages, text.done = [], 0

    def _reserve(self, text: Text, count: int) -> bool:
        """Takes the pages for the next `count` tokens of a running text; if none is free, from
        texts that began after it, which wait again. Returns False if the text itself has to
        wait."""
        while not self._extend(text, count):
            last = self.running[-1]
            self._preempt(last)
            if last is text:
                return False
        return True

    def _extend(self, text: Text, count: int) -> bool:
        """Takes free pages for the next tokens of a text; returns False if there are too few, and
        keeps the pages that it got."""
        while len(text.pages) * self.pool.page_size < text.done + count:
            page = self.pool.take()
            if page is None:
                return False
            text.pages.append(page)
        return True

    def _preempt(self, text: Text) -> None:
        self.running.remove(text)
        self._release(text)
        self.waiting.appendleft(text)
        self.preemptions += 1

    def _admitted(self, text: Text, room: int) -> Piece | None:
        """Lets a waiting text begin, if there are pages for its tokens and the next one; returns
        its first piece, of at most `room` tokens, else None."""
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
