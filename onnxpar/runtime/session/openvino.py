"""Ranks on OpenVINO's execution provider, from the package onnxruntime-openvino.

It compiles parts of a rank's graph. The nodes between these parts, and all collectives, run on the
CPU's provider, with tensors in the same memory (`device.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PROVIDER = "OpenVINOExecutionProvider"
_THREADS = "num_of_threads"
_IS_CYCLIC = "the graph is not acyclic"
_REMEDY = (
    f"; {PROVIDER} has cut the graph into parts that wait for each other: shard with another "
    "preset, or leave this provider out"
)


def with_threads(providers: Sequence[Any], threads: int) -> Sequence[Any]:
    """Returns the `providers` of a session, where OpenVINO's gets an option with the number of
    threads, unless it has one: by default, it takes all cores that the process may use."""
    return [_with_threads(provider, threads) for provider in providers]


def _with_threads(provider: Any, threads: int) -> Any:
    """Returns a provider as onnxruntime takes it, with the number of threads among its options if
    it is OpenVINO's."""
    name, options = (provider, {}) if isinstance(provider, str) else provider
    return (name, {_THREADS: str(threads), **options}) if name == PROVIDER else provider


def remedy(reason: str, providers: Sequence[Any]) -> str:
    """Returns what a user can do if onnxruntime does not load a model with these providers for the
    given reason, as a text to append to the reason; empty if there is nothing special to do."""
    is_used = any(PROVIDER in provider for provider in providers)
    return _REMEDY if is_used and _IS_CYCLIC in reason else ""
