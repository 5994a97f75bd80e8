"""Who may use a server, and from where."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from serve.scripted_engine import Engine
from serve.servers import Served

from onnxpar.base.errors import InputError
from onnxpar.serve.application import application
from onnxpar.serve.settings import Settings

Serve = Callable[..., Served]
PAGE = "https://chat.example.com"


def status(served: Served, path: str = "/v1/models", **headers: str) -> int:
    """The status of a request with headers."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return served.http.get(path, headers=named).status_code


def test_keys(serve: Serve) -> None:
    served = serve(api_keys=(b"first", b"second"))
    assert status(served, authorization="Bearer first") == 200
    assert status(served, authorization="bearer second") == 200
    wrong = ("", "Bearer", "Bearer firs", "Bearer first second", "Basic first", "first")
    for each in wrong:
        response = served.http.get("/v1/models", headers={"authorization": each})
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
    assert served.http.get("/v1/models").status_code == 401
    latin = {b"authorization": b"Bearer \xff\xfe"}
    assert served.http.get("/v1/models", headers=latin).status_code == 401
    assert served.post().status_code == 401 and not served.engine.generations
    assert status(served, "/metrics") == status(served, "/v1/nothing") == 401
    assert status(served, "/health") == status(served, "/") == 200


def test_pages_of_other_origins(serve: Serve) -> None:
    served = serve()
    own = served.url
    assert status(served, origin=own) == 200
    for origin in (PAGE, "null", "http://localhost:1", "", "http://"):
        assert status(served, origin=origin) == 403
    response = served.http.get("/v1/models", headers={"origin": own})
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_origins_that_may_use_the_server(serve: Serve) -> None:
    served = serve(cors_origins=(PAGE,), api_keys=(b"key",))
    asked = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type, x-other",
    }
    preflight = served.http.options("/v1/chat/completions", headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == PAGE
    asked["origin"] = "https://evil.example.com"
    refused = served.http.options("/v1/chat/completions", headers=asked)
    assert "access-control-allow-origin" not in refused.headers
    assert status(served, origin=asked["origin"], authorization="Bearer key") == 403
    assert status(served, origin=PAGE, authorization="Bearer key") == 200
    error = served.http.get("/v1/models", headers={"origin": PAGE})  # pages can read errors
    assert error.status_code == 401 and error.headers["access-control-allow-origin"] == PAGE
    assert status(serve(cors_origins=("*",)), origin="https://any.example.com") == 200


@pytest.mark.matrix
@pytest.mark.parametrize(
    "host,wanted",
    [
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1:80", 200),
        ("127.8.9.1", 200),
        ("[::1]:8000", 200),
        ("evil.example.com", 403),
        ("localhost.example.com:8000", 403),
        ("0.0.0.0", 403),
        ("192.168.0.1", 403),
        ("[::1", 403),
        ("a@localhost@evil", 403),
        ("", 403),
    ],
)
def test_hosts(serve: Serve, host: str, wanted: int) -> None:
    served = serve(only_loopback=True)
    assert status(served, host=host) == wanted
    assert status(serve(), host=host) == 200


def test_the_page_may_load_nothing(serve: Serve) -> None:
    response = serve().http.get("/")
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "http" not in response.text.replace("http-equiv", "")


@pytest.mark.parametrize(
    "settings,named",
    [
        ({"model_name": ""}, "model_name is ''"),
        ({"model_name": "a\nb"}, "give a printable name"),
        ({"max_body": 0}, "max_body is 0; it must be above 0"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"request_timeout": float("nan")}, "request_timeout is nan"),
        ({"cors_origins": ("chat.example.com",)}, "an origin is such as https://"),
        ({"cors_origins": ("https://a/b",)}, "cors_origins has 'https://a/b'"),
    ],
)
def test_settings_that_are_wrong(settings: dict[str, object], named: str) -> None:
    with Engine() as engine, pytest.raises(InputError) as found:
        application(engine, Settings(**settings))  # type: ignore[arg-type]
    assert named in str(found.value)


def test_a_bug_is_a_response_in_the_shape_of_others(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve()

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(served.engine, "submit", fail)
    response: httpx.Response = served.post()
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error" and "bug" not in response.text
    printed = capsys.readouterr().err
    assert "onnxpar: error: a request failed: ZeroDivisionError: a bug" in printed
    assert "Traceback" not in printed
