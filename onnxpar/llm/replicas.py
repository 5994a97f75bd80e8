"""Replicas: several workers with the same model, each with ranks of its own, which share the
requests.

A request goes to one worker. If ranks of that worker die, the others go on with its requests, while
its ranks start again.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from onnxpar.base.errors import InputError
from onnxpar.llm.embedder import Embedder, EmbedderCounts, Embedding
from onnxpar.llm.embedder import Listener as EmbeddingListener
from onnxpar.llm.encoder import Tokens
from onnxpar.llm.encoder_model import EncoderModel
from onnxpar.llm.engine import Counts, Engine, Generation
from onnxpar.llm.language_model import LanguageModel
from onnxpar.llm.requests import Busy, Limits, Listener
from onnxpar.llm.tokenizer import Tokenizer
from onnxpar.llm.worker import CLOSED, FAILED, READY, STARTING
from onnxpar.runtime.ranks.closing import Closing

W = TypeVar("W", Engine, Embedder)
T = TypeVar("T")
_ORDER = (READY, STARTING, FAILED, CLOSED)
"""All statuses of workers; the first one that any worker has is the status of all."""


class Replicas(Closing, Generic[W]):
    """Several workers (engines or embedders) with the same model.

    par       the folder that `onnxpar shard` wrote
    replicas  the number of workers, each with as many processes as the model has ranks
    tell      called with a line when ranks of a worker die, and when new ones run or do not start
    log_dir   a folder for the output of ranks, under replica.N/rank.M/
    options   those of a worker

    Errors: those of a worker; InputError for a number below 1.
    """

    def __init__(
        self,
        par: str | os.PathLike[str],
        *,
        replicas: int,
        tell: Callable[[str], None] = lambda text: None,
        log_dir: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        if replicas < 1:
            raise InputError(f"--replicas {replicas}: must be at least 1")
        self.workers: list[W] = []
        try:
            for number in range(replicas):
                own = self._own(number, replicas, tell, log_dir)
                self.workers.append(self._make(par, **{**options, **own}))
        except BaseException:
            self.close()
            raise
        for worker in self.workers:
            worker.hand_over = partial(self._hand_over, worker)

    def _own(
        self,
        number: int,
        replicas: int,
        tell: Callable[[str], None],
        log_dir: str | os.PathLike[str] | None,
    ) -> dict[str, Any]:
        """Returns the options of worker `number` that differ between workers: its name in messages,
        the folder of its logs, and its number, by which workers divide the cores."""
        logs = None if log_dir is None else Path(log_dir) / f"replica.{number}"
        told = {"tell": lambda text: tell(f"replica {number}: {text}"), "log_dir": logs}
        return {**told, "replica": number, "replicas": replicas}

    @abstractmethod
    def _make(self, par: str | os.PathLike[str], **options: Any) -> W:
        """Makes a worker."""

    @property
    def status(self) -> str:
        """The best status of any worker, in this order: "ready", "starting", "failed", "closed"."""
        statuses = {worker.status for worker in self.workers}
        return next(status for status in _ORDER if status in statuses)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model. Errors: ModelError if it has none."""
        return self.workers[0].tokenizer

    @property
    def longest(self) -> int:
        """The most tokens of a text, for any of the workers."""
        return self.workers[0].longest

    def close(self) -> None:
        """Cancels all requests, and ends the ranks."""
        for worker in self.workers:
            worker.close()

    def _submit(self, workers: Sequence[W], submit: Callable[[W], T]) -> T:
        """Calls `submit` with each worker in turn, until one accepts the request; returns the
        result. Errors: Busy if all are busy; other errors of a worker."""
        refusal: Busy | None = None
        for worker in workers:
            try:
                return submit(worker)
            except Busy as error:
                refusal = refusal or error
        assert refusal is not None, "there is a worker"
        raise refusal

    def _hand_over(self, own: W, requests: Sequence[Any]) -> Sequence[Any]:
        """Called by the worker `own` when its ranks have died: offers its requests to the other
        workers; returns the requests that no worker takes."""
        return [
            request
            for request in requests
            if not any(worker.take_over(request) for worker in self._others(own, request))
        ]

    def _others(self, own: W, request: Any) -> Iterator[W]:
        """Yields the workers other than `own`, the one that is least busy for the request first."""
        yield from (worker for worker in self._in_order(request) if worker is not own)

    @abstractmethod
    def _in_order(self, request: Any) -> Sequence[W]:
        """Returns the workers, the one that is least busy for the request first."""


