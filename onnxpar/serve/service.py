"""The state that all requests of a server share."""

from __future__ import annotations

import time
from functools import cached_property

from onnxpar.base.errors import OnnxparError
from onnxpar.serve.api_error import ApiError
from onnxpar.serve.gate import RETRY, Gate, ending
from onnxpar.serve.grammar import Grammars
from onnxpar.serve.log import log_error
from onnxpar.serve.metrics import Metrics
from onnxpar.serve.served_engine import Served, ServedEmbedder, ServedEngine
from onnxpar.serve.settings import Settings
from onnxpar.serve.tool_families import FAMILIES, ToolFamily, family_of


class Service:
    """The state that all requests share: the engine or embedder, settings, admission and metrics.
    `kind` says in words what is served."""

    kind = "a language model"

    def __init__(self, engine: Served, settings: Settings) -> None:
        settings.check()
        self._served, self.settings = engine, settings
        self.gate = Gate(settings.max_requests)
        self.metrics = Metrics(engine)
        self.created = int(time.time())

    @property
    def status(self) -> str:
        """The status of the server: "ready", "starting", "draining" or "failed"."""
        return "draining" if self.gate.is_closed else self._served.status

    @property
    def longest(self) -> int:
        """The most tokens of a text that the model reads."""
        return self._served.longest

    def busy(self) -> ApiError:
        """Returns the error for a request that the engine does not accept now, by its status."""
        status = self.status
        if status == "ready":
            text = "the queue is full; try again later"
            return ApiError(text, 429, code="queue_full", headers=RETRY)
        if status == "draining":
            return ending()
        text = f"the model is {status}; try again later"
        return ApiError(text, 503, code=f"model_{status}", headers=RETRY)


class GeneratingService(Service):
    """The shared state of a server with a language model."""

    def __init__(self, engine: ServedEngine, settings: Settings) -> None:
        super().__init__(engine, settings)
        self.engine = engine
        self.grammars = Grammars(engine)

    @cached_property
    def family(self) -> ToolFamily | None:
        """How the model writes calls of tools, by the settings or its chat template; None if that
        is not known."""
        named = self.settings.tool_call_parser
        return FAMILIES[named] if named else family_of(self.engine.tokenizer.tool_template)


class EmbeddingService(Service):
    """The shared state of a server with an embedding model or a reranker."""

    def __init__(self, embedder: ServedEmbedder, settings: Settings) -> None:
        super().__init__(embedder, settings)
        self.embedder = embedder
        self.kind = embedder.model.kind


def engine_error(error: OnnxparError) -> ApiError:
    """Logs an error of the engine's ranks, and returns the error for the client, which has no
    details."""
    log_error(error)
    text = "the model cannot finish the answer; try again later"
    return ApiError(text, 503, code="model_failed", headers=RETRY)
