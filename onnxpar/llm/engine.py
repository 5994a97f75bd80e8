"""Runs many requests on the ranks of a sharded language model: they join and leave between steps."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.units import quantity
from onnxpar.errors import InputError, ModelError, OnnxparError, RankError
from onnxpar.llm.language_model import LanguageModel
from onnxpar.llm.page_pool import PagePool
from onnxpar.llm.paged_decoder import PagedDecoder, page_bytes
from onnxpar.llm.requests import Busy, End, Event, Failure, Limits, Listener, Token
from onnxpar.llm.scheduler import Piece, Scheduler, Text
from onnxpar.llm.tokenizer import Tokenizer
from onnxpar.runtime.bundle import Bundle
from onnxpar.runtime.closing import Closing
from onnxpar.runtime.session import InferenceSession

LONGEST = 4096
"""Tokens of a text for which the default size of the caches has room, if the context is longer."""
SHARE = 0.25
"""The most of the memory that is free at the start which the caches take by default."""
READY, STARTING, DRAINING, FAILED, CLOSED = "ready", "starting", "draining", "failed", "closed"
_RESTARTS = 3
"""How often ranks are started again in a row without a step between."""


@dataclass(frozen=True)
class Counts:
    """What an engine does now, and has done since its start.

    running, waiting, pages, used_pages  now
    prompt_tokens     tokens of prompts, of which `cached_tokens` were in the caches already
    generated_tokens  new tokens
    preemptions       how often a text had to wait again, because pages were needed
    steps             runs of the ranks
    restarts          how often ranks were started again
    """

    running: int = 0
    waiting: int = 0
    pages: int = 0
    used_pages: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    restarts: int = 0


class Generation:
    """A request that an engine has taken."""

    def __init__(self, engine: Engine, text: Text) -> None:
        self._engine, self._text = engine, text

    def cancel(self) -> None:
        """Ends the request before its next token; its listener gets End("cancelled"), unless the
        request has ended already. Any thread may call it."""
        self._engine._cancel(self._text)


class Engine(Closing):
    """A sharded language model whose caches are in pages, on its ranks.

    par          a folder that `onnxpar shard --page-size N` made of a language model's folder
    kv_memory    bytes of caches on each rank, or text such as "2GB"; default: room for
                 `max_running` texts, at most a quarter of the free memory
    max_running  most texts that run together
    max_waiting  most texts that wait; more are refused
    step_tokens  most tokens that a step reads, so that long prompts do not hold up others
    options      those of `InferenceSession`

    If a rank dies, running requests fail, those that wait stay, and new ranks are started. Errors:
    ModelError for a model that is no decoder with caches in pages; RankError if a rank does not
    start.
    """

    def __init__(
        self,
        par: str | os.PathLike[str],
        *,
        kv_memory: float | str | None = None,
        max_running: int = 16,
        max_waiting: int = 256,
        step_tokens: int = 256,
        **options: Any,
    ) -> None:
        for name, value in (("max_running", max_running), ("step_tokens", step_tokens)):
            if value < 1:
                raise InputError(f"{name} is {value}; it must be at least 1")
        if max_waiting < 0:
            raise InputError(f"max_waiting is {max_waiting}; it must be at least 0")
        self._par, self._options = par, options
        self._bundle = Bundle.load(par)
        self.model = LanguageModel.of(self._bundle)
        if not self.model.page_size:
            raise ModelError(
                f"{self._bundle.path} has caches as its model has them; shard the model again with "
                "--page-size 16, so that texts of any lengths run together"
            )
        self.vocabulary = _vocabulary(self._bundle, self.model)
        self._pages = self._count_pages(kv_memory, max_running)
        self._max_running, self._max_waiting = max_running, max_waiting
        self._step_tokens = step_tokens
        self._scheduler = self._new_scheduler()
        self._counts = Counts()
        self._changed = threading.Condition()  # a listener may cancel requests
        self._status = STARTING
        self._session, self._decoder = self._start()
        self._status = READY
        self._thread = threading.Thread(target=self._serve, name="onnxpar-engine", daemon=True)
        self._thread.start()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model. Errors: ModelError if it has none."""
        return Tokenizer(self._bundle.path)

    @property
    def longest(self) -> int:
        """The most tokens of a text, by the model's context and the caches."""
        room = self._pages * self.model.page_size
        return room if self.model.context is None else min(self.model.context, room)

    @property
    def status(self) -> str:
        """ "ready", "starting" while ranks start again, "draining", "failed" or "closed"."""
        return self._status

    @property
    def counts(self) -> Counts:
        """What the engine does, and has done."""
        with self._changed:
            scheduler = self._scheduler
            return replace(
                self._counts,
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                pages=scheduler.pool.pages,
                used_pages=scheduler.pool.used,
                preemptions=self._counts.preemptions + scheduler.preemptions,
            )

    def submit(self, prompt: Sequence[int], limits: Limits, listen: Listener) -> Generation:
        """Takes a request; `listen` is then called with its events. Errors: InputError for a prompt
        or limits that the model cannot serve; Busy if too many requests wait, or if the engine
        takes none."""
        tokens = [int(token) for token in prompt]
        self._check(tokens, limits)
        most = min(len(tokens) + limits.max_new_tokens, self.longest)
        text = Text(tokens, len(tokens), most, limits, listen)
        with self._changed:
            if self._status in (DRAINING, FAILED, CLOSED):
                raise Busy(f"the server is {self._status}; send the request to another one")
            free = self._max_running - len(self._scheduler.running)
            if len(self._scheduler.waiting) >= self._max_waiting + max(free, 0):
                raise Busy(f"{len(self._scheduler.waiting)} requests wait already; try again later")
            self._scheduler.waiting.append(text)
            self._changed.notify_all()
        return Generation(self, text)

    def drain(self, timeout: float) -> bool:
        """Takes no more requests, and waits until all have ended; returns False if some have not
        after `timeout` seconds."""
        with self._changed:
            if self._status in (READY, STARTING):
                self._status = DRAINING
            return self._changed.wait_for(lambda: not self._has_texts(), timeout)

    def close(self) -> None:
        """Cancels all requests, and ends the ranks."""
        with self._changed:
            self._status = CLOSED
            for text in (*self._scheduler.running, *self._scheduler.waiting):
                text.is_cancelled = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._session.close()

    def _check(self, tokens: Sequence[int], limits: Limits) -> None:
        """Errors: InputError for a prompt or limits that cannot be served."""
        if not tokens:
            raise InputError("a prompt has no tokens; give a text, token ids or a chat")
        for token in tokens:
            if not 0 <= token < self.vocabulary:
                raise InputError(
                    f"a prompt has token {token}; ids are from 0 to {self.vocabulary - 1}"
                )
        if limits.max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {limits.max_new_tokens}; it must be at least 1")
        if not 0 <= limits.top_logprobs <= self.vocabulary:
            raise InputError(
                f"top_logprobs is {limits.top_logprobs}; it must be from 0 to {self.vocabulary}"
            )
        limits.sampling.check(self.vocabulary)
        if len(tokens) >= self.longest:
            room = self._pages * self.model.page_size
            what = "the model's context" if self.longest == self.model.context else "the cache"
            more = "a shorter one" if what != "the cache" else "a shorter one, or more --kv-memory"
            raise InputError(
                f"a prompt has {len(tokens)} tokens, and {what} has room for "
                f"{min(self.longest, room)}; give {more}"
            )

    def _count_pages(self, kv_memory: float | str | None, max_running: int) -> int:
        """The number of pages. Errors: InputError if memory is too small for one text."""
        each, size = page_bytes(self._bundle, self.model), self.model.page_size
        longest = min(self.model.context or LONGEST, LONGEST)
        if kv_memory is not None:
            pages = int(_bytes(kv_memory)) // each
        else:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            most = int(free * SHARE) // (each * self._bundle.mesh.size)
            pages = min(-(-longest // size) * max_running, most)
        if pages < 2:
            raise InputError(
                f"kv_memory has room for {pages} pages of {size} tokens, which take {each:,} bytes "
                f"on a rank each; give at least {2 * each:,} bytes"
            )
        return pages

    def _new_scheduler(self) -> Scheduler:
        pool = PagePool(self._pages, self.model.page_size)
        return Scheduler(pool, self._max_running, self._step_tokens)

    def _start(self) -> tuple[InferenceSession, PagedDecoder]:
        """Starts the ranks. Errors: RankError if one does not start."""
        session = InferenceSession(self._par, **self._options)
        try:
            return session, PagedDecoder(session, self._bundle, self.model, self._pages)
        except BaseException:
            session.close()
            raise

    def _cancel(self, text: Text) -> None:
        with self._changed:
            text.is_cancelled = True
            self._changed.notify_all()

    def _has_texts(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting)

    def _serve(self) -> None:
        """Runs steps until the engine is closed: the engine's thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_texts() or self._status == CLOSED)
                self._drop_cancelled()
                if self._status == CLOSED:
                    return
                pieces = self._scheduler.next()
                self._changed.notify_all()
            if not pieces:
                continue
            try:
                logits = self._decoder.run(pieces)
            except RankError as error:
                self._restart(error)
            except OnnxparError as error:
                self._fail([piece.text for piece in pieces], error)
            else:
                self._finish(pieces, logits)

    def _drop_cancelled(self) -> None:
        for text in (*self._scheduler.running, *self._scheduler.waiting):
            if text.is_cancelled:
                self._end(text, End("cancelled", text.cached))

    def _end(self, text: Text, event: Event) -> None:
        """Ends a text; the lock is held."""
        self._scheduler.remove(text)
        text.listen(event)

    def _fail(self, texts: Sequence[Text], error: OnnxparError) -> None:
        with self._changed:
            for text in texts:
                self._end(text, Failure(error))
            self._changed.notify_all()

    def _finish(self, pieces: Sequence[Piece], logits: Array) -> None:
        """Appends the next token to each text that is complete."""
        chosen: list[tuple[Text, Token]] = []
        complete = [piece.text for piece in pieces if piece.is_last]
        for text, row in zip(complete, logits, strict=False):
            if not text.is_cancelled:
                chosen.append((text, _chosen(text, row)))
        prompt_tokens = sum(min(p.count, max(p.text.prompt - p.text.done, 0)) for p in pieces)
        begun = [p.text for p in pieces if p.text.done == p.text.cached < p.text.prompt]
        with self._changed:
            cached = sum(text.cached for text in begun)
            self._counts = replace(
                self._counts,
                steps=self._counts.steps + 1,
                prompt_tokens=self._counts.prompt_tokens + prompt_tokens + cached,
                cached_tokens=self._counts.cached_tokens + cached,
                generated_tokens=self._counts.generated_tokens + len(chosen),
            )
            for piece in pieces:
                self._scheduler.advance(piece)
            for text, token in chosen:
                text.tokens.append(token.id)
                text.listen(token)
                if token.id in text.limits.ends:
                    self._end(text, End("stop", text.cached))
                elif len(text.tokens) >= text.most:
                    self._end(text, End("length", text.cached))
            self._changed.notify_all()

    def _restart(self, error: RankError) -> None:
        """Fails the texts that run, and starts new ranks; fails all texts if these do not start."""
        with self._changed:
            if self._status == READY:
                self._status = STARTING
            waiting, running = self._scheduler.waiting, list(self._scheduler.running)
            preemptions = self._counts.preemptions + self._scheduler.preemptions
            restarts = self._counts.restarts + 1
            self._counts = replace(self._counts, preemptions=preemptions, restarts=restarts)
        self._fail(running, error)
        self._session.close()
        for attempt in range(_RESTARTS):
            try:
                self._session, self._decoder = self._start()
                break
            except OnnxparError as failed:
                error = failed if isinstance(failed, RankError) else RankError(str(failed))
                time.sleep(attempt)
        else:
            with self._changed:
                self._status = FAILED
            self._fail(list(waiting), error)
            return
        with self._changed:
            waiting = self._scheduler.waiting
            self._scheduler = self._new_scheduler()
            for text in waiting:  # a text that was preempted begins anew
                text.pages, text.done = [], 0
            self._scheduler.waiting = waiting
            if self._status == STARTING:
                self._status = READY
            self._changed.notify_all()


def _bytes(kv_memory: float | str) -> float:
    """Errors: InputError."""
    try:
        return quantity(kv_memory, "B", "--kv-memory", may_omit_unit=not isinstance(kv_memory, str))
    except OnnxparError as error:
        raise InputError(str(error)) from None


def _vocabulary(bundle: Bundle, model: LanguageModel) -> int:
    size = (bundle.outputs[model.logits].shape or (None,))[-1]
    return size if isinstance(size, int) else 1 << 31


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
    scores = logits.astype(np.float64) - logits.max()
    known = scores - np.log(np.exp(scores).sum())
    return Token(token, logprob, [(int(t), float(known[t])) for t in best])
