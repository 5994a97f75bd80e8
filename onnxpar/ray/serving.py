"""A server of language and embedding models whose ranks are actors of a Ray cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from onnxpar.base.errors import InputError, OnnxparError
from onnxpar.base.interrupts import raise_for
from onnxpar.ray.actors import Actors, connect


def serve(
    par: str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    drain_timeout: float = 30.0,
    actors: Actors | None = None,
    **options: Any,
) -> None:
    """Serves a sharded language or embedding model over HTTP as `onnxpar serve` does, until a
    signal comes: the server is in this process, and its ranks are actors. If an actor or its node
    dies, new actors are started, and requests go on there; a request that has lost its actors three
    times fails. Call it in the main thread.

    par            the folder of the sharded model, as for `InferenceSession`
    host, port     the address to listen at
    drain_timeout  longest time, in seconds, to finish requests at the end
    actors         where ranks run, and with how many CPUs
    options        by name: those of `onnxpar.serve.settings.Settings`, such as `model_name` and
                   `api_keys`, of `onnxpar.llm.engine.Engine`, such as `max_running`, or of
                   `InferenceSession`, such as `timeout`

    Errors: InputError for an address that is not available; OnnxparError if the ranks do not start,
    or if packages of `onnxpar[serve]` are missing.
    """
    try:
        from onnxpar.serve.serve_model import serve_model
        from onnxpar.serve.server import bind
        from onnxpar.serve.settings import Settings
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("onnxpar"):
            raise
        raise OnnxparError(
            f"serve needs the package {error.name}: pip install 'onnxpar[ray,serve]'"
        ) from None
    if drain_timeout < 0:
        raise InputError(f"drain_timeout is {drain_timeout:g}; it must be at least 0")
    names = {field.name for field in fields(Settings)} - {"only_loopback"}
    name = Path(par).resolve().name.removesuffix(".par")
    given = {key: options.pop(key) for key in names & options.keys()}
    options["start_ranks"] = actors or Actors()
    settings = Settings(**{"model_name": name, **given})
    bound = bind(host, port)
    connect()  # sets a handler of SIGTERM that would end this process at once
    with _draining_at_sigterm():
        serve_model(bound, lambda: _started(par, options), settings, drain_timeout)


@contextmanager
def _draining_at_sigterm() -> Iterator[None]:
    """Returns a context in which SIGTERM ends the server as SIGINT does: it finishes running
    requests. At the end, the old handlers of both signals are restored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, lambda number, frame: raise_for(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _started(par: str | os.PathLike[str], options: dict[str, Any]) -> Any:
    """Starts and returns an embedder, for an encoder, or an engine. Errors: OnnxparError if the
    ranks do not start."""
    from onnxpar.llm.embedder import Embedder
    from onnxpar.llm.encoder_model import is_encoder
    from onnxpar.llm.engine import Engine
    from onnxpar.serve.log import tell

    return (Embedder if is_encoder(par) else Engine)(par, tell=tell, **options)
