"""The settings of a server."""

from __future__ import annotations

from dataclasses import dataclass

from onnxpar.base.errors import InputError
from onnxpar.serve.tool_families import FAMILIES


@dataclass(frozen=True)
class Settings:
    """The name of the model, its users, and their limits.

    model_name        the model's id in requests and answers
    api_keys          a request must have one of them, as `Authorization: Bearer KEY`; empty: no key
                      is needed
    cors_origins      origins, such as https://chat.example.com, whose pages may send requests; `*`
                      allows all
    only_loopback     refuse requests with another Host than localhost, which a web page could send
                      by DNS rebinding
    access_log        print a line for each request
    max_body          largest size of a request, in bytes
    max_tokens        largest number of new tokens of an answer; None: as many as the model has room
                      for
    max_choices       largest number of answers to a request: prompts times n
    max_inputs        largest number of texts in a request for embeddings, or of documents in one
                      for scores
    max_requests      largest number of requests that run or wait at once
    request_timeout   longest time of a request, in seconds
    tool_call_parser  the way in which the model writes calls of tools, a name of `FAMILIES`; None:
                      from the chat template
    """

    model_name: str = "model"
    api_keys: tuple[bytes, ...] = ()
    cors_origins: tuple[str, ...] = ()
    only_loopback: bool = False
    access_log: bool = False
    max_body: int = 2 << 20
    max_tokens: int | None = None
    max_choices: int = 16
    max_inputs: int = 2048
    max_requests: int = 256
    request_timeout: float = 600.0
    tool_call_parser: str | None = None

    def check(self) -> None:
        """Errors: InputError for a setting out of its range."""
        if not self.model_name or not self.model_name.isprintable():
            raise InputError(f"model_name is {self.model_name!r}; give a printable name")
        names = ("max_body", "max_tokens", "max_choices", "max_inputs", "max_requests")
        for name in (*names, "request_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"{name} is {value}; it must be above 0")
        if self.tool_call_parser not in (None, *FAMILIES):
            text = f"tool_call_parser is {self.tool_call_parser!r}; it must be one of"
            raise InputError(f"{text} {', '.join(FAMILIES)}")
        for origin in self.cors_origins:
            scheme, _, host = origin.partition("://")
            if origin != "*" and (scheme not in ("http", "https") or not host or "/" in host):
                raise InputError(
                    f"cors_origins has {origin!r}; an origin is such as https://chat.example.com"
                )
