"""The folder for data that later commands of the same user can reuse."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path | None:
    """Returns $XDG_CACHE_HOME/onnxpar, by default ~/.cache/onnxpar, which may not exist yet; None
    if the user has no home folder."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(given) if os.path.isabs(given) else Path(os.path.expanduser("~/.cache"))
    return caches / "onnxpar" if caches.is_absolute() else None  # else there is no home
