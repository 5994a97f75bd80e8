"""Makes imports of large packages faster, for processes that are to start quickly."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_THREADS = "OPENBLAS_NUM_THREADS"


@contextmanager
def quick_imports() -> Iterator[None]:
    """A block for imports. Python does not look for garbage among modules, neither in the block nor
    later. NumPy starts no threads for its linear algebra, which would take cores from what starts
    beside it, unless the user set their number; so it multiplies on one thread later."""
    sets_threads = "numpy" not in sys.modules and _THREADS not in os.environ
    collects = gc.isenabled()
    gc.disable()
    if sets_threads:
        os.environ[_THREADS] = "1"
    try:
        yield
    finally:
        if sets_threads:
            os.environ.pop(_THREADS, None)
        if collects:
            gc.freeze()
            gc.enable()
