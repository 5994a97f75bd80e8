"""Embeddings and scores over HTTP: OpenAI's client gets those of PyTorch, requests at once, wrong
ones, and those of other models."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from committed import MODELS
from hypothesis import given
from hypothesis import strategies as st
from lazily import lazily
from runtime.bundles import pids
from serve.servers import TIMEOUT, Served, serving, until
from serve.test_hostile import BODIES, error_of
from sharded import sharded

from onnxpar.llm.embedder import Embedder
from onnxpar.llm.requests import Busy

BERT, RERANKER = MODELS / "embed" / "bert", MODELS / "embed" / "reranker"
EXPECTED = {
    text: vectors["mean"]
    for text, vectors in json.loads((BERT / "expected.json").read_bytes()).items()
}
TEXTS = list(EXPECTED)
SCORES = json.loads((RERANKER / "expected.json").read_bytes())
DOCUMENTS = list(SCORES["scores"])

openai = lazily("openai")


@pytest.fixture(scope="module")
def pars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with bert.par and reranker.par."""
    path = tmp_path_factory.mktemp("embeddings")
    for folder in (BERT, RERANKER):
        par = sharded(folder, devices=2, preset="data-parallel")
        shutil.copytree(par, path / f"{folder.name}.par")
    return path


@pytest.fixture(scope="module")
def bert(pars: Path) -> Iterator[Served]:
    limits = {"max_inputs": 50, "max_body": 100_000}
    with serving(Embedder(pars / "bert.par", timeout=TIMEOUT), model_name="bert", **limits) as made:
        yield made


@pytest.fixture(scope="module")
def reranker(pars: Path) -> Iterator[Served]:
    embedder = Embedder(pars / "reranker.par", timeout=TIMEOUT)
    with serving(embedder, model_name="reranker", max_inputs=50) as made:
        yield made


def post(served: Served, body: dict[str, Any], path: str = "embeddings") -> httpx.Response:
    return served.http.post(f"/v1/{path}", json=body)


def close_to(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(np.array(found), np.array(wanted), atol=1e-5)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("form", [None, "float", "base64"])
def test_openai_client(bert: Served, form: Any) -> None:
    options = {} if form is None else {"encoding_format": form}
    found = bert.openai.embeddings.create(model="bert", input=TEXTS, **options)
    assert [each.index for each in found.data] == [*range(len(TEXTS))]
    assert found.model == "bert" and found.object == "list"
    assert found.usage.prompt_tokens == found.usage.total_tokens == 135
    for each, text in zip(found.data, TEXTS, strict=True):
        vector: Any = each.embedding
        if form == "base64":
            vector = np.frombuffer(base64.b64decode(vector), "<f4")
        close_to(vector, EXPECTED[text])
    assert [model.id for model in bert.openai.models.list()] == ["bert"]


def test_inputs_of_all_kinds(bert: Served) -> None:
    tokenizer = bert.engine.tokenizer
    ids = [tokenizer.encode(text) for text in TEXTS]
    inputs: list[tuple[Any, list[str]]] = [(text, [text]) for text in TEXTS]
    inputs += [(ids[0], TEXTS[:1]), (ids, TEXTS), (TEXTS[::-1], TEXTS[::-1])]
    for value, texts in inputs:
        response = post(bert, {"input": value, "user": "x", "model": None})
        assert response.status_code == 200, response.text
        found = [each["embedding"] for each in response.json()["data"]]
        close_to(found, [EXPECTED[text] for text in texts])


def test_dimensions(bert: Served) -> None:
    for size in (1, 5, 32):
        found = bert.openai.embeddings.create(model="bert", input="x", dimensions=size)
        wanted = np.array(EXPECTED["x"][:size])
        close_to(found.data[0].embedding, wanted / np.linalg.norm(wanted))


@pytest.mark.slow
def test_requests_at_once(bert: Served) -> None:
    steps = bert.engine.counts.steps

    def ask(number: int) -> None:
        text = TEXTS[number % len(TEXTS)]
        body = {"input": [text, *TEXTS[: number % 3]]}
        response = httpx.post(f"{bert.url}/v1/embeddings", json=body, timeout=TIMEOUT)
        found = [each["embedding"] for each in response.json()["data"]]
        close_to(found, [EXPECTED[each] for each in body["input"]])

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(200)))
    assert 0 < bert.engine.counts.steps - steps < 400


