"""Custom-op libraries that a user named, and options of onnxruntime sessions that register them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import onnxruntime as ort

from onnxpar.base.errors import InputError

_libraries: dict[str, None] = {}
HELP = (
    "a custom-op library for onnxruntime, such as libcustom.so; sharded folders do not name "
    "libraries, so each command that runs the model needs this option"
)
"""The help text of the option --library."""
_REMEDY = "; give the custom-op library that has it: --library FILE (in Python, `libraries`)"


def use_libraries(files: Iterable[str | os.PathLike[str]]) -> None:
    """Registers custom-op libraries in all sessions that this process, and ranks that it starts,
    create from now on. Errors: InputError for a file that is no custom-op library."""
    for file in files:
        path = os.path.abspath(file)
        if path in _libraries:
            continue
        try:
            ort.SessionOptions().register_custom_ops_library(path)
        except Exception as error:  # onnxruntime's errors have no other base
            reason = " ".join(str(error).split())
            raise InputError(
                f"--library {os.fspath(file)}: onnxruntime does not load it: {reason}; give the "
                "file of a custom-op library, such as libcustom.so"
            ) from error
        _libraries[path] = None


def libraries() -> Sequence[str]:
    """The absolute paths of all libraries that `use_libraries` registered, in that order."""
    return tuple(_libraries)


def remedy(reason: str) -> str:
    """Returns text to append to an error message: for onnxruntime's error that an op is not
    registered, `; give the custom-op library ...`; for any other error, an empty string."""
    return _REMEDY if "is not a registered function/op" in reason else ""


def quiet_options(threads: int = 0, optimized: bool = True) -> ort.SessionOptions:
    """Returns options of a session that prints no warnings and has all libraries in use registered.

    threads    the number of threads; 0 means onnxruntime's default
    optimized  False: onnxruntime runs the graph as written, without graph optimizations
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors are also raised
    options.intra_op_num_threads = threads
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    for path in _libraries:
        options.register_custom_ops_library(path)
    return options
