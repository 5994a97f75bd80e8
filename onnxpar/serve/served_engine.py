"""The interface of an engine that the server needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from onnxpar.llm.embedder import Embedder
from onnxpar.llm.replicas import EmbedderReplicas
from onnxpar.llm.requests import Limits, Listener
from onnxpar.llm.tokenizer import Tokenizer


class ServedModel(Protocol):
    """The properties of a model that the server needs; see `LanguageModel`."""

    @property
    def ends(self) -> frozenset[int]: ...

    @property
    def begin(self) -> int | None: ...


class ServedCounts(Protocol):
    """Numbers of requests, pages and tokens, now or since the start; see `Counts`."""

    @property
    def running(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    @property
    def pages(self) -> int: ...

    @property
    def used_pages(self) -> int: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def cached_tokens(self) -> int: ...

    @property
    def generated_tokens(self) -> int: ...

    @property
    def preemptions(self) -> int: ...

    @property
    def steps(self) -> int: ...

    @property
    def restarts(self) -> int: ...

    @property
    def continued(self) -> int: ...


class ServedGeneration(Protocol):
    """A request in the engine."""

    def cancel(self) -> None:
        """Ends the request soon; the listener then gets an `End`."""
        ...


class ServedEngine(Protocol):
    """An engine; see `Engine`. Neither `submit` nor `cancel` waits for a step."""

    @property
    def model(self) -> ServedModel: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def longest(self) -> int: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def status(self) -> str: ...

    @property
    def counts(self) -> ServedCounts: ...

    def submit(
        self, prompt: Sequence[int], limits: Limits, listen: Listener
    ) -> ServedGeneration: ...


ServedEmbedder = Embedder | EmbedderReplicas
Served = ServedEngine | ServedEmbedder
"""An engine or an embedder: it runs the requests of a server."""
