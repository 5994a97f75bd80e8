"""Errors in the form of OpenAI's API, and responses of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_LONGEST = 100
"""Most characters of a value that a message quotes."""


class ApiError(Exception):
    """An error that is sent to the client in place of an answer.

    status   the HTTP status
    param    the field of the request that is wrong, if there is one
    code     a short name of the error, for programs
    headers  further headers of the response
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Returns the error as the JSON object of OpenAI's API."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, kind)
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        """Returns the response with the error."""
        return JsonResponse(self.body(), self.status, self.headers)


def json_bytes(value: object) -> bytes:
    """Returns a value as JSON. Characters that are not valid Unicode become question marks."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


class JsonResponse(Response):
    """A response whose content is written as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


def quote(value: object) -> str:
    """Returns a value as text for a message: a number, a string (cut if it is long), or "an array"
    or "an object"."""
    if isinstance(value, (str, int, float)) or value is None:
        text = repr(value[: _LONGEST + 1] if isinstance(value, str) else value)
        return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
    return "an array" if isinstance(value, list) else "an object"
