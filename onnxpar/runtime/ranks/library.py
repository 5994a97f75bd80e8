"""Loads the native library `libonnxpar_ops.so` and declares its functions. Imports nothing large:
the command `run` needs it before onnxruntime."""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from pathlib import Path

from onnxpar.base.errors import RankError

OWN = Path(__file__).parents[2]
"""The folder of the package onnxpar."""
_LIBRARY = "libonnxpar_ops.so"
_REINSTALL = "install onnxpar again"


def library_path() -> Path:
    """Returns the path of the plugin, the custom-op library for
    `SessionOptions.register_custom_ops_library`. A source folder has no library; if this package
    was imported from one, returns the installed package's library. Errors: RankError if there is
    none."""
    for package in (OWN, *(Path(entry, "onnxpar") for entry in sys.path)):
        path = package / "native" / _LIBRARY
        if path.exists():
            return path
    raise RankError(f"{OWN} has no {_LIBRARY}; install onnxpar (pip install {OWN.parent})")


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the plugin as a ctypes library, whose functions return 0 on success. Errors:
    RankError if it does not load."""
    try:
        return _bound(ctypes.CDLL(str(library_path())))
    except OSError as error:
        missing = re.match(r"(\S+): cannot open shared object file", str(error))
        if missing and missing[1] != str(library_path()):
            package = "libstdc++6" if missing[1].startswith("libstdc++") else "libc6"
            raise RankError(
                f"{_LIBRARY} needs {missing[1]}, which this machine does not have; install it "
                f"(on Debian and Ubuntu: apt install {package})"
            ) from error
        raise RankError(f"{library_path()} does not load: {error}; {_REINSTALL}") from error
    except AttributeError as error:
        raise RankError(
            f"{library_path()} is from another version of onnxpar: {error}; {_REINSTALL}"
        ) from error


def _bound(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the signatures of the library's functions; returns the library. Errors:
    AttributeError if one is missing."""
    text, number = ctypes.c_char_p, ctypes.c_int
    signatures: dict[str, list[type]] = {
        "onnxpar_world_create": [text, number, number, text, text, ctypes.c_int64],
        "onnxpar_world_open_streams": [text, number],
        "onnxpar_world_destroy": [text],
        "onnxpar_world_abort": [text, text],
        "onnxpar_world_begin": [text],
        "onnxpar_world_shares_memory": [text, number, ctypes.POINTER(number)],
        "onnxpar_world_interrupt": [text, text],
        "onnxpar_world_renew": [text],
        "onnxpar_hub_start": [text, ctypes.POINTER(number), text],
        "onnxpar_world_failure": [text],
        "onnxpar_world_explain": [text, text],
        "onnxpar_hub_stop": [text, number],
    }
    for name, arguments in signatures.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, number
    wait, ring = loaded.onnxpar_bell_wait, loaded.onnxpar_bell_ring
    wait.argtypes = [ctypes.c_void_p, ctypes.c_uint32, number, ctypes.c_int64]
    ring.argtypes, ring.restype = [ctypes.c_void_p, ctypes.c_uint32], None
    loaded.onnxpar_last_error.restype = text
    loaded.onnxpar_reason.restype = text
    return loaded


def check(failed: int) -> None:
    """Raises a RankError, with the library's text, if a function of the library did not return
    0."""
    if failed:
        raise RankError(library().onnxpar_last_error().decode(errors="replace"))
