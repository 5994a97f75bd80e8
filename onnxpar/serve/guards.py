"""Middleware that every request passes before its route: metrics, and checks of hosts, origins and
keys."""

from __future__ import annotations

import hmac
import ipaddress
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onnxpar.serve.api_error import ApiError
from onnxpar.serve.log import log_error, log_request
from onnxpar.serve.metrics import Metrics
from onnxpar.serve.settings import Settings

_ABANDONED = 499
"""The status, in metrics, of requests whose clients closed the connection."""
_OPEN = ("/", "/health")
"""Paths that need no key."""


class Measured:
    """Middleware that counts requests and measures their time. A bug becomes a response with status
    500.

    routes  the paths that metrics distinguish
    log     True to print a line for each request
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, routes: Sequence[str], log: bool = False
    ) -> None:
        self._app, self._metrics, self._routes, self._log = app, metrics, routes, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, and records its status and time."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, start = _ABANDONED, time.perf_counter()

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:  # the outermost boundary: no traceback reaches a client
            log_error(error)
            if status == _ABANDONED:
                response = ApiError("the server has failed; its log says more", 500).response()
                await response(scope, receive, noted)
        finally:
            seconds = time.perf_counter() - start
            route = scope["path"] if scope["path"] in self._routes else "other"
            self._metrics.requests.labels(route, str(status)).inc()
            self._metrics.duration.labels(route).observe(seconds)
            if self._log:
                log_request(scope, status, seconds)


class Guards:
    """Middleware that refuses requests from clients without permission."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it with an error."""
        if scope["type"] == "http":
            try:
                self._check(scope["path"], Headers(scope=scope))
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        """Errors: ApiError if the host, the origin or the key of a request is not allowed."""
        settings, host = self._settings, headers.get("host", "")
        if settings.only_loopback and not is_loopback(_host_name(host)):
            raise ApiError(
                "the Host of the request is not localhost; start the server with --api-key to "
                "use other names",
                403,
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is not None and not _is_allowed(origin, host, settings.cors_origins):
            raise ApiError(
                "pages of other origins may not use this server; start it with --cors-origin",
                403,
                code="origin_not_allowed",
            )
        if settings.api_keys and path not in _OPEN:
            _check_key(headers.get("authorization", ""), settings.api_keys)


def is_loopback(host: str) -> bool:
    """True for a name or an address that always means this machine: localhost, 127.0.0.1, ::1."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _host_name(host: str) -> str:
    """Returns the name in a Host header, without its port; empty if the header is wrong."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_allowed(origin: str, host: str, allowed: Sequence[str]) -> bool:
    """True for an origin whose pages may use this server: the server's own (`host`), or one in
    `allowed`."""
    return "*" in allowed or origin in allowed or origin.partition("://")[2] == host


def _check_key(authorization: str, keys: Sequence[bytes]) -> None:
    """Errors: ApiError if the Authorization header has none of the keys. Takes equally long for all
    wrong keys."""
    kind, _, key = authorization.partition(" ")
    sent = key.strip().encode("latin-1", "replace")
    matches = [hmac.compare_digest(sent, key) for key in keys]
    if kind.lower() != "bearer" or not any(matches):
        missing = "needs an API key" if not authorization else "has a wrong API key"
        raise ApiError(
            f"the request {missing}; send the header Authorization: Bearer KEY",
            401,
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
