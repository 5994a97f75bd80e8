"""Modules that are imported at their first use, not by each process that collects tests."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any


def lazily(name: str) -> Any:
    """A module that is installed; imports it when something of it is used."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None, f"{name} is not installed"
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
