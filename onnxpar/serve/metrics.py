"""The metrics of a server, in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from onnxpar.llm.embedder import EmbedderCounts
from onnxpar.llm.replicas import EmbedderReplicas, EngineReplicas
from onnxpar.llm.worker import READY
from onnxpar.serve.served_engine import Served, ServedCounts

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
    "continued": ("continued", "Requests that went on after ranks died."),
}


class Metrics:
    """The counts and durations of a server and its engine, in a registry (of prometheus_client) of
    its own."""

    def __init__(self, engine: Served) -> None:
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
        self.per_token = self._histogram(
            "time_per_output_token", "Time from a token of an answer to the next.", _SHORT
        )

    def text(self) -> bytes:
        """Returns all metrics in the format of Prometheus."""
        return generate_latest(self._registry)

    def _histogram(
        self, name: str, meaning: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        """Returns a new histogram of seconds. `name` is a part of its name, `meaning` its help
        text, `buckets` the upper bounds."""
        full = f"onnxpar_{name}_seconds"
        return Histogram(full, meaning, labels, buckets=buckets, registry=self._registry)


class _OfEngine(Collector):
    """Reads the counts of an engine whenever metrics are queried; if it has replicas, the counts of
    each."""

    def __init__(self, engine: Served) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of the engine, or of each of its replicas, as they are now."""
        engine, labels = self._engine, list[str]()
        by_labels: dict[tuple[str, ...], ServedCounts | EmbedderCounts] = {(): engine.counts}
        if isinstance(engine, EngineReplicas | EmbedderReplicas):
            labels = ["replica"]
            replicas: Sequence[tuple[str, ServedCounts | EmbedderCounts]] = engine.each()
            by_labels = {(str(number),): counts for number, (_, counts) in enumerate(replicas)}
            ready = GaugeMetricFamily("onnxpar_replica_ready", "1 if its ranks run.", labels=labels)
            for number, (status, _) in enumerate(replicas):
                ready.add_metric([str(number)], status == READY)
            yield ready
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for member, (name, meaning) in table.items():
                family = kind(f"onnxpar_{name}", meaning, labels=labels)
                for label, counts in by_labels.items():
                    if hasattr(counts, member):  # an embedder has fewer counts
                        family.add_metric(label, getattr(counts, member))
                if family.samples:
                    yield family
