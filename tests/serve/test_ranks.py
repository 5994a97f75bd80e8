"""The server over ranks: it says what `Generator` generates, and goes on when a rank dies."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from committed import MODELS
from lazily import lazily
from runtime.bundles import pids
from serve.calling_model import TOOLS, WEATHER
from serve.servers import TIMEOUT, Served, serving, until
from serve.test_metrics import numbers
from sharded import sharded

from onnxpar.llm.engine import Engine
from onnxpar.llm.generator import Generator
from onnxpar.llm.replicas import EngineReplicas

jsonschema = lazily("jsonschema")
PROMPTS = ("import os", "def", "hello, world", "x = [1, 2, 3]")


@pytest.fixture(scope="module")
def par() -> Path:
    return sharded(MODELS / "llm" / "llama", devices=2, preset="tensor-parallel")


@pytest.fixture
def served(par: Path) -> Iterator[Served]:
    with serving(Engine(par, timeout=TIMEOUT)) as made:
        yield made


def text(served: Served, prompt: str, **options: Any) -> str:
    """The greedy continuation of a prompt."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 24, **options}
    response = httpx.post(f"{served.url}/v1/completions", json=body, timeout=TIMEOUT)
    found: str = response.json()["choices"][0]["text"]
    return found


@pytest.mark.slow
def test_requests_at_once_say_what_the_generator_does(par: Path, served: Served) -> None:
    with Generator(par, timeout=TIMEOUT) as generator:
        wanted = [generator.generate(p, max_new_tokens=24)[0].text for p in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(lambda prompt: text(served, prompt), PROMPTS)) == wanted
    assert [text(served, prompt) for prompt in PROMPTS] == wanted


def test_seeds(served: Served) -> None:
    def drawn(**options: Any) -> list[str]:
        choices = served.post(max_tokens=8, n=2, **options).json()["choices"]
        return [choice["message"]["content"] for choice in choices]

    first = drawn(seed=1)
    assert first == drawn(seed=1) != drawn(seed=2) and first[0] != first[1]
    assert drawn() != drawn()


@pytest.mark.slow
def test_a_schema(served: Served) -> None:
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 2}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    (choice,) = served.post(response_format=form, max_tokens=200, seed=1).json()["choices"]
    assert choice["finish_reason"] == "stop"
    content = "".join(choice["message"]["content"].split())
    assert content in [f'["{first}","{second}"]' for first in "ab" for second in "ab"]


def test_a_tool(served: Served) -> None:
    """A model with random weights calls it rightly, as it must."""
    body = {
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 200,
    }
    for seed in range(3):
        (choice,) = served.post(**body, seed=seed).json()["choices"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        parameters = WEATHER if call["function"]["name"] == "weather" else {"maxProperties": 0}
        jsonschema.validate(json.loads(call["function"]["arguments"]), parameters)
    given = {"input": "hello", "tools": [{"type": "function", "name": "now"}]}
    choice = {"type": "function", "name": "now"}
    response = served.http.post("/v1/responses", json={**given, "tool_choice": choice}).json()
    (item,) = response["output"]
    assert item["name"] == "now" and json.loads(item["arguments"]) == {}


@pytest.mark.slow
@pytest.mark.processes
def test_a_rank_that_dies(served: Served) -> None:
    """Answers come later, and are the same."""
    wanted = text(served, "import os")
    os.kill(pids(served.engine._session)[0], signal.SIGKILL)
    assert text(served, "import os") == wanted
    until(lambda: served.http.get("/health").status_code == 200)
    assert text(served, "import os") == wanted


@pytest.mark.slow
@pytest.mark.processes
def test_another_replica_goes_on(par: Path) -> None:
    """In the middle of a stream, which has each token once; the server stays ready, and the metrics
    tell replicas apart."""
    body = {"prompt": "import os", "max_tokens": 200, "seed": 3, "stream": True, "min_p": 0.01}
    with serving(EngineReplicas(par, replicas=2, timeout=TIMEOUT)) as served:
        texts = []
        for dies in (False, True):
            pieces = []
            with served.http.stream("POST", "/v1/completions", json=body) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        pieces.append(json.loads(line[6:])["choices"][0]["text"])
                    if dies and len(pieces) == 20:
                        busy = [each for each in served.engine.workers if each.counts.running]
                        os.kill(pids(busy[0]._session)[1], signal.SIGKILL)
                        dies = False
            texts.append("".join(pieces))
            assert served.http.get("/health").json() == {"status": "ready"}
        assert texts[0] == texts[1] and len(texts[0]) > 50
        until(lambda: served.engine.counts.restarts == 1)
        found = numbers(served)
        assert found["onnxpar_continued_total", "0"] == 1
        assert found["onnxpar_continued_total", "1"] == 0
        assert found["onnxpar_replica_ready", "1"] == 1
        assert ("onnxpar_steps_total",) not in found
