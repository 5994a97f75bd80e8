"""Errors for users. A failed `assert` is a bug of onnxpar; every error that a user can cause is an
OnnxparError."""

import os
from collections.abc import Mapping

TRACEBACK = "ONNXPAR_TRACEBACK"
"""The environment variable that, if set to 1, makes commands print Python's traceback with an
error, and long messages in full."""


def wants_traceback() -> bool:
    """True if the user asked for tracebacks."""
    return os.environ.get(TRACEBACK, "") not in ("", "0")


class OnnxparError(Exception):
    """Base of all errors that onnxpar raises on purpose. The message names the cause and, if there
    is one, the remedy. `is_common` is True for an error that every rank raises with the same text.
    """

    is_common = False


class ModelError(OnnxparError):
    """A model file that cannot be read, or violates the ONNX standard."""


class DamagedError(ModelError):
    """A checkpoint whose files have changed since they were written."""


class NewerFormatError(ModelError):
    """A checkpoint that a newer onnxpar wrote."""


class StrategyError(OnnxparError):
    """A strategy, mesh or preset that is invalid, or impossible for the model."""


class SizeError(StrategyError):
    """A strategy that is impossible for the size of a dimension (`size`), but may be possible at
    another size: 6 heads cannot be split over 4 ranks, 8 can."""

    def __init__(self, message: str, size: int) -> None:
        super().__init__(message)
        self.size = size


class OpenSizesError(StrategyError):
    """Layouts that are impossible because sizes of the model are open (symbols). `nodes` maps names
    of nodes to the factors that must stay whole in them, as far as they are known; the planner then
    tries again."""

    def __init__(self, message: str, nodes: Mapping[str, frozenset[str]] | None = None) -> None:
        super().__init__(message)
        self.nodes = dict(nodes or {})


class InputError(OnnxparError):
    """An invalid input: a missing or unknown feed, a wrong shape or dtype, an unusable path."""


class RankError(OnnxparError):
    """A rank that died, stopped, disagreed with other ranks or did not start. This error ends the
    session. `lost` are the ranks whose processes died or do not answer, as far as known; a session
    that starts new processes in their place may succeed."""

    lost: tuple[int, ...] = ()


class LaunchError(RankError):
    """A failure of ranks that a launcher has started: no session can start again in this
    process."""


class RunError(RankError):
    """A run that failed because of its feeds. The session stays usable; its states (caches,
    parameters) are as before the run."""


class DivergenceError(OnnxparError):
    """A training run in which a loss is not finite, or no step could be applied."""


class StoppedError(OnnxparError):
    """A training run that was asked to end, and that has saved a checkpoint."""


class UnprovedError(OnnxparError):
    """A sharded model that is not shown to compute the model it was made from."""


class PassError(OnnxparError):
    """A pass that failed: a bug in that pass, or in an earlier pass that left a wrong graph."""
