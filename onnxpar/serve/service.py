"""What all requests of a server share."""

from __future__ import annotations

import time

from onnxpar.serve.api_error import ApiError
from onnxpar.serve.gate import RETRY, Gate, ending
from onnxpar.serve.grammar import Grammars
from onnxpar.serve.metrics import Metrics
from onnxpar.serve.served_engine import ServedEngine
from onnxpar.serve.settings import Settings


class Service:
    """An engine, what requests to it may do, and what is known of them."""

    def __init__(self, engine: ServedEngine, settings: Settings) -> None:
        settings.check()
        self.engine, self.settings = engine, settings
        self.gate = Gate(settings.max_requests)
        self.metrics = Metrics(engine)
        self.grammars = Grammars(engine)
        self.created = int(time.time())

    @property
    def status(self) -> str:
        """How the server is: "ready", "starting", "draining" or "failed"."""
        return "draining" if self.gate.is_closed else self.engine.status

    def busy(self) -> ApiError:
        """Returns the error of a request that the engine does not take now."""
        status = self.status
        if status == "ready":
            text = "the queue is full; try again later"
            return ApiError(text, 429, code="queue_full", headers=RETRY)
        if status == "draining":
            return ending()
        text = f"the model is {status}; try again later"
        return ApiError(text, 503, code=f"model_{status}", headers=RETRY)
