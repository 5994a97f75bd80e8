"""Numbers for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from onnxpar.llm.embedder import Embedder
from onnxpar.serve.served_engine import ServedEngine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_GAUGES = {
    "running": ("running_requests", "Generations or texts that are computed now."),
    "waiting": ("waiting_requests", "Generations or texts in the queue."),
    "pages": ("cache_pages", "Pages of the cache of keys and values."),
    "used_pages": ("cache_pages_used", "Pages of the cache that hold tokens."),
}
_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts or texts."),
    "cached_tokens": ("prefix_cached_tokens", "Tokens of prompts that were in the cache already."),
    "generated_tokens": ("generated_tokens", "New tokens."),
    "preemptions": ("preemptions", "Generations that gave their pages to others and began anew."),
    "steps": ("steps", "Runs of the model."),
    "restarts": ("restarts", "Starts of new ranks after a failure."),
}


class Metrics:
    """What is counted and measured of a server and its engine, in a registry of its own."""

    def __init__(self, engine: ServedEngine | Embedder) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_OfEngine(engine))
        self.requests = Counter(
            "onnxpar_requests",
            "Requests by route and status.",
            ("route", "status"),
            registry=self._registry,
        )
        self.duration = self._histogram(
            "request_duration", "Time from a request to the end of its answer.", _LONG, "route"
        )
        self.first = self._histogram(
            "time_to_first_token", "Time from a request to its first token.", _LONG
        )
        self.each = self._histogram(
            "time_per_output_token", "Time from a token of an answer to the next.", _SHORT
        )

    def text(self) -> bytes:
        """Returns all numbers in the format of Prometheus."""
        return generate_latest(self._registry)

    def _histogram(
        self, name: str, meaning: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        full = f"onnxpar_{name}_seconds"
        return Histogram(full, meaning, labels, buckets=buckets, registry=self._registry)


class _OfEngine(Collector):
    """The counts of an engine, as they are when they are asked for."""

    def __init__(self, engine: ServedEngine | Embedder) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        counts = self._engine.counts
        for member, (name, meaning) in _GAUGES.items():
            if hasattr(counts, member):  # an embedder has fewer
                yield GaugeMetricFamily(f"onnxpar_{name}", meaning, value=getattr(counts, member))
        for member, (name, meaning) in _COUNTERS.items():
            if hasattr(counts, member):
                yield CounterMetricFamily(f"onnxpar_{name}", meaning, value=getattr(counts, member))
