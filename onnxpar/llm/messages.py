"""The type of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
"""A chat: objects with `role` and `content`."""
