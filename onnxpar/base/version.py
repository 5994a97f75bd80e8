"""The versions of onnxpar and of the packages that it runs with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

UNKNOWN = "0+unknown"
"""The version of a package that is not installed."""


def version_of(package: str) -> str:
    """The version of an installed package; UNKNOWN if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return UNKNOWN


def versions_text() -> str:
    """Returns the versions of onnxpar, onnxruntime, onnx and Python in one line, for --version and
    bug reports."""
    with_ = ", ".join(f"{name} {version_of(name)}" for name in ("onnxruntime", "onnx"))
    return f"onnxpar {version_of('onnxpar')} ({with_}, Python {platform.python_version()})"
