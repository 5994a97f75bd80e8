"""A language model is served by ranks on two nodes of a Ray cluster."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from committed import MODELS
from on_ray.on_nodes import TIMEOUT, actors, pids

import onnxpar
from onnxpar.base.errors import InputError
from onnxpar.llm.generator import Generator

pytest.importorskip("ray")
httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
PROGRAM = """
import sys, onnxpar.ray
where = onnxpar.ray.Actors(strategy="STRICT_SPREAD", insecure=True)
onnxpar.ray.serve(sys.argv[1], port=0, actors=where, model_name="llama", max_running=4)
"""


@pytest.fixture(scope="module")
def par(tmp_path_factory: pytest.TempPathFactory) -> Path:
    par = tmp_path_factory.mktemp("llama") / "llama.par"
    onnxpar.shard(MODELS / "llm" / "llama", par, devices=2, preset="tensor-parallel")
    return par


def test_a_server(cluster: Any, par: Path) -> None:
    with Generator(par, timeout=TIMEOUT) as generator:
        wanted = generator.generate("import os", max_new_tokens=8)[0].text
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "RAY_LOG_TO_DRIVER": "0"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(par)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        found = None
        while found is None and (line := process.stdout.readline()):
            found = re.search(r"llama is served at (http://\S+)", line)
        assert found is not None
        body = {"prompt": "import os", "temperature": 0, "max_tokens": 8}
        answer = httpx.post(f"{found[1]}/v1/completions", json=body, timeout=TIMEOUT)
        assert answer.json()["choices"][0]["text"] == wanted
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT) == 0
    finally:
        process.kill()
        process.communicate(timeout=TIMEOUT)


def test_new_actors_follow_those_that_die(cluster: Any, par: Path) -> None:
    from serve.servers import serving, until

    from onnxpar.llm.engine import Engine

    with serving(Engine(par, timeout=TIMEOUT, start_ranks=actors())) as served:
        wanted = served.post("completions", temperature=0, max_tokens=4).json()["choices"]
        os.kill(pids(served.engine._session)[1], signal.SIGKILL)
        until(lambda: served.engine.counts.restarts == 1)
        until(lambda: served.http.get("/health").status_code == 200)
        found = served.post("completions", temperature=0, max_tokens=4).json()["choices"]
    assert found == wanted


def test_a_time_that_cannot_be(cluster: Any, par: Path) -> None:
    from onnxpar.ray import serve

    with pytest.raises(InputError, match="drain_timeout is -1"):
        serve(par, drain_timeout=-1)
