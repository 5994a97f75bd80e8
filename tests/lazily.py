"""Modules that are imported at their first use, not by each process that collects tests."""

from __future__ import annotations

import importlib
from typing import Any


class lazily:
    """A module that is installed; imports it when something of it is used. pytest asks all that a
    test module holds for private names, which import nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
