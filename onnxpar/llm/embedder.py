"""Computes embeddings or relevance scores of many texts on a sharded encoder. Texts of several
requests run in one batch."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError, OnnxparError
from onnxpar.llm.encoder import Encoder, Tokens
from onnxpar.llm.encoder_model import EncoderModel
from onnxpar.llm.requests import Busy, End, Failure, tell
from onnxpar.llm.tokenizer import Tokenizer
from onnxpar.llm.worker import READY, Worker
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.session import InferenceSession

_SEEN = 4096
"""Texts at the beginning of the queue from which a batch is chosen."""
Listener = Callable[[Array | End | Failure], None]
"""Called once, with the results of a request, (texts, width), or the reason why there are none; in
the embedder's own thread. It must return soon."""


@dataclass(frozen=True)
class EmbedderCounts:
    """Counts of an embedder: now, and since its start.

    running, waiting  numbers of texts now
    prompt_tokens     tokens of texts that have run
    steps             runs of the ranks
    restarts          how often ranks were started again
    continued         how often a request went on after its ranks had died
    """

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    restarts: int = 0
    continued: int = 0


@dataclass(eq=False)
class Job:
    """A request of several texts.

    results       the results so far, (texts, width)
    left          number of texts without a result
    listen        called once, at the end
    is_cancelled  True if the request must end
    rows          the texts without a result, while no embedder has the request
    losses        how often ranks died while its texts ran
    """

    results: Array
    left: int
    listen: Listener
    is_cancelled: bool = False
    rows: Sequence[Row] = ()
    losses: int = 0


@dataclass(frozen=True, eq=False)
class Row:
    """Text number `index` of a request, and its tokens."""

    job: Job
    index: int
    tokens: Tokens


class Embedding:
    """A request that an embedder has accepted, so that it can be cancelled."""

    def __init__(self, embedder: Embedder, job: Job) -> None:
        self._embedder, self._job = embedder, job

    def cancel(self) -> None:
        """Ends the request soon; its listener gets End("cancelled"), unless the request has ended
        already. Any thread may call it."""
        self._embedder._cancel(self._job)


@dataclass
class _Queue:
    """The texts of an embedder that wait, and the texts that run now."""

    waiting: list[Row] = field(default_factory=list)
    running: list[Row] = field(default_factory=list)

    @property
    def jobs(self) -> list[Job]:
        """The requests of all texts, each once."""
        return list(dict.fromkeys(row.job for row in (*self.running, *self.waiting)))

    def remove(self, job: Job) -> None:
        """Removes all texts of a request."""
        self.waiting = [row for row in self.waiting if row.job is not job]
        self.running = [row for row in self.running if row.job is not job]

    def release(self) -> list[Job]:
        """Removes all texts, and returns their requests, which keep their own texts in `rows`."""
        jobs, rows = self.jobs, [*self.running, *self.waiting]
        for job in jobs:
            job.rows = [row for row in rows if row.job is job]
        self.running, self.waiting = [], []
        return jobs

    def take_back(self, jobs: Sequence[Job]) -> None:
        """Adds the texts of requests that an embedder has released, before all other texts."""
        self.waiting[:0] = [row for job in jobs for row in job.rows]
        for job in jobs:
            job.rows = ()

    def take(self, most_tokens: int, most_rows: int | None) -> list[Row]:
        """Moves the texts of the next batch from `waiting` to `running`, and returns them: the
        oldest text, and others of similar lengths.

        most_tokens  limit of the batch, in tokens with padding; a single text may exceed it
        most_rows    limit of the batch, in texts; None: no limit
        """
        if not self.waiting:
            return []
        length = len(self.waiting[0].tokens.ids)
        near = sorted(
            islice(self.waiting, _SEEN), key=lambda row: abs(len(row.tokens.ids) - length)
        )
        longest, taken = 0, list[Row]()
        for row in near:
            longest = max(longest, len(row.tokens.ids))
            if taken and (longest * (len(taken) + 1) > most_tokens or len(taken) == most_rows):
                break
            taken.append(row)
        chosen = set(taken)
        self.waiting = [row for row in self.waiting if row not in chosen]
        self.running = taken
        return taken


