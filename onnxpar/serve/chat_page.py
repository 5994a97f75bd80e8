"""The web page to chat with the model, and the page that describes a model of another kind."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.responses import Response

_CHAT = Path(__file__).with_name("chat_page.html")
_EMBEDDING = Path(__file__).with_name("embedding_page.html")


def chat_page() -> Response:
    """Returns the response with the chat page. Its headers let it load and run only its own script
    and style."""
    text, headers = _page()
    return Response(text, headers=headers, media_type="text/html; charset=utf-8")


def embedding_page(kind: str, path: str) -> Response:
    """Returns the response with the page of a model that is no language model.

    kind  the kind of the model, with its article
    path  the path for requests
    """
    text = _EMBEDDING.read_text(encoding="utf-8").replace("KIND", kind).replace("PATH", path)
    headers = _headers(text, "style")
    return Response(text, headers=headers, media_type="text/html; charset=utf-8")


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    """Returns the chat page, and the headers that restrict it."""
    text = _CHAT.read_text(encoding="utf-8")
    return text.encode("utf-8"), _headers(text, "script", "style")


def _headers(text: str, *tags: str) -> dict[str, str]:
    """Returns the headers that restrict a page to its own elements: the only one of each of these
    tags, such as "script"."""
    policy = [
        "default-src 'none'",
        *(f"{tag}-src {_hash(text, tag)}" for tag in tags),
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _hash(page: str, tag: str) -> str:
    """Returns the source expression of a content security policy for the only element of this
    tag."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digest = hashlib.sha256(content.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
