"""A server whose ranks are on two hosts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hosts.conftest import Cluster
from hosts.test_start import LAUNCH

import onnxpar
from onnxpar.llm.generator import Generator

MODELS = Path(__file__).parents[2] / "models"
TIMEOUT = 5.0
"""The --timeout of ranks, in seconds."""
ASK = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode())
request.add_header("Content-Type", "application/json")
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


@pytest.fixture(scope="module")
def wanted(cluster: Cluster) -> str:
    """What ranks of one host say. Leaves the model, over two ranks, in the shared folder."""
    par = cluster.folder / "llama.par"
    onnxpar.shard(MODELS / "llm" / "llama", par, devices=2, preset="tensor-parallel")
    with Generator(par) as generator:
        return generator.generate("import os", max_new_tokens=24)[0].text


@contextmanager
def serving(cluster: Cluster, par: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A launch on hosts a and b, and the URL of its server."""
    serve = ["serve", str(par), "--port", "0", "--timeout", str(TIMEOUT)]
    process = cluster.hosts[0].start(
        [*LAUNCH, "--hosts", "a:1,b:1", "--insecure", "--", *serve],
        cluster.environment,
        cluster.folder,
        stdin=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.fullmatch(r"onnxpar: llama is served at (http://\S+)\n", line):
                yield process, found[1]
                return
        raise AssertionError(process.communicate())
    finally:
        process.kill()
        process.communicate()


def text(cluster: Cluster, url: str) -> str:
    """What the server says to a request of its host."""
    body = {"prompt": "import os", "temperature": 0, "max_tokens": 24}
    command = [sys.executable, "-c", ASK, f"{url}/v1/completions", json.dumps(body)]
    found: str = json.loads(cluster.hosts[0].run(command))["choices"][0]["text"]
    return found


def test_answers(cluster: Cluster, wanted: str) -> None:
    """They are those of one host, also after a pause beyond the timeout."""
    with serving(cluster, cluster.folder / "llama.par") as (_, url):
        assert text(cluster, url) == wanted
        time.sleep(1.5 * TIMEOUT)
        assert text(cluster, url) == wanted


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_without_the_model(cluster: Cluster, wanted: str, host: int) -> None:
    """Ranks fetch what they lack, rank 0 among them."""
    par = Path("/tmp/llama.par")  # hosts have a /tmp of their own
    cluster.hosts[1 - host].run(["cp", "-r", str(cluster.folder / "llama.par"), str(par)])
    try:
        with serving(cluster, par) as (_, url):
            assert text(cluster, url) == wanted
    finally:
        for each in cluster.hosts[:2]:
            each.run(["rm", "-rf", str(par)])


def test_a_link_that_is_cut(cluster: Cluster, wanted: str) -> None:
    """The server ends with an error that names the other end, within the timeout."""
    with serving(cluster, cluster.folder / "llama.par") as (process, url):
        assert text(cluster, url) == wanted
        cluster.hosts[1].cut()
        begin = time.monotonic()
        try:
            _, errors = process.communicate(timeout=90)
        finally:
            cluster.hosts[1].mend()
        assert process.returncode == 2
        assert re.search(r"^onnxpar: error: .*rank 1 ", errors, re.MULTILINE), errors
        first = errors.index("rank 1")
        assert "host" in errors[first:]
        assert time.monotonic() - begin < TIMEOUT + 30  # the launcher waits for its end of ssh