class Embedder(Worker[Job, Sequence[Row], Encoder]):
    """A sharded embedding model or reranker, on its ranks.

    par           a folder that `onnxpar shard` made of an encoder's folder
    batch_tokens  most tokens of a run, with padding to its longest text; a single text may exceed
                  it
    max_waiting   texts in the queue from which on requests are refused
    tell          called with a line when ranks die, and when new ones run or do not start
    options       those of `InferenceSession`

    If a rank dies, new ranks are started, and requests go on there with the texts that have not
    run; a request that has lost its ranks three times fails. Errors: ModelError for a model that is
    neither an embedding model nor a reranker; RankError if a rank does not start.
    """

    def __init__(
        self,
        par: str | os.PathLike[str],
        *,
        batch_tokens: int = 4096,
        max_waiting: int = 4096,
        tell: Callable[[str], None] = lambda text: None,
        **options: Any,
    ) -> None:
        for name, value in (("batch_tokens", batch_tokens), ("max_waiting", max_waiting)):
            if value < 1:
                raise InputError(f"{name} is {value}; it must be at least 1")
        super().__init__(par, options, tell)
        self._bundle = Bundle.load(par)
        self.model = EncoderModel.of(self._bundle)
        self._batch_tokens, self._max_waiting = batch_tokens, max_waiting
        self._counts = EmbedderCounts()
        self._queue = _Queue()
        self._encoder = self._start_ranks()
        self._start_thread("onnxpar-embedder")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model. Errors: ModelError if it has none."""
        return Tokenizer(self._bundle.path)

    @property
    def longest(self) -> int:
        """The most tokens of a text that the model reads."""
        return self.model.longest

    @property
    def counts(self) -> EmbedderCounts:
        """The current counts of the embedder."""
        with self._changed:
            running, waiting = len(self._queue.running), len(self._queue.waiting)
            now = {"running": running, "waiting": waiting, "continued": self._continued}
            return replace(self._counts, **now)

    @property
    def burden(self) -> tuple[bool, int]:
        """How long another text would wait, to compare embedders, less first: True if the ranks do
        not run now; and the number of texts that run or wait."""
        with self._changed:
            return self._status != READY, len(self._queue.running) + len(self._queue.waiting)

    def tokens(self, text: str, second: str | None = None) -> Tokens:
        """Returns the tokens of a text, or of a pair with `second`."""
        if second is None:
            return Tokens(self.tokenizer.encode(text))
        return Tokens(*self.tokenizer.encode_pair(text, second))

    def submit(self, texts: Sequence[Tokens], listen: Listener) -> Embedding:
        """Accepts a request of texts; `listen` is later called with its results, (texts, width).
        Errors: InputError for texts that the model cannot read; Busy if too many texts wait, or if
        the embedder is closed or has failed."""
        if not texts:
            raise InputError("there is no text; give at least one")
        for text in texts:
            self.check(text)
        job = Job(np.empty((len(texts), self.model.width), np.float32), len(texts), listen)
        with self._changed:
            self._check_open()
            waiting = len(self._queue.waiting)
            if waiting >= self._max_waiting:
                raise Busy(f"{waiting} texts wait already; try again later")
            self._queue.waiting += [Row(job, index, text) for index, text in enumerate(texts)]
            self._changed.notify_all()
        return Embedding(self, job)

    def check(self, text: Tokens) -> None:
        """Errors: InputError for a text without tokens, with too many, or with unknown ones."""
        ids, most = text.ids, self.model.vocabulary
        if not ids:
            raise InputError("a text has no tokens; give one that has some")
        if min(ids) < 0 or max(ids) >= most:
            raise InputError(f"a text has a token that is not from 0 to {most - 1}")
        if len(ids) > self.longest:
            raise InputError(
                f"a text has {len(ids)} tokens, and the model reads at most {self.longest}; give a "
                "shorter one, or its parts"
            )

    def embed(self, texts: Sequence[str]) -> Array:
        """Returns the embeddings of texts, (texts, width). Errors: InputError for a text that is
        too long; OnnxparError if ranks fail."""
        return self._result([self.tokens(text) for text in texts])

    def rerank(self, query: str, documents: Sequence[str]) -> Array:
        """Returns scores of how well each document answers a query, from 0 to 1, (documents,).
        Errors: InputError for a pair of query and document that is too long; OnnxparError if ranks
        fail."""
        return scores(self._result([self.tokens(query, text) for text in documents]))

    def _result(self, texts: Sequence[Tokens]) -> Array:
        """Runs texts as a request, waits, and returns the results, (texts, width). Errors:
        OnnxparError if the request fails."""
        events: queue.Queue[Array | End | Failure] = queue.Queue()
        self.submit(texts, events.put)
        event = events.get()
        if isinstance(event, Failure):
            raise event.error
        if isinstance(event, End):
            raise OnnxparError("the embedder was closed before the texts had run")
        return event

    def _open(self, session: InferenceSession) -> Encoder:
        return Encoder(session, self._bundle, self.model)

    def _adopt(self, made: Encoder) -> None:
        self._encoder = made
        self._counts = replace(self._counts, restarts=self._counts.restarts + 1)

    def _requests(self) -> Sequence[Job]:
        return self._queue.jobs

    def _running(self) -> Sequence[Job]:
        return self._of(self._queue.running)

    def _release(self) -> Sequence[Job]:
        return self._queue.release()

    def _take(self, requests: Sequence[Job]) -> None:
        self._queue.take_back(requests)

    def _end_cancelled(self) -> None:
        for job in self._queue.jobs:
            if job.is_cancelled:
                self._end(job, End("cancelled"))

    def _fail(self, request: Job, error: OnnxparError) -> None:
        self._end(request, Failure(error))

    def _next(self) -> Sequence[Row] | None:
        return self._queue.take(self._batch_tokens, self.model.rows) or None

    def _of(self, work: Sequence[Row]) -> Sequence[Job]:
        return list(dict.fromkeys(row.job for row in work))

    def _run(self, work: Sequence[Row]) -> Callable[[], None]:
        results = self._encoder.run([row.tokens for row in work])
        return lambda: self._finish(work, results)

    def _finish(self, rows: Sequence[Row], results: Array) -> None:
        """Stores the results of texts in their requests; ends requests that are complete."""
        tokens = self._counts.prompt_tokens + sum(len(row.tokens.ids) for row in rows)
        self._counts = replace(self._counts, prompt_tokens=tokens, steps=self._counts.steps + 1)
        self._queue.running = []
        for row, result in zip(rows, results, strict=True):
            row.job.results[row.index] = result
            row.job.left -= 1
            if not row.job.left:
                tell(row.job, row.job.results)

    def _end(self, job: Job, event: End | Failure) -> None:
        self._queue.remove(job)
        tell(job, event)


def scores(logits: Array) -> Array:
    """Returns the sigmoid of logits of shape (texts, 1): scores from 0 to 1, (texts,)."""
    with np.errstate(over="ignore"):  # then the score is 0
        result: Array = 1 / (1 + np.exp(-logits[:, 0].astype(np.float64)))
    return result