def test_reranking(reranker: Served) -> None:
    wanted = sorted(SCORES["scores"].values(), reverse=True)
    documents: list[Any] = [DOCUMENTS[0], *({"text": text} for text in DOCUMENTS[1:])]
    body = {"query": SCORES["query"], "documents": documents, "model": "reranker"}
    answer = post(reranker, body, "rerank").json()
    assert answer["model"] == "reranker" and answer["usage"]["total_tokens"] > 0
    found = answer["results"]
    close_to([each["relevance_score"] for each in found], wanted)
    for each in found:
        close_to(each["relevance_score"], SCORES["scores"][DOCUMENTS[each["index"]]])
        assert each.keys() == {"index", "relevance_score"}
    most = post(reranker, {**body, "top_n": 2, "return_documents": True}, "rerank").json()
    assert [each["document"]["text"] for each in most["results"]] == [
        DOCUMENTS[each["index"]] for each in found[:2]
    ]


WRONG: list[tuple[dict[str, Any], str | None]] = [
    ({}, "input"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [[]]}, "input"),
    ({"input": {}}, "input"),
    ({"input": True}, "input"),
    ({"input": [True]}, "input"),
    ({"input": ["x", 5]}, "input"),
    ({"input": [5, "x"]}, "input"),
    ({"input": [[5], "x"]}, "input"),
    ({"input": [5.5]}, "input"),
    ({"input": [-1]}, "input"),
    ({"input": [320]}, "input"),
    ({"input": [10**19]}, "input"),
    ({"input": [5] * 121}, "input"),
    ({"input": ["x", "a b " * 500]}, "input"),
    ({"input": ["x"] * 51}, "input"),
    ({"input": "x", "dimensions": 0}, "dimensions"),
    ({"input": "x", "truncate": True}, "truncate"),
    ({"input": "x", "dimensions": 33}, "dimensions"),
    ({"input": "x", "dimensions": 1.5}, "dimensions"),
    ({"input": "x", "dimensions": "3"}, "dimensions"),
    ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
    ({"input": "x", "encoding_format": 5}, "encoding_format"),
    ({"input": "x", "model": 5}, "model"),
]


@pytest.mark.parametrize("body,param", WRONG, ids=range(len(WRONG)))
def test_wrong_requests(bert: Served, body: dict[str, Any], param: str) -> None:
    assert error_of(post(bert, body), 400)["param"] == param


WRONG_RERANKING: list[tuple[dict[str, Any], str]] = [
    ({"query": None}, "query"),
    ({"query": ["x"]}, "query"),
    ({"documents": None}, "documents"),
    ({"documents": []}, "documents"),
    ({"documents": "x"}, "documents"),
    ({"documents": [5]}, "documents"),
    ({"documents": [{"title": "x"}]}, "documents"),
    ({"documents": ["x", "a b " * 500]}, "documents"),
    ({"documents": ["x"] * 51}, "documents"),
    ({"top_n": 0}, "top_n"),
    ({"top_k": 1}, "top_k"),
    ({"return_documents": "yes"}, "return_documents"),
]


@pytest.mark.parametrize("body,param", WRONG_RERANKING, ids=range(len(WRONG_RERANKING)))
def test_wrong_reranking(reranker: Served, body: dict[str, Any], param: str) -> None:
    whole = {"query": "x", "documents": ["y"], **body}
    assert error_of(post(reranker, whole, "rerank"), 400)["param"] == param


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_bodies_that_are_wrong(bert: Served, reranker: Served, body: bytes) -> None:
    error_of(bert.http.post("/v1/embeddings", content=body), 400)
    error_of(reranker.http.post("/v1/rerank", content=body), 400)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 400) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ("input", "dimensions", "encoding_format", "query", "documents", "top_n", "model")


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES))
def test_any_fields(bert: Served, reranker: Served, body: dict[str, Any]) -> None:
    for served, path in ((bert, "embeddings"), (reranker, "rerank")):
        content = json.dumps(body, allow_nan=True).encode()
        assert served.http.post(f"/v1/{path}", content=content).status_code in (200, 400, 404)


