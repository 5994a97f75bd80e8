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
    """A block for the first imports of a process; does nothing if NumPy is imported already.

    Python does not look for garbage among modules, neither in the block nor later. NumPy starts no
    threads for its linear algebra, which would take cores from what starts beside it, unless the
    user set their number; so it multiplies on one thread later.
    """
    if "numpy" in sys.modules:
        yield
        return
    is_set, collects = _THREADS in os.environ, gc.isenabled()
    gc.disable()
    if not is_set:
        os.environ[_THREADS] = "1"
    try:
        yield
    finally:
        if not is_set:
            os.environ.pop(_THREADS, None)
        if collects:
            gc.freeze()
            gc.enable()
