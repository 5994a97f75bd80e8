"""Runs many requests on a sharded language model: they join and leave between steps."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from onnxpar.errors import InputError, ModelError, OnnxparError, RankError
from onnxpar.llm.batching import Batching
from onnxpar.llm.language_model import LanguageModel
from onnxpar.llm.paged_decoder import PagedDecoder, count_pages
from onnxpar.llm.requests import Busy, End, Failure, Limits, Listener
from onnxpar.llm.scheduler import Piece, Text
from onnxpar.llm.tokenizer import Tokenizer
from onnxpar.runtime.bundle import Bundle
from onnxpar.runtime.closing import Closing
from onnxpar.runtime.session import InferenceSession

READY, STARTING, DRAINING, FAILED, CLOSED = "ready", "starting", "draining", "failed", "closed"
_IDLE_CHECK = 1.0
"""Seconds after which it is checked again that the ranks still run, if there is nothing to do."""
_STARTS = 3
"""How often it is tried to start ranks again."""


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
    tell         called with a line when ranks die, and when new ones run or do not start
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
        tell: Callable[[str], None] = lambda text: None,
        **options: Any,
    ) -> None:
        for name, value in (("max_running", max_running), ("step_tokens", step_tokens)):
            if value < 1:
                raise InputError(f"{name} is {value}; it must be at least 1")
        if max_waiting < 0:
            raise InputError(f"max_waiting is {max_waiting}; it must be at least 0")
        self._par, self._options, self._tell = par, options, tell
        self._bundle = Bundle.load(par)
        self.model = LanguageModel.of(self._bundle)
        if not self.model.page_size:
            has = "caches as its model has them"
            if self.model.pads_right:
                remedy = "shard the model again with --page-size 16"
            else:
                remedy = "only those of GroupQueryAttention can be in pages; use `generate`"
            raise ModelError(f"{self._bundle.path} has {has}, and not in pages: {remedy}")
        self.vocabulary = self.model.vocabulary
        self._pages = count_pages(self._bundle, self.model, kv_memory, max_running)
        self._max_running, self._max_waiting = max_running, max_waiting
        self._step_tokens = step_tokens
        self._before = Counts()
        self._changed = threading.Condition()  # a listener may cancel requests
        self._status = STARTING
        self._session, self._batching = self._start()
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
            scheduler, done = self._batching.scheduler, vars(self._batching.done)
            since = {name: getattr(self._before, name) + count for name, count in done.items()}
            return replace(
                self._before,
                **since,
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                pages=scheduler.pool.pages,
                used_pages=scheduler.pool.used,
                preemptions=self._before.preemptions + scheduler.preemptions,
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
            scheduler = self._batching.scheduler
            free = max(self._max_running - len(scheduler.running), 0)
            if len(scheduler.waiting) >= self._max_waiting + free:
                raise Busy(f"{len(scheduler.waiting)} requests wait already; try again later")
            self._batching.add(text)
            self._changed.notify_all()
        return Generation(self, text)

    def drain(self, timeout: float) -> bool:
        """Takes no more requests, and waits until all have ended; returns False if some have not
        after `timeout` seconds."""
        with self._changed:
            if self._status in (READY, STARTING):
                self._status = DRAINING
            return self._changed.wait_for(lambda: not self._batching.texts, timeout)

    def close(self) -> None:
        """Cancels all requests, and ends the ranks."""
        with self._changed:
            self._status = CLOSED
            for text in self._batching.texts:
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

    def _start(self) -> tuple[InferenceSession, Batching]:
        """Starts the ranks. Errors: RankError if one does not start."""
        session = InferenceSession(self._par, **self._options)
        try:
            decoder = PagedDecoder(session, self._bundle, self.model, self._pages)
            return session, Batching(decoder, self._max_running, self._step_tokens)
        except BaseException:
            session.close()
            raise

    def _cancel(self, text: Text) -> None:
        with self._changed:
            text.is_cancelled = True
            self._changed.notify_all()

    def _serve(self) -> None:
        """Runs steps until the engine is closed: the engine's thread."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._batching.texts or self._status == CLOSED, _IDLE_CHECK
                )
                for text in self._batching.texts:
                    if text.is_cancelled:
                        self._batching.end(text, End("cancelled", text.cached))
                self._changed.notify_all()
                if self._status == CLOSED:
                    return
                pieces = self._batching.next()
            if pieces:
                self._step(pieces)
            elif self._status != FAILED:
                self._check_ranks()

    def _check_ranks(self) -> None:
        """Starts ranks again that have died while there was nothing to do."""
        try:
            self._session.check_alive()
        except RankError as error:
            self._restart(error)

    def _step(self, pieces: Sequence[Piece]) -> None:
        try:
            chosen = self._batching.run(pieces)
        except RankError as error:
            self._restart(error)
        except Exception as error:  # the texts of this step fail; the others go on
            self._fail([piece.text for piece in pieces], _reported(error))
        else:
            with self._changed:
                self._batching.finish(pieces, chosen)
                self._changed.notify_all()

    def _fail(self, texts: Sequence[Text], error: OnnxparError) -> None:
        with self._changed:
            for text in texts:
                self._batching.end(text, Failure(error))
            self._changed.notify_all()

    def _restart(self, error: RankError) -> None:
        """Fails the texts that run, and starts new ranks, on which those that wait begin; fails
        these, too, if no ranks start."""
        with self._changed:
            if self._status == READY:
                self._status = STARTING
            running = list(self._batching.scheduler.running)
        self._fail(running, error)
        self._session.close()
        self._tell(f"{_first_line(error)}; new ranks start")
        started = self._started_again()
        is_up = not isinstance(started, OnnxparError)
        self._tell("the ranks run again" if is_up else f"no ranks start: {_first_line(started)}")
        with self._changed:
            if isinstance(started, OnnxparError):
                self._status = FAILED
                self._fail(self._batching.texts, started)
                return
            self._before = replace(self.counts, restarts=self._before.restarts + 1)
            waiting = self._batching.texts
            self._session, self._batching = started
            for text in waiting:
                text.pages, text.done = [], 0
                self._batching.add(text)
            if self._status == STARTING:
                self._status = READY
            self._changed.notify_all()

    def _started_again(self) -> tuple[InferenceSession, Batching] | OnnxparError:
        """Starts new ranks; returns the last error if they do not start."""
        for attempt in range(1, _STARTS + 1):
            try:
                return self._start()
            except OnnxparError as error:
                failed = error
                time.sleep(attempt / 2)
        return failed


def _first_line(error: object) -> str:
    return str(error).splitlines()[0]


def _reported(error: Exception) -> OnnxparError:
    """An error as the listeners get it."""
    if isinstance(error, OnnxparError):
        return error
    return OnnxparError(f"internal error: {type(error).__name__}: {error}")
