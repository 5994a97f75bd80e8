"""Requests end when their client goes, when their time is over, and when the server ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

import httpx
import pytest
from serve.scripted_engine import forever
from serve.servers import TIMEOUT, Served, until

from onnxpar.serve.endpoint import ENDING

Serve = Callable[..., Served]
BODY = {"messages": [{"role": "user", "content": "x"}]}
CHAT = "/v1/chat/completions"


def endless(served: Served) -> Served:
    """A server whose answers take long."""
    served.engine.script, served.engine.delay = forever, 0.01
    return served


def is_idle(served: Served) -> bool:
    """True if no request is left."""
    return served.service.gate.wait(0)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_goes_cancels_its_answers(served: Served, is_stream: bool) -> None:
    endless(served)
    body = {**BODY, "n": 2, "stream": is_stream}
    with httpx.Client(base_url=served.url, timeout=TIMEOUT) as client:
        if is_stream:
            with client.stream("POST", CHAT, json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(CHAT, json=body, timeout=httpx.Timeout(TIMEOUT, read=0.2))
    until(lambda: len(served.engine.generations) == 2)
    for generation in served.engine.generations:
        assert generation.ended.wait(TIMEOUT) and generation.is_cancelled
    until(lambda: is_idle(served))
    assert served.http.get("/health").status_code == 200


def test_a_client_that_goes_before_the_first_token(served: Served) -> None:
    endless(served).engine.delay = 0.5
    with pytest.raises(httpx.ReadTimeout):
        served.http.post(CHAT, json={**BODY, "stream": True}, timeout=0.3)
    until(lambda: is_idle(served))
    until(lambda: all(each.is_cancelled for each in served.engine.generations))


def test_a_client_that_goes_within_its_request(served: Served) -> None:
    import socket

    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 99\r\n\r\n{{".encode()
        )
        until(lambda: not is_idle(served))
    until(lambda: is_idle(served))
    assert served.http.get("/health").status_code == 200


def test_requests_have_a_time(serve: Serve) -> None:
    served = endless(serve(request_timeout=0.2))
    response = served.post()
    assert response.status_code == 504 and response.json()["error"]["code"] == "timeout"
    streamed = served.post(stream=True).text
    assert '"code":"timeout"' in streamed and streamed.endswith("data: [DONE]\n\n")
    for generation in served.engine.generations:
        assert generation.ended.wait(TIMEOUT)


def test_so_many_requests_at_once(serve: Serve) -> None:
    served = endless(serve(max_requests=1))
    with served.http.stream("POST", CHAT, json={**BODY, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        refused = httpx.post(f"{served.url}{CHAT}", json=BODY, timeout=TIMEOUT)
        assert refused.status_code == 429 and refused.headers["Retry-After"] == "1"
        assert httpx.get(f"{served.url}/health", timeout=TIMEOUT).status_code == 200
    until(lambda: is_idle(served))


def test_a_gate_that_closes_lets_requests_finish(served: Served) -> None:
    endless(served)
    found: list[httpx.Response] = []
    request = threading.Thread(target=lambda: found.append(served.post(max_tokens=20)))
    request.start()
    until(lambda: bool(served.engine.generations))
    served.service.gate.close()
    health = httpx.get(f"{served.url}/health", timeout=TIMEOUT)
    assert health.status_code == 503 and health.json() == {"status": "draining"}
    refused = httpx.post(f"{served.url}{CHAT}", json=BODY, timeout=TIMEOUT)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
    assert served.service.gate.wait(TIMEOUT)
    request.join(TIMEOUT)
    assert found[0].json()["usage"]["completion_tokens"] == 20


def test_requests_that_outlast_the_end(served: Served) -> None:
    endless(served)
    found: list[httpx.Response] = []

    def ask(is_stream: bool) -> None:
        with httpx.Client(base_url=served.url, timeout=TIMEOUT) as client:
            found.append(client.post(CHAT, json={**BODY, "stream": is_stream}))

    asking = [threading.Thread(target=ask, args=(is_stream,)) for is_stream in (False, True)]
    for each in asking:
        each.start()
    until(lambda: len(served.engine.generations) == 2)
    until(lambda: all(each.number for each in served.engine.generations))
    served.service.gate.close()
    assert not served.service.gate.wait(0)
    served.service.gate.stop(ENDING)
    assert served.service.gate.wait(TIMEOUT)
    for each in asking:
        each.join(TIMEOUT)
    assert sorted(response.status_code for response in found) == [200, 503]
    for response in found:
        assert '"code":"draining"' in response.text
