"""Which onnxpar this is, and with what it runs."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

UNKNOWN = "0+unknown"
"""The version of a copy that is not installed."""


def version_of(package: str) -> str:
    """The version of an installed package, else UNKNOWN."""
    try:
        return version(package)
    except PackageNotFoundError:
        return UNKNOWN


def versions_text() -> str:
    """The line that a report of a bug should begin with."""
    with_ = ", ".join(f"{name} {version_of(name)}" for name in ("onnxruntime", "onnx"))
    return f"onnxpar {version_of('onnxpar')} ({with_}, Python {platform.python_version()})"
