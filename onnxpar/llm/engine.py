"""Runs many requests on a sharded language model at once: requests join and leave between steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from onnxpar.base.errors import InputError, ModelError, OnnxparError
from onnxpar.llm.batching import Batching
from onnxpar.llm.language_model import LanguageModel
from onnxpar.llm.paged_decoder import PagedDecoder, count_pages, page_bytes
from onnxpar.llm.requests import Busy, End, Failure, Limits, Listener
from onnxpar.llm.scheduler import Step, Text
from onnxpar.llm.tokenizer import Tokenizer
from onnxpar.llm.worker import FAILED as FAILED
from onnxpar.llm.worker import READY as READY
from onnxpar.llm.worker import Worker
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.session import InferenceSession


@dataclass(frozen=True)
class Counts:
    """Counts of an engine: now, and since its start.

    running, waiting   numbers of texts now
    pages, used_pages  the number of pages of the caches, and how many of them texts have now
    prompt_tokens      tokens of prompts, cached ones included
    cached_tokens      tokens of prompts that were in the caches already, from earlier texts
    generated_tokens   new tokens
    preemptions        how often a text had to wait again, because others needed its pages
    steps              runs of the ranks
    restarts           how often ranks were started again
    continued          how often a request went on after its ranks had died
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
    continued: int = 0


class Generation:
    """A request that an engine has accepted, so that it can be cancelled."""

    def __init__(self, engine: Engine, text: Text) -> None:
        self._engine, self._text = engine, text

    def cancel(self) -> None:
        """Ends the request before its next token; its listener gets End("cancelled"), unless the
        request has ended already. Any thread may call it."""
        self._engine._cancel(self._text)


class Engine(Worker[Text, Step, Batching]):
    """A sharded language model whose caches are in pages, on its ranks.

    par          a folder that `onnxpar shard --page-size N` made of a language model's folder
    kv_memory    bytes of caches on each rank, or text such as "2GB"; default: room for
                 `max_running` texts, at most a quarter of the free memory
    max_running  most texts that run together
    max_waiting  most texts that wait; more are refused
    step_tokens  most tokens that a step reads, so that long prompts do not hold up others
    tell         called with a line when ranks die, and when new ones run or do not start
    options      those of `InferenceSession`

    If a rank dies, new ranks are started, and requests go on there with their next token; a request
    that has lost its ranks three times fails. Errors: ModelError for a model that is no decoder
    with caches in pages; RankError if a rank does not start.
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
        super().__init__(par, options, tell)
        self._bundle = Bundle.load(par)
        self.model = LanguageModel.of(self._bundle)
        if self.model.has_encoder:
            raise ModelError(
                f"{self._bundle.path} is an encoder-decoder, which cannot be served yet, only "
                "decoders with caches in pages and embedding models can; use `onnxpar generate` or "
                "onnxpar.llm.Generator"
            )
        if not self.model.page_size:
            raise ModelError(
                f"{self._bundle.path} has caches as its model has them, and not in pages: shard "
                "the model again with --page-size 16; if they cannot be in pages, that says why, "
                "and `generate` still works"
            )
        self.vocabulary = self.model.vocabulary
        self._pages = count_pages(self._bundle, self.model, kv_memory, max_running, options)
        self._max_running, self._max_waiting = max_running, max_waiting
        self._step_tokens = step_tokens
        self._before = Counts()
        self._batching = self._start_ranks()
        self._start_thread("onnxpar-engine")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model. Errors: ModelError if it has none."""
        return Tokenizer(self._bundle.path)

    @property
    def longest(self) -> int:
        """The most tokens of a text, prompt included, for which the model's context and the caches
        have room."""
        room = self._pages * self.model.page_size
        return room if self.model.context is None else min(self.model.context, room)

    @property
    def kv_memory(self) -> int:
        """Bytes of all caches on one rank, the one with the most."""
        return self._pages * page_bytes(self._bundle, self.model)

    def burden(self, tokens: Sequence[int]) -> tuple[bool, bool, int, int]:
        """Returns how long the next token of a new text would take, to compare engines, less first:
        True if the ranks do not run now; True if as many texts run as may; the number of tokens to
        compute before it; and the number of texts. `tokens` are the tokens of the new text."""
        with self._changed:
            scheduler = self._batching.scheduler
            texts = self._batching.texts
            known = scheduler.pool.known(tokens) * scheduler.pool.page_size
            left = sum(text.left for text in texts) + len(tokens) - known
            is_full = len(texts) >= self._max_running
            return self._status != READY, is_full, left, len(texts)

    @property
    def counts(self) -> Counts:
        """The current counts of the engine."""
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
                continued=self._continued,
            )

    def submit(self, prompt: Sequence[int], limits: Limits, listen: Listener) -> Generation:
        """Accepts a request; `listen` is later called with its events. Errors: InputError for a
        prompt or limits that the model cannot serve; Busy if too many requests wait, or if the
        engine is closed or has failed."""
        tokens = [int(token) for token in prompt]
        self._check(tokens, limits)
        most = min(len(tokens) + limits.max_new_tokens, self.longest)
        text = Text(tokens, len(tokens), most, limits, listen)
        with self._changed:
            self._check_open()
            scheduler = self._batching.scheduler
            free = max(self._max_running - len(scheduler.running), 0)
            if len(scheduler.waiting) >= self._max_waiting + free:
                raise Busy(f"{len(scheduler.waiting)} requests wait already; try again later")
            self._batching.add(text)
            self._changed.notify_all()
        return Generation(self, text)

    def _check(self, tokens: Sequence[int], limits: Limits) -> None:
        """Errors: InputError for a prompt that is too long or has unknown tokens, or for wrong
        limits."""
        self.model.check_tokens(tokens)
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

    def _open(self, session: InferenceSession) -> Batching:
        decoder = PagedDecoder(session, self._bundle, self.model, self._pages)
        return Batching(decoder, self._max_running, self._step_tokens)

    def _adopt(self, made: Batching) -> None:
        self._before = replace(self.counts, restarts=self._before.restarts + 1)
        waiting = self._batching.texts
        self._batching = made
        for text in waiting:
            self._batching.add(text)

    def _requests(self) -> Sequence[Text]:
        return self._batching.texts

    def _running(self) -> Sequence[Text]:
        return self._batching.scheduler.running

    def _release(self) -> Sequence[Text]:
        return self._batching.release()

    def _take(self, requests: Sequence[Text]) -> None:
        self._batching.take(requests)

    def _end_cancelled(self) -> None:
        for text in self._batching.texts:
            if text.is_cancelled:
                self._batching.end(text, End("cancelled", text.cached))

    def _fail(self, request: Text, error: OnnxparError) -> None:
        self._batching.end(request, Failure(error))

    def _next(self) -> Step | None:
        return self._batching.next()

    def _of(self, work: Step) -> Sequence[Text]:
        return [piece.text for piece in work.pieces]

    def _run(self, work: Step) -> Callable[[], None]:
        chosen = self._batching.run(work)
        return lambda: self._batching.finish(work, chosen)
