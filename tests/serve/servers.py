"""Servers of scripted engines."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from lazily import lazily
from serve.scripted_engine import Engine

from onnxpar.serve.application import application
from onnxpar.serve.server import bind, url_of
from onnxpar.serve.settings import Settings

TIMEOUT = 30.0

openai = lazily("openai")


class Served:
    """A server at a free port, with clients."""

    def __init__(self, engine: Any, url: str, service: Any) -> None:
        self.engine, self.url, self.service = engine, url, service
        self.http = httpx.Client(base_url=url, timeout=TIMEOUT)
        self.openai = openai.OpenAI(
            base_url=f"{url}/v1", api_key="secret", max_retries=0, timeout=TIMEOUT
        )

    def post(self, path: str = "chat/completions", **body: Any) -> httpx.Response:
        """The response to a request; without a prompt or messages, there is one."""
        if path == "chat/completions":
            body = {"messages": [{"role": "user", "content": "hello"}], **body}
        else:
            body = {"prompt": "hello", **body}
        return self.http.post(f"/v1/{path}", json=body)


def until(holds: Callable[[], bool]) -> None:
    """Waits until something holds."""
    end = time.monotonic() + TIMEOUT
    while not holds():
        assert time.monotonic() < end, "it does not come to pass"
        time.sleep(0.01)


@contextmanager
def serving(engine: Any = None, **settings: Any) -> Iterator[Served]:
    """A server with settings, as long as the block; without an engine, of a scripted one."""
    engine = Engine() if engine is None else engine
    app = application(engine, Settings(**{"model_name": "llama", **settings}))
    bound = bind("127.0.0.1", 0)
    config = uvicorn.Config(app, http="h11", lifespan="off", ws="none", log_level="error")
    server = uvicorn.Server(config)
    run = threading.Thread(target=lambda: asyncio.run(server.serve([bound])), daemon=True)
    with bound, engine:
        run.start()
        until(lambda: server.started)
        served = Served(engine, url_of(bound), app.state.service)
        yield served
        served.http.close()
        served.openai.close()
        server.should_exit = server.force_exit = True
        run.join(TIMEOUT)
