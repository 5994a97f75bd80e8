"""`onnxpar serve` under a launcher: rank 0 serves, and the other ranks follow it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from committed import MODELS
from serve.servers import TIMEOUT, until
from sharded import sharded

from onnxpar.llm.embedder import Embedder
from onnxpar.llm.generator import Generator

RANK_TIMEOUT = 5.0
"""The --timeout of ranks, in seconds."""
SERVE = ["serve", "--port", "0", "--timeout", str(RANK_TIMEOUT)]
PROMPTS = ("import os", "def")


class Launched:
    """Processes that are the ranks of a server, by their variables."""

    def __init__(self, folder: Path, *args: str, ranks: int = 2) -> None:
        common = {"ONNXPAR_WORLD_SIZE": str(ranks), "ONNXPAR_STORE": f"file:{folder}/store"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "onnxpar", *SERVE, *args],
                env={**os.environ, **common, "ONNXPAR_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

    def url(self) -> str:
        return url_of(self.processes[0])

    def signal(self, number: int) -> None:
        """Sends a signal to all, as a launcher does."""
        for each in self.processes:
            each.send_signal(number)

    def ends(self) -> list[tuple[int, str, str]]:
        """The exit status of each process, and what it prints."""
        said = [each.communicate(timeout=60) for each in self.processes]
        return [(p.returncode, *texts) for p, texts in zip(self.processes, said, strict=True)]


def url_of(process: subprocess.Popen[str]) -> str:
    """The URL that the first line of a server says."""
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.fullmatch(r"onnxpar: \S+ is served at (http://\S+)\n", line)
    if found is None:
        process.kill()
        raise AssertionError((line, process.communicate()))
    return found[1]


Start = Callable[..., Launched]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts ranks, which end with the test."""
    made: list[Launched] = []

    def started(*args: object, ranks: int = 2) -> Launched:
        made.append(Launched(tmp_path, *map(str, args), ranks=ranks))
        return made[-1]

    yield started
    for launched in made:
        for each in launched.processes:
            each.kill()
            each.communicate()


@pytest.fixture(scope="module")
def par() -> Path:
    return sharded(MODELS / "llm" / "llama", devices=2, preset="tensor-parallel")


@pytest.fixture(scope="module")
def wanted(par: Path) -> list[str]:
    """What ranks say that no launcher has started."""
    with Generator(par, timeout=TIMEOUT) as generator:
        return [generator.generate(p, max_new_tokens=24)[0].text for p in PROMPTS]


def text(url: str, prompt: str, **options: object) -> str:
    """The greedy continuation of a prompt."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 24, **options}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT)
    found: str = response.json()["choices"][0]["text"]
    return found


@pytest.mark.slow
def test_answers_and_the_end(par: Path, wanted: list[str], start: Start) -> None:
    """Answers are those without a launcher, also after a pause beyond the timeout. Requests that
    run when a signal comes are finished."""
    launched = start(par)
    url = launched.url()
    assert [text(url, prompt) for prompt in PROMPTS] == wanted
    time.sleep(1.5 * RANK_TIMEOUT)
    assert [text(url, prompt) for prompt in PROMPTS] == wanted
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.append(text(url, "def")))
    launched.processes[1].send_signal(signal.SIGSTOP)  # else the request ends before the signal
    asking.start()
    until(lambda: "onnxpar_running_requests 1.0" in metrics(url))
    launched.signal(signal.SIGTERM)
    launched.processes[1].send_signal(signal.SIGCONT)
    asking.join(TIMEOUT)
    assert found == [wanted[1]]
    (status, told, error), other = launched.ends()
    assert (status, error) == (0, "onnxpar: ended\n") and other == (0, "", "")
    assert '"POST /v1/completions" 200' in told  # the access log


def metrics(url: str) -> str:
    return httpx.get(f"{url}/metrics", timeout=TIMEOUT).text


@pytest.mark.slow
def test_onnxpar_launch(par: Path, wanted: list[str]) -> None:
    """A signal to the launcher ends all; the last lines of the server come through."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "onnxpar", "launch", "--hosts", "localhost:2"),
            *("--grace", "20", "--", *SERVE, str(par)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = url_of(process)
        assert text(url, PROMPTS[0]) == wanted[0]
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60)[1] == "onnxpar: ended\nonnxpar: terminated\n"
        assert process.returncode == 143
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_is_lost(par: Path, start: Start, number: int) -> None:
    """The server ends with an error that names it."""
    launched = start(par)
    url = launched.url()
    text(url, "def")
    launched.processes[1].send_signal(number)
    _, errors = launched.processes[0].communicate(timeout=60)
    assert launched.processes[0].returncode == 2
    assert "new ranks start" not in errors
    assert re.search(r"^onnxpar: error: .*rank 1 ", errors, re.MULTILINE), errors


def test_rank_0_is_lost(par: Path, start: Start) -> None:
    launched = start(par)
    launched.url()
    launched.processes[0].kill()
    _, errors = launched.processes[1].communicate(timeout=60)
    assert launched.processes[1].returncode == 2
    assert re.search(r"^onnxpar: error: .*rank 0 ", errors, re.MULTILINE), errors


@pytest.mark.slow
def test_a_second_signal_ends_a_follower_at_once(par: Path, start: Start) -> None:
    """The first one leaves it with rank 0, which has got none."""
    launched = start(par)
    url = launched.url()
    launched.processes[1].send_signal(signal.SIGTERM)
    time.sleep(3)
    assert launched.processes[1].poll() is None and text(url, "def")
    launched.processes[1].send_signal(signal.SIGTERM)
    assert launched.processes[1].wait(TIMEOUT) == 143


@pytest.mark.slow
@pytest.mark.processes
def test_an_embedding_model(tmp_path: Path, start: Start) -> None:
    bert = sharded(MODELS / "embed" / "bert", devices=2, preset="data-parallel")
    texts = ["a text", "another, longer text", "x"]
    with Embedder(bert, timeout=TIMEOUT) as embedder:
        expected = embedder.embed(texts)
    launched = start(bert, "--log-dir", tmp_path / "log")
    response = httpx.post(f"{launched.url()}/v1/embeddings", json={"input": texts}, timeout=TIMEOUT)
    found = [each["embedding"] for each in response.json()["data"]]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    launched.signal(signal.SIGINT)
    assert [status for status, _, _ in launched.ends()] == [0, 0]
    assert sorted(p.name for p in (tmp_path / "log").iterdir()) == ["rank.0", "rank.1"]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "args,named",
    [
        (["--replicas", "2"], "--replicas: a launcher has started the ranks"),
        (["--bind", "numa"], "--bind: a launcher has started the ranks"),
        (["--ranks-per-numa", "1"], "--ranks-per-numa: a launcher has started the ranks"),
    ],
)
def test_refused_on_all_ranks(par: Path, start: Start, args: list[str], named: str) -> None:
    for status, out, errors in start(par, *args).ends():
        assert (status, out) == (2, "")
        assert errors.startswith(f"onnxpar: error: {named}") and errors.count("\n") == 1


@pytest.mark.slow
def test_refused_by_rank_0(par: Path, start: Start) -> None:
    """Then the others end with its status, and leave it to rank 0 to say why."""
    first, other = start(par, "--host", "192.0.2.1").ends()
    assert first[0] == 2 and "cannot listen at 192.0.2.1 port 0" in first[2]
    assert other == (2, "", "")
    first, other = start(par, "--kv-memory", "9000TB").ends()
    assert first[0] == 2 and "GB in all, and this host has" in first[2]
    assert other == (2, "", "")
