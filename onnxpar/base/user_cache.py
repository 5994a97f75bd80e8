"""The folder of what is kept for later commands of a user."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path | None:
    """Returns the folder, which need not exist; None if the user has no folder for caches."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(given) if os.path.isabs(given) else Path(os.path.expanduser("~/.cache"))
    return caches / "onnxpar" if caches.is_absolute() else None  # else there is no home
