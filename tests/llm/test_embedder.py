"""The embedder: texts alone and in batches, over ranks, get the embeddings and scores of PyTorch
(models/embed/*/expected.json)."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from committed import MODELS
from runtime.bundles import pids, wait_until
from sharded import sharded

import onnxpar
from onnxpar.base.errors import InputError, ModelError
from onnxpar.llm.embedder import Embedder
from onnxpar.llm.encoder import Tokens
from onnxpar.llm.encoder_model import is_encoder
from onnxpar.llm.requests import Busy, End

TIMEOUT = 30.0
BERT, RERANKER = MODELS / "embed" / "bert", MODELS / "embed" / "reranker"
EXPECTED: dict[str, dict[str, list[float]]] = json.loads((BERT / "expected.json").read_bytes())
TEXTS = list(EXPECTED)
Make = Callable[..., Embedder]


def wanted(pooling: str = "mean") -> Any:
    """PyTorch's embeddings of all texts."""
    return np.array([EXPECTED[text][pooling] for text in TEXTS])


@pytest.fixture(scope="module")
def par() -> Path:
    return sharded(BERT, devices=2, preset="data-parallel")


@pytest.fixture
def make(par: Path) -> Iterator[Make]:
    embedders: list[Embedder] = []

    def start(**options: Any) -> Embedder:
        embedders.append(Embedder(par, timeout=TIMEOUT, **options))
        return embedders[-1]

    yield start
    for embedder in embedders:
        embedder.close()


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("preset", ["data-parallel", "auto"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_results_are_those_of_pytorch(tmp_path: Path, ranks: int, preset: str) -> None:
    for folder in (BERT, RERANKER):
        onnxpar.shard(folder, tmp_path / folder.name, devices=ranks, preset=preset)
        assert is_encoder(tmp_path / folder.name)
    with Embedder(tmp_path / "bert", timeout=TIMEOUT) as embedder:
        np.testing.assert_allclose(embedder.embed(TEXTS), wanted(), atol=1e-5)
        alone = np.concatenate([embedder.embed([text]) for text in TEXTS])
        np.testing.assert_allclose(alone, wanted(), atol=1e-5)
        assert embedder.counts.steps == 1 + len(TEXTS)
    expected = json.loads((RERANKER / "expected.json").read_bytes())
    query, documents = expected["query"], list(expected["scores"])
    with Embedder(tmp_path / "reranker", timeout=TIMEOUT) as embedder:
        found = embedder.rerank(query, documents)
        alone = np.concatenate([embedder.rerank(query, [text]) for text in documents])
    np.testing.assert_allclose(found, [*expected["scores"].values()], atol=1e-5)
    np.testing.assert_allclose(alone, [*expected["scores"].values()], atol=1e-5)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "config,pooling",
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_lasttoken": True}, "lasttoken"),
        ({"pooling_mode": "cls", "include_prompt": True}, "cls"),
        (None, "mean"),
    ],
)
def test_poolings(tmp_path: Path, config: Any, pooling: str) -> None:
    folder = tmp_path / "bert"
    shutil.copytree(BERT, folder)
    modules = [{"type": "sentence_transformers.models.Pooling"}]  # and none that normalizes
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    if config is None:
        shutil.rmtree(folder / "1_Pooling")
    onnxpar.shard(folder, tmp_path / "bert.par", devices=1)
    with Embedder(tmp_path / "bert.par", timeout=TIMEOUT) as embedder:
        found = embedder.embed(TEXTS)
    if pooling == "mean":
        found /= np.linalg.norm(found, axis=1, keepdims=True)
    np.testing.assert_allclose(found, wanted(pooling), atol=1e-5)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "name,value,named",
    [
        ("modules.json", [{"type": "sentence_transformers.models.Dense"}], "module 'Dense'"),
        ("modules.json", {}, "list of JSON objects"),
        ("1_Pooling/config.json", {"pooling_mode_other": True}, "'other'"),
        ("1_Pooling/config.json", {}, "is not known"),
    ],
)
def test_unknown_configurations(tmp_path: Path, name: str, value: object, named: str) -> None:
    shutil.copytree(BERT, tmp_path / "bert")
    (tmp_path / "bert" / name).write_text(json.dumps(value))
    onnxpar.shard(tmp_path / "bert", tmp_path / "bert.par", devices=1)
    with pytest.raises(ModelError, match=named):
        Embedder(tmp_path / "bert.par")


@pytest.mark.slow
def test_folders_are_written_again(tmp_path: Path) -> None:
    for devices in (2, 1):
        onnxpar.shard(BERT, tmp_path / "bert.par", devices=devices)
    names = {file.name for file in (tmp_path / "bert.par").iterdir()}
    assert {"modules.json", "pooling.json", "sentence_bert_config.json"} <= names


