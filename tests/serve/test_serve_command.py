"""`onnxpar serve`: its start, its end by signals, and what it refuses."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from serve.scripted_engine import FOLDER
from serve.servers import TIMEOUT, until

COMMAND = Path(__file__).with_name("scripted_command.py")
BODY = {"prompt": "x", "max_tokens": 30}


class Process:
    """A server in a process, and its URL once it answers."""

    def __init__(self, *args: str, delay: float = 0.0, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(COMMAND), str(FOLDER), "--port", "0", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "DELAY": str(delay), **environment},
        )

    def url(self) -> str:
        """The URL that the first line says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.fullmatch(r"onnxpar: \S+ is served at (http://\S+)\n", line)
        assert found is not None, (line, self.process.communicate(timeout=TIMEOUT))
        return found[1]

    def end(self, number: int | None = None) -> tuple[int, str]:
        """The exit status, after a signal if one is given, and what is printed to stderr."""
        if number is not None:
            self.process.send_signal(number)
        _, printed = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, printed


Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts servers, which end with the test."""
    made: list[Process] = []

    def started(*args: str, delay: float = 0.0, **environment: str) -> Process:
        made.append(Process(*args, delay=delay, **environment))
        return made[-1]

    yield started
    for each in made:
        each.process.kill()
        each.process.communicate(timeout=TIMEOUT)


def answer(url: str, into: list[httpx.Response], **body: object) -> threading.Thread:
    """A thread that sends a request."""

    def ask() -> None:
        into.append(httpx.post(f"{url}/v1/completions", json={**BODY, **body}, timeout=TIMEOUT))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


def is_running(url: str) -> bool:
    """True if the engine generates."""
    text = httpx.get(f"{url}/metrics", timeout=TIMEOUT).text
    return "onnxpar_generated_tokens_total 0.0" not in text


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_after_its_requests(start: Start, number: int) -> None:
    process = start(delay=0.1)
    url = process.url()
    found: list[httpx.Response] = []
    asking = answer(url, found)
    until(lambda: is_running(url))
    process.process.send_signal(number)
    until(lambda: httpx.get(f"{url}/health", timeout=TIMEOUT).json()["status"] == "draining")
    refused = httpx.post(f"{url}/v1/completions", json=BODY, timeout=TIMEOUT)
    assert refused.status_code == 503
    asking.join(TIMEOUT)
    assert found[0].json()["usage"]["completion_tokens"] == 30
    assert process.end() == (0, "onnxpar: ended\n")


@pytest.mark.slow
def test_requests_that_outlast_the_end(start: Start) -> None:
    process = start("--drain-timeout", "0.1", delay=0.5)
    url = process.url()
    found: list[httpx.Response] = []
    asking = answer(url, found)
    until(lambda: is_running(url))
    assert process.end(signal.SIGTERM) == (0, "onnxpar: ended\n")
    asking.join(TIMEOUT)
    assert found[0].status_code == 503 and found[0].json()["error"]["code"] == "draining"


@pytest.mark.slow
@pytest.mark.parametrize("number,status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_at_once(start: Start, number: int, status: int) -> None:
    process = start("--drain-timeout", "1000", delay=1.0)
    url = process.url()
    with httpx.stream("POST", f"{url}/v1/completions", json={**BODY, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        process.process.send_signal(number)
        until(lambda: httpx.get(f"{url}/health", timeout=TIMEOUT).json()["status"] == "draining")
        ended, printed = process.end(number)
    assert ended == status and printed.startswith("onnxpar: ") and "Traceback" not in printed


@pytest.mark.slow
def test_an_idle_server_ends(start: Start) -> None:
    process = start("--model-name", "mine")
    url = process.url()
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "mine"
    assert httpx.get(url, headers={"host": "evil.example.com"}).status_code == 403
    with httpx.Client() as kept:  # an open connection does not hinder it
        kept.get(f"{url}/health")
        assert process.end(signal.SIGTERM) == (0, "onnxpar: ended\n")


@pytest.mark.slow
def test_keys(start: Start, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n\ntwo\n")
    places: list[tuple[list[str], dict[str, str], str]] = [
        (["--api-key", "a"], {}, "a"),
        ([], {"ONNXPAR_API_KEY": "b"}, "b"),
        (["--api-key-file", f"{tmp_path}/keys"], {}, "two"),
    ]
    for args, environment, key in places:
        url = start(*args, **environment).url()
        assert httpx.get(f"{url}/v1/models").status_code == 401
        headers = {"authorization": f"Bearer {key}", "host": "any.example.com"}
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200


@pytest.mark.slow
def test_a_server_for_all_without_a_key_warns(start: Start) -> None:
    process = start("--host", "0.0.0.0")
    url = process.url()
    assert httpx.get(f"{url}/health").status_code == 200
    status, printed = process.end(signal.SIGTERM)
    assert status == 0
    assert printed.startswith(f"onnxpar: warning: anyone who reaches {url} can use the model;")


@pytest.mark.slow
@pytest.mark.parametrize("host,shown", [("localhost", ""), ("::1", "http://[::1]:")])
def test_hosts(start: Start, host: str, shown: str) -> None:
    if host == "::1":
        try:
            socket.create_server((host, 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("there is no IPv6")
    url = start("--host", host).url()
    assert url.startswith(shown) and httpx.get(f"{url}/health").status_code == 200


@pytest.mark.slow
def test_a_port_in_use(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        status, printed = start("--port", str(port)).end()
    assert status == 2
    assert printed.startswith(f"onnxpar: error: cannot listen at 127.0.0.1 port {port}: ")
    assert printed.endswith("give another --port or --host\n") and printed.count("\n") == 1


@pytest.mark.matrix
@pytest.mark.parametrize(
    "args,named",
    [
        (["--port", "70000"], "a port is from 0 to 65535"),
        (["--port", "x"], "'x' is not a whole number"),
        (["--host", "no.such.host.invalid"], "--host no.such.host.invalid: "),
        (["--host", "192.0.2.1"], "cannot listen at 192.0.2.1 port 0"),
        (["--api-key", "a", "--api-key-file", "b"], "not both"),
        (["--api-key", ""], "an argument is empty"),
        (["--api-key", " "], "a key is a line of printable ASCII characters"),
        (["--api-key-file", "/no/such/file"], "--api-key-file /no/such/file: cannot read it"),
        (["--api-key-file", "/dev/null"], "a key is a line of printable ASCII characters"),
        (["--cors-origin", "x"], "an origin is such as https://chat.example.com"),
        (["--max-choices", "0"], "max_choices is 0; it must be above 0"),
        (["--drain-timeout", "-1"], "--drain-timeout -1: it must be at least 0"),
    ],
)
def test_refused(args: list[str], named: str, start: Start) -> None:
    status, printed = start(*args).end()
    assert status == 2 and named in printed and printed.count("\n") == 1, printed
    assert printed.startswith("onnxpar: error: ")


@pytest.mark.slow
def test_packages_that_are_missing(start: Start, tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError(name='uvicorn')")
    status, printed = start(PYTHONPATH=str(tmp_path)).end()
    wanted = "onnxpar: error: serve needs the package uvicorn: pip install 'onnxpar[serve]'\n"
    assert (status, printed) == (2, wanted)
