"""An engine without a model: what it says is written by the test."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from committed import MODELS

from onnxpar.base.errors import RankError
from onnxpar.llm.engine import Counts
from onnxpar.llm.requests import Busy, End, Failure, Limits, Listener, PromptTokens, Token
from onnxpar.llm.tokenizer import Tokenizer
from onnxpar.runtime.ranks.closing import Closing

FOLDER = MODELS / "llm" / "llama"
END = 1
"""The token that ends texts."""


@dataclass(frozen=True)
class Model:
    """What a server asks of a model."""

    ends: frozenset[int] = frozenset([END])
    begin: int | None = 0


@dataclass(eq=False)
class Generation:
    """A request, whose tokens come one by one."""

    prompt: Sequence[int]
    limits: Limits
    listen: Listener
    tokens: Iterator[int]
    number: int = 0
    is_cancelled: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.is_cancelled = True

    def step(self, fails: bool) -> bool:
        """Tells the next event; returns False after the last one."""
        if self.is_cancelled:
            return self._end(End("cancelled", 2))
        if fails:
            return self._end(Failure(RankError("rank 1 has ended")))
        if self.limits.tells_prompt and not self.number:
            each = enumerate(self.prompt[1:], 1)
            self.listen(PromptTokens([self._told(token, -0.25 * at) for at, token in each]))
        token = next(self.tokens, END)
        constraint = self.limits.constraint
        if constraint is not None:
            allowed = np.flatnonzero(constraint.allowed())
            token = int(allowed[(token * 7919 + self.number * 31) % len(allowed)])
            constraint.accept(token)
        self.number += 1
        self.listen(self._told(token, -0.5))
        if token in self.limits.ends:
            return self._end(End("stop", 2))
        if self.number == self.limits.max_new_tokens:
            return self._end(End("length", 2))
        return True

    def _told(self, token: int, logprob: float) -> Token:
        others = [t for t in range(3, 330) if t != token][: max(self.limits.top_logprobs - 1, 0)]
        top = [(token, logprob), *((other, -float("inf")) for other in others)]
        return Token(token, logprob, top[: self.limits.top_logprobs])

    def _end(self, event: End | Failure) -> bool:
        self.ended.set()
        self.listen(event)
        return False


def says(text: str) -> Callable[[Sequence[int], Limits], Iterator[int]]:
    """A script that answers any prompt with a text."""
    ids = Tokenizer(FOLDER).encode(text, specials=False)
    return lambda prompt, limits: iter(ids)


def forever(prompt: Sequence[int], limits: Limits, start: int = 65) -> Iterator[int]:
    """A script without an end: a b c ..."""
    return itertools.cycle(range(start, start + 26))


class Engine(Closing):
    """An engine whose answers are scripted: `script` makes the tokens of an answer, `delay` is the
    time of a step, `fails` makes the ranks fail, `most` fills the queue."""

    def __init__(self, par: object = None, **options: Any) -> None:
        self.options = options
        self.model, self.vocabulary, self.longest = Model(), 320, 512
        self.tokenizer = Tokenizer(FOLDER if par is None else Path(str(par)))
        self.counts = Counts(pages=64)
        self.renew()
        self.closed = False
        self._running: list[Generation] = []
        self._new: queue.Queue[Generation | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """Makes it as it was first."""
        self.script: Callable[[Sequence[int], Limits], Iterator[int]] = says("Hello, world!")
        self.delay, self.fails, self.most, self.state = 0.0, False, 1000, "ready"
        self.generations: list[Generation] = []

    @property
    def status(self) -> str:
        return self.state

    def submit(self, prompt: Sequence[int], limits: Limits, listen: Listener) -> Generation:
        limits.sampling.check(self.vocabulary)
        if self.state != "ready" or len(self._running) >= self.most:
            raise Busy("the queue is full")
        made = Generation(prompt, limits, listen, self.script(prompt, limits))
        self.generations.append(made)
        self._running.append(made)
        self._new.put(made)
        return made

    def close(self) -> None:
        self.closed = True
        self._new.put(None)
        self._thread.join(10)

    def _run(self) -> None:
        active: list[Generation] = []
        while not self.closed:
            while not active or not self._new.empty():
                new = self._new.get()
                if new is None:
                    return
                active.append(new)
                count = self.counts.prompt_tokens + len(new.prompt)
                self.counts = replace(self.counts, prompt_tokens=count)
            time.sleep(self.delay)
            done = [each for each in active if not each.step(self.fails)]
            active = [each for each in active if each not in done]
            for each in done:
                self._running.remove(each)
            new_tokens = self.counts.generated_tokens + len(active) + len(done)
            self.counts = replace(
                self.counts, generated_tokens=new_tokens, running=len(self._running)
            )
