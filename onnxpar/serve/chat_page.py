"""A page to chat with the model."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.responses import Response

_FILE = Path(__file__).with_name("chat_page.html")


def chat_page() -> Response:
    """Returns the page. It may run and load nothing but its own script and style."""
    text, headers = _page()
    return Response(text, headers=headers, media_type="text/html; charset=utf-8")


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    """The page, and the headers that guard it."""
    text = _FILE.read_text(encoding="utf-8")
    policy = [
        "default-src 'none'",
        f"script-src {_hash(text, 'script')}",
        f"style-src {_hash(text, 'style')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    headers = {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return text.encode("utf-8"), headers


def _hash(page: str, tag: str) -> str:
    """The source expression of the only element of this tag."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digest = hashlib.sha256(content.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