def test_too_long_texts_say_the_most_tokens(bert: Served) -> None:
    error = error_of(post(bert, {"input": [[5], [5] * 200]}), 400)
    wanted = "input[1]: a text has 200 tokens, and the model reads at most 120"
    assert error["message"].startswith(wanted)
    assert error["code"] == "context_length_exceeded"


def test_models_of_another_kind(bert: Served, reranker: Served, served: Served) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for path in ("chat/completions", "completions", "rerank"):
        error = error_of(post(bert, chat, path), 400)
        wanted = "'bert' is an embedding model; send requests to /v1/embeddings"
        assert error["message"] == wanted and error["code"] == "wrong_kind_of_model"
    error = error_of(post(reranker, {"input": "x"}), 400)
    assert error["message"] == "'reranker' is a reranker; send requests to /v1/rerank"
    error = error_of(post(served, {"input": "x"}), 400)
    assert "is a language model; send requests to /v1/chat/completions or" in error["message"]
    assert error_of(post(bert, {"input": "x", "model": "y"}), 404)["code"] == "model_not_found"
    assert bert.http.get("/v1/embeddings").status_code == 405


def test_pages_health_and_metrics(bert: Served, reranker: Served) -> None:
    page = bert.http.get("/")
    assert "an embedding model" in page.text and "/v1/embeddings" in page.text
    assert "script-src" not in page.headers["content-security-policy"]
    assert "a reranker" in reranker.http.get("/").text
    assert bert.http.get("/health").json() == {"status": "ready"}
    post(bert, {"input": "x"})
    text = bert.http.get("/metrics").text
    assert 'onnxpar_requests_total{route="/v1/embeddings",status="200"}' in text
    assert "onnxpar_prompt_tokens_total" in text and "cache_pages" not in text
    (model,) = bert.http.get("/v1/models").json()["data"]
    assert model["id"] == "bert" and model["max_model_len"] == 120


def test_keys(pars: Path) -> None:
    with serving(Embedder(pars / "bert.par"), api_keys=(b"secret",), model_name="bert") as served:
        error_of(post(served, {"input": "x"}), 401)
        found = served.openai.embeddings.create(model="bert", input="x")
        close_to(found.data[0].embedding, EXPECTED["x"])


@pytest.mark.slow
@pytest.mark.processes
def test_a_full_queue_and_ranks_that_die(pars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Embedder(pars / "bert.par", timeout=TIMEOUT), model_name="bert") as served:

        def full(*args: object) -> None:
            raise Busy("5 texts wait already")

        with monkeypatch.context() as patched:
            patched.setattr(served.engine, "submit", full)
            response = post(served, {"input": "x"})
            assert error_of(response, 429)["code"] == "queue_full"
            assert response.headers["retry-after"] == "1"
        os.kill(pids(served.engine._session)[0], signal.SIGKILL)
        assert post(served, {"input": "x"}).status_code in (200, 503)
        until(lambda: served.engine.counts.restarts == 1)
        until(lambda: served.http.get("/health").status_code == 200)
        close_to(post(served, {"input": "x"}).json()["data"][0]["embedding"], EXPECTED["x"])


@pytest.mark.slow
def test_the_command(pars: Path) -> None:
    command = [sys.executable, "-m", "onnxpar", "serve", str(pars / "bert.par"), "--port", "0"]
    refused = subprocess.run([*command, "--kv-memory", "1GB"], capture_output=True, text=True)
    assert refused.returncode == 2 and "--kv-memory is for language models" in refused.stderr
    options = [*command, "--step-tokens", "64", "--max-waiting", "10"]
    with subprocess.Popen(options, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", timeout=TIMEOUT)
        found = client.embeddings.create(model="bert", input=TEXTS)
        close_to([each.embedding for each in found.data], [EXPECTED[text] for text in TEXTS])
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT) == 0
