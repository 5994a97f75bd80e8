"""The objects that all requests of a server share."""

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
    """The state that all requests share: the engine, settings, admission and metrics. `kind` says
    what is served, with an article."""

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
        """The largest number of tokens of a text."""
        return self._served.longest

    def busy(self) -> ApiError:
        """Returns the error for a request that the engine does not take now."""
        status = self.status
        if status == "ready":
            text = "the queue is full; try again later"
            return ApiError(text, 429, code="queue_full", headers=RETRY)
        if status == "draining":
            return ending()
        text = f"the model is {status}; try again later"
        return ApiError(text, 503, code=f"model_{status}", headers=RETRY)


class GeneratingService(Service):
    """The service of a language model."""

    def __init__(self, engine: ServedEngine, settings: Settings) -> None:
        super().__init__(engine, settings)
        self.engine = engine
        self.grammars = Grammars(engine)

    @cached_property
    def family(self) -> ToolFamily | None:
        """The way in which the model writes calls of tools; None if this is unknown."""
        named = self.settings.tool_call_parser
        return FAMILIES[named] if named else family_of(self.engine.tokenizer.tool_template)


class EmbeddingService(Service):
    """The service of an embedding model or a reranker."""

    def __init__(self, embedder: ServedEmbedder, settings: Settings) -> None:
        super().__init__(embedder, settings)
        self.embedder = embedder
        self.kind = embedder.model.kind


def engine_error(error: OnnxparError) -> ApiError:
    """Logs an error of the ranks; returns the error for the client."""
    log_error(error)
    text = "the model cannot finish the answer; try again later"
    return ApiError(text, 503, code="model_failed", headers=RETRY)
