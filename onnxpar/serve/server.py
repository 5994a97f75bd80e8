"""Runs the HTTP server: opens its socket, and starts and ends its thread."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
import time
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette

from onnxpar.base.errors import InputError, OnnxparError
from onnxpar.base.interrupts import Terminated, end_at_next_signal
from onnxpar.base.write_file import cause
from onnxpar.serve.endpoint import ENDING
from onnxpar.serve.service import Service

_MOST_HEADERS = 64 << 10
"""Most bytes of a request's headers."""
_GRACE = 2.0
"""Seconds in which stopped requests may still send an error to their clients."""


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to an address, but does not listen yet. Errors: InputError if
    the address is not available."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, OverflowError, UnicodeError) as error:
        raise InputError(f"--host {host}: {error}; give an address of this machine") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        why = f"cannot listen at {host} port {port}: {cause(error)}"
        raise InputError(f"{why}; give another --port or --host") from None
    return bound


def is_local(bound: socket.socket) -> bool:
    """True if only this machine can reach the socket."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def url_of(bound: socket.socket) -> str:
    """Returns the URL at which a socket is reached."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(
    app: Starlette, bound: socket.socket, drain_timeout: float, ready: Callable[[], None]
) -> None:
    """Serves until a signal comes, then refuses new requests, finishes the running ones, and
    returns. A second signal ends at once, with its usual exception. Call it in the main thread.

    app            what `application` returns
    bound          the socket
    drain_timeout  longest time, in seconds, to finish requests
    ready          called once the server answers requests
    """
    service: Service = app.state.service
    server = _Server(app, bound)
    server.start()
    try:
        server.wait_until_ready()
        ready()
        server.join(service)
    except (KeyboardInterrupt, Terminated):
        end_at_next_signal()
        service.gate.close()
        service.gate.wait(drain_timeout)
    finally:
        service.gate.stop(ENDING)
        service.gate.wait(_GRACE)
        server.end()


class _Server:
    """Runs uvicorn, an HTTP server, in another thread, so that signals reach the main thread."""

    def __init__(self, app: Starlette, bound: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=1024,
            h11_max_incomplete_event_size=_MOST_HEADERS,
        )
        self._server, self._bound = uvicorn.Server(config), bound
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="onnxpar-serve", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def wait_until_ready(self) -> None:
        """Waits until the server accepts connections. Errors: OnnxparError if it fails."""
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)
        if not self._server.started:
            self.join()

    def join(self, service: Service | None = None) -> None:
        """Waits until the server ends, or no ranks of the service start. Errors: OnnxparError,
        always."""
        while self._thread.is_alive():
            self._thread.join(1.0)
            if service is not None and service.status == "failed":
                raise OnnxparError("the server ends, because no ranks start; start it again")
        raise OnnxparError(f"the HTTP server has failed: {self._failure}") from self._failure

    def end(self) -> None:
        """Closes all connections, and ends the thread."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(_GRACE)

    def _run(self) -> None:
        try:
            asyncio.run(self._server.serve(sockets=[self._bound]))
        except BaseException as error:  # also SystemExit, which uvicorn raises
            self._failure = error
