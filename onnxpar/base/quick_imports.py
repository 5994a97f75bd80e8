"""Speeds up the imports of large packages, for processes that should start quickly."""

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

    The garbage collector is off in the block and later ignores the imported modules. NumPy's BLAS
    starts no threads, which would take cores from other starting ranks; its products run on one
    thread later, too, unless the user set OPENBLAS_NUM_THREADS.
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
