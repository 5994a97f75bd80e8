"""What Prometheus reads of a server."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families
from serve.servers import Served, until


def numbers(served: Served) -> dict[tuple[str, ...], float]:
    """The metrics by name and labels."""
    response = served.http.get("/metrics")
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_metrics(served: Served) -> None:
    before = numbers(served)
    assert before["onnxpar_cache_pages",] == 64
    answer = served.post().json()
    served.post(temperature=9)
    served.http.get("/v1/nothing")
    until(lambda: served.engine.counts.running == 0)  # the script counts after it has told
    found = numbers(served)
    route = "/v1/chat/completions"
    assert found["onnxpar_requests_total", route, "200"] == 1
    assert found["onnxpar_requests_total", route, "400"] == 1
    assert found["onnxpar_requests_total", "other", "404"] == 1
    new = answer["usage"]["completion_tokens"]
    assert found["onnxpar_generated_tokens_total",] == new
    assert found["onnxpar_prompt_tokens_total",] == answer["usage"]["prompt_tokens"]
    assert found["onnxpar_time_to_first_token_seconds_count",] == 1
    assert found["onnxpar_time_per_output_token_seconds_count",] == new - 1
    assert found["onnxpar_request_duration_seconds_count", route] == 2
    for name in ("running_requests", "waiting_requests", "cache_pages_used"):
        assert found[f"onnxpar_{name}",] == 0
    for name in ("prefix_cached_tokens", "preemptions", "steps", "restarts"):
        assert found[f"onnxpar_{name}_total",] == 0


def test_registries_are_apart(serve: Callable[..., Served]) -> None:
    first, second = serve(), serve()
    first.post()
    key = ("onnxpar_requests_total", "/v1/chat/completions", "200")
    assert numbers(first)[key] == 1 and key not in numbers(second)
