"""Models that many tests shard alike: once in a run of the tests, for all its processes."""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path
from typing import Any

import onnxpar

PLACE = "ONNXPAR_TESTS_SHARDED"
"""The environment variable with the folder of the run."""


def sharded(model: Path, **options: Any) -> Path:
    """Returns the sharded model of these options of `onnxpar.shard`, which tests only read."""
    key = hashlib.sha256(repr((model, sorted(options.items()))).encode()).hexdigest()[:16]
    par = Path(os.environ[PLACE], key, f"{model.stem}.par")
    par.parent.mkdir(exist_ok=True)
    with open(par.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not par.exists():
            onnxpar.shard(model, par, **options)
    return par