@pytest.mark.slow
def test_other_models_are_refused(tmp_path: Path) -> None:
    onnxpar.shard(MODELS / "llama.legacy.dynamic.onnx", tmp_path / "llama.par", devices=1)
    with pytest.raises(ModelError, match="no language model, and none of its outputs is"):
        Embedder(tmp_path / "llama.par")
    shutil.copytree(RERANKER, tmp_path / "r")
    (tmp_path / "r" / "config.json").write_text('{"architectures": ["BertForMaskedLM"]}')
    onnxpar.shard(tmp_path / "r", tmp_path / "r.par", devices=1)
    with pytest.raises(ModelError, match="BertForMaskedLM; a reranker is"):
        Embedder(tmp_path / "r.par")
    assert not is_encoder(tmp_path)
    onnxpar.shard(MODELS / "llm" / "gpt2_optimum", tmp_path / "gpt2.par", devices=1)
    assert not is_encoder(tmp_path / "gpt2.par")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["legacy.static", "dynamo.dynamic"])
def test_models_of_fixed_and_open_sizes(tmp_path: Path, form: str) -> None:
    """The fixed one runs 4 texts of 16 tokens."""
    onnxpar.shard(MODELS / f"bert_encoder.{form}.onnx", tmp_path / "bert.par", devices=2)
    events: queue.Queue[Any] = queue.Queue()
    with Embedder(tmp_path / "bert.par", timeout=TIMEOUT) as embedder:
        texts = [Tokens([5 + size] * size) for size in (3, 16, 1, 7, 2, 9)]
        embedder.submit(texts, events.put)
        found = events.get(timeout=TIMEOUT)
        assert embedder.counts.steps == (2 if "static" in form else 1)
        for text, vector in zip(texts, found, strict=True):
            embedder.submit([text], events.put)
            np.testing.assert_allclose(events.get(timeout=TIMEOUT)[0], vector, atol=1e-5)


@pytest.mark.slow
def test_batches_are_of_similar_lengths(make: Make) -> None:
    embedder = make(batch_tokens=40)
    rng = np.random.default_rng(0)
    given = [rng.integers(3, 320, size).tolist() for size in (10, 100, 9, 11, 99, 12, 101, 10)]
    events: queue.Queue[Any] = queue.Queue()
    embedder.submit([Tokens(ids) for ids in given], events.put)
    found = events.get(timeout=TIMEOUT)
    # 10, 10, 9 and then 11, 12 (3 x 12 with another); each long one alone
    assert embedder.counts.steps == 5 and embedder.counts.prompt_tokens == sum(map(len, given))
    for ids, vector in zip(given, found, strict=True):
        embedder.submit([Tokens(ids)], events.put)
        np.testing.assert_allclose(events.get(timeout=TIMEOUT)[0], vector, atol=1e-5)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "ids,named",
    [([], "no tokens"), ([320], "from 0 to 319"), ([-1], "from 0 to 319"), ([5] * 121, "most 120")],
)
def test_bad_texts_are_refused(make: Make, ids: list[int], named: str) -> None:
    with pytest.raises(InputError, match=named):
        make().submit([Tokens(ids)], print)
    with pytest.raises(InputError, match="batch_tokens is 0"):
        make(batch_tokens=0)


def test_queue_cancel_drain_and_close(make: Make) -> None:
    embedder, events = make(batch_tokens=1, max_waiting=3), queue.Queue[Any]()
    texts = [Tokens([5] * 100)] * 200
    first = embedder.submit(texts, events.put)
    with pytest.raises(Busy, match="texts wait already"):
        embedder.submit(texts, events.put)
    first.cancel()
    assert events.get(timeout=TIMEOUT) == End("cancelled")
    first.cancel()  # has no effect
    embedder.submit(texts[:3], events.put)
    assert events.get(timeout=TIMEOUT).shape == (3, 32)
    other = make(batch_tokens=1)
    other.submit(texts, events.put)
    other.close()
    assert events.get(timeout=TIMEOUT) == End("cancelled")


@pytest.mark.slow
@pytest.mark.processes
def test_requests_go_on_when_ranks_die(make: Make) -> None:
    embedder, events = make(batch_tokens=200), queue.Queue[Any]()
    running: queue.Queue[Any] = queue.Queue()
    texts = [Tokens([5 + i % 50] * 100) for i in range(1000)]
    embedder.submit(texts, running.put)
    assert wait_until(lambda: embedder.counts.steps > 3, TIMEOUT)
    embedder.submit([Tokens([5, 6])], events.put)
    os.kill(pids(embedder._session)[1], signal.SIGKILL)
    results = running.get(timeout=TIMEOUT)
    np.testing.assert_allclose(results, embedder._result(texts), atol=1e-5)
    assert events.get(timeout=TIMEOUT).shape == (1, 32)  # it waited
    counts = embedder.counts
    assert counts.restarts == 1 and counts.continued == 1 and embedder.status == "ready"
    assert counts.prompt_tokens == 2 * 1000 * 100 + 2  # no text has run twice
    os.kill(pids(embedder._session)[0], signal.SIGKILL)
    assert wait_until(lambda: embedder.counts.restarts == 2, TIMEOUT)
    np.testing.assert_allclose(embedder.embed(TEXTS), wanted(), atol=1e-5)
