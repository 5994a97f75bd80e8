"""Serves a model at an address, from the start of its ranks to their end: the function behind
`onnxpar serve`."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from onnxpar.serve.application import application
from onnxpar.serve.log import tell
from onnxpar.serve.server import is_local, run_server, url_of
from onnxpar.serve.settings import Settings


def serve_model(
    bound: socket.socket, start: Callable[[], Any], settings: Settings, drain_timeout: float
) -> None:
    """Starts an engine or an embedder, serves it until a signal comes, and closes it. Call it in
    the main thread.

    bound          the socket; closed at the end
    start          starts and returns the engine or embedder
    settings       of the server
    drain_timeout  longest time, in seconds, to finish requests at the end

    Errors: OnnxparError if the ranks do not start, or fail for good.
    """
    settings = replace(settings, only_loopback=is_local(bound) and not settings.api_keys)
    settings.check()
    if not is_local(bound) and not settings.api_keys:
        warnings.warn(
            f"anyone who reaches {url_of(bound)} can use the model; give --api-key-file",
            stacklevel=2,
        )
    with bound, start() as engine:
        engine.tokenizer  # noqa: B018  (loads it now, and not in the first request)
        app = application(engine, settings)
        text = f"onnxpar: {settings.model_name} is served at {url_of(bound)}"
        run_server(app, bound, drain_timeout, lambda: print(text, flush=True))
    tell("ended")
