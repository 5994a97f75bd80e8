"""Many clients at once: long and short requests, streams that are broken off, bad requests, and a
rank that is killed. Each request is answered or refused, and no token is wrong.

With --zoo for ten minutes (longer than a test may otherwise take: --timeout 900)."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from committed import MODELS
from runtime.bundles import pids
from serve.servers import TIMEOUT, Served, serving, until
from sharded import sharded

from onnxpar.llm.engine import Engine
from onnxpar.llm.generator import Generator

CLIENTS = 64
NEW = (1, 8, 40)
REFUSED = (429, 503)
BAD: tuple[Mapping[str, Any], ...] = (
    {"prompt": [100_000]},
    {"prompt": [5], "max_tokens": -1},
    {"prompt": [5], "temperature": "hot"},
    {"prompt": [5] * 600},
    {"prompt": [5], "model": "another"},
    {"prompt": []},
)


def prompts() -> list[list[int]]:
    """Prompts of many lengths, some of which begin alike."""
    rng = np.random.default_rng(0)
    common = rng.integers(3, 320, 100).tolist()
    own = [rng.integers(3, 320, length).tolist() for length in (1, 2, 9, 17, 30, 60, 110, 200)]
    return own + [
        common[:length] + tokens[:6] for length, tokens in zip((40, 64, 90), own[4:], strict=False)
    ]


@pytest.fixture(scope="module")
def par() -> Path:
    return sharded(MODELS / "llm" / "llama", devices=2)


def texts() -> dict[tuple[int, int], str]:
    """The greedy texts by prompt and number of tokens, from a model of caches of its own."""
    dense = sharded(MODELS / "llm" / "llama", devices=1, page_size=0)
    found = {}
    with Generator(dense, timeout=TIMEOUT) as generator:
        for number, prompt in enumerate(prompts()):
            for new in NEW:
                (answer,) = generator.generate(prompt, max_new_tokens=new)
                found[number, new] = answer.text
    return found


class Client(threading.Thread):
    """Sends requests one after the other, until there are enough; notes how each one ended."""

    def __init__(self, served: Served, number: int, wanted: Mapping[tuple[int, int], str]) -> None:
        super().__init__(daemon=True)
        self.url, self.wanted = f"{served.url}/v1/completions", wanted
        self.rng = random.Random(number)
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.enough = threading.Event()

    def run(self) -> None:
        with httpx.Client(timeout=TIMEOUT) as http:
            while not self.enough.is_set():
                try:
                    self.ends[self.request(http)] += 1
                except Exception as error:
                    self.wrong.append(repr(error))
                    return

    def request(self, http: httpx.Client) -> str:
        """Sends a request; returns how it ended."""
        kind = self.rng.choices(("whole", "stream", "broken off", "bad"), (5, 3, 2, 1))[0]
        if kind == "bad":
            response = http.post(self.url, json=self.rng.choice(BAD))
            return self.refused(response, (400, 404, *REFUSED))
        number, new = self.rng.randrange(len(prompts())), self.rng.choice(NEW)
        body = {"prompt": prompts()[number], "max_tokens": new, "temperature": 0}
        if kind == "whole":
            response = http.post(self.url, json=body)
            if response.status_code != 200:
                return self.refused(response, REFUSED)
            self.check(number, new, response.json()["choices"][0]["text"])
            return kind
        with http.stream("POST", self.url, json={**body, "stream": True}) as stream:
            if stream.status_code != 200:
                stream.read()
                return self.refused(stream, REFUSED)
            lines = (line for line in stream.iter_lines() if line)
            if kind == "broken off":
                next(lines)
                return kind
            return self.streamed(number, new, lines)

    def streamed(self, number: int, new: int, lines: Any) -> str:
        text = ""
        for line in lines:
            if line == "data: [DONE]":
                self.check(number, new, text)
                return "stream"
            event = httpx.Response(200, text=line.removeprefix("data: ")).json()
            if "error" in event:
                return "failed"
            text += event["choices"][0]["text"]
        raise AssertionError("a stream ended without an end")

    def check(self, number: int, new: int, text: str) -> None:
        if text != self.wanted[number, new]:
            self.wrong.append(f"prompt {number}, {new} tokens: {text!r}")

    def refused(self, response: httpx.Response, allowed: tuple[int, ...]) -> str:
        assert response.status_code in allowed, response.text
        assert response.json()["error"]["message"]
        return f"status {response.status_code}"


def resident(pid: int) -> int:
    """The bytes of memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_many_clients(par: Path, request: pytest.FixtureRequest) -> None:
    seconds = 600 if request.config.getoption("--zoo") else 8
    wanted = texts()
    engine = Engine(par, timeout=TIMEOUT, kv_memory=4096 * 90, max_waiting=40, step_tokens=64)
    with serving(engine) as served:
        clients = [Client(served, number, wanted) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        time.sleep(seconds / 2)
        os.kill(pids(engine._session)[1], signal.SIGKILL)
        until(lambda: engine.counts.restarts == 1 and engine.status == "ready")
        time.sleep(seconds / 4)
        before = [resident(pid) for pid in (os.getpid(), *pids(engine._session))]
        time.sleep(seconds / 4)
        after = [resident(pid) for pid in (os.getpid(), *pids(engine._session))]
        for client in clients:
            client.enough.set()
        for client in clients:
            client.join(TIMEOUT)
        assert not [client for client in clients if client.is_alive()], "a client hangs"
        assert not [text for client in clients for text in client.wrong]
        until(lambda: engine.counts.running == engine.counts.waiting == 0)
        assert engine.counts.used_pages == 0
        ends = sum((client.ends for client in clients), Counter())
        print(dict(ends), engine.counts, [b - a for a, b in zip(before, after, strict=True)])
        assert {"whole", "stream", "broken off", "status 400"} <= ends.keys()
        assert ends["failed"] + ends["status 503"] > 0  # the requests of the rank that died
        assert all(b - a < 64 << 20 for a, b in zip(before, after, strict=True))
        assert served.http.get("/health").json()["status"] == "ready"