class EngineReplicas(Replicas[Engine]):
    """Several engines with the same model, with the interface of `Engine`. A request goes to the
    engine that has the least left to compute, so that prompts with the same beginning come to the
    same engine."""

    def _make(self, par: str | os.PathLike[str], **options: Any) -> Engine:
        if self.workers:  # all have the same room, so that each can take over from any
            options["kv_memory"] = self.workers[0].kv_memory
        return Engine(par, **options)

    @property
    def model(self) -> LanguageModel:
        """The roles of the model's inputs and outputs."""
        return self.workers[0].model

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""
        return self.workers[0].vocabulary

    def each(self) -> list[tuple[str, Counts]]:
        """Returns the status and the counts of each engine."""
        return [(engine.status, engine.counts) for engine in self.workers]

    @property
    def counts(self) -> Counts:
        """The sums of the counts of all engines."""
        return Counts(*_sums(counts for _, counts in self.each()))

    def submit(self, prompt: Sequence[int], limits: Limits, listen: Listener) -> Generation:
        """Accepts a request, as `Engine.submit` does, by the least busy engine. Errors: Busy if no
        engine accepts it."""
        tokens = [int(token) for token in prompt]
        order = sorted(self.workers, key=lambda engine: engine.burden(tokens))
        return self._submit(order, lambda engine: engine.submit(tokens, limits, listen))

    def _in_order(self, request: Any) -> Sequence[Engine]:
        return sorted(self.workers, key=lambda engine: engine.burden(request.tokens))


class EmbedderReplicas(Replicas[Embedder]):
    """Several embedders with the same model, with the interface of `Embedder`. A request goes to
    the embedder with the fewest texts."""

    def _make(self, par: str | os.PathLike[str], **options: Any) -> Embedder:
        return Embedder(par, **options)

    @property
    def model(self) -> EncoderModel:
        """The roles of the model's inputs and outputs."""
        return self.workers[0].model

    def each(self) -> list[tuple[str, EmbedderCounts]]:
        """Returns the status and the counts of each embedder."""
        return [(embedder.status, embedder.counts) for embedder in self.workers]

    @property
    def counts(self) -> EmbedderCounts:
        """The sums of the counts of all embedders."""
        return EmbedderCounts(*_sums(counts for _, counts in self.each()))

    def tokens(self, text: str, second: str | None = None) -> Tokens:
        """Returns the tokens of a text, or of a pair with `second`."""
        return self.workers[0].tokens(text, second)

    def check(self, text: Tokens) -> None:
        """Errors: InputError for a text without tokens, with too many, or with unknown ones."""
        self.workers[0].check(text)

    def submit(self, texts: Sequence[Tokens], listen: EmbeddingListener) -> Embedding:
        """Accepts a request, as `Embedder.submit` does, by the least busy embedder. Errors: Busy if
        no embedder accepts it."""
        return self._submit(self._in_order(None), lambda each: each.submit(texts, listen))

    def _in_order(self, request: Any) -> Sequence[Embedder]:
        return sorted(self.workers, key=lambda embedder: embedder.burden)


def _sums(each: Iterable[Counts | EmbedderCounts]) -> Iterator[int]:
    """Returns the sum of each field over all counts, in the order of fields."""
    return map(sum, zip(*map(astuple, each), strict=True))
