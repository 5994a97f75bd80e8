"""The interface of an engine as the server needs it, so that tests and other engines can take its
place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from onnxpar.llm.embedder import Embedder
from onnxpar.llm.replicas import EmbedderReplicas
from onnxpar.llm.requests import Limits, Listener
from onnxpar.llm.tokenizer import Tokenizer


class ServedModel(Protocol):
    """The properties of a model that the server reads; `LanguageModel` says what each means."""

    @property
    def ends(self) -> frozenset[int]: ...

    @property
    def begin(self) -> int | None: ...


class ServedCounts(Protocol):
    """The counts of an engine, now or since its start; `Counts` says what each means."""

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
    """A request that an engine has accepted."""

    def cancel(self) -> None:
        """Ends the request soon; its listener then gets an `End`, unless it has ended already."""
        ...


class ServedEngine(Protocol):
    """An engine; `Engine` says what each member means. Neither `submit` nor a generation's `cancel`
    waits for a step of the engine."""

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
