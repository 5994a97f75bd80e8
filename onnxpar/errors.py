"""Errors for users. A failed `assert` is our own bug; everything a user can cause is an
OnnxparError."""

import os
from collections.abc import Mapping

TRACEBACK = "ONNXPAR_TRACEBACK"
"""Set to 1 in the environment, it adds Python's traceback to an error, and the rest of a long
message."""


def wants_traceback() -> bool:
    """Whether the user asked for tracebacks."""
    return os.environ.get(TRACEBACK, "") not in ("", "0")


class OnnxparError(Exception):
    """Base of every error that a user can cause and remedy; the message names both."""


class ModelError(OnnxparError):
    """The model file cannot be read, or breaks the ONNX standard."""


class DamagedError(ModelError):
    """A checkpoint that is not as it was written."""


class NewerFormatError(ModelError):
    """A checkpoint that a newer onnxpar wrote."""


class StrategyError(OnnxparError):
    """A strategy, mesh or preset that this model cannot meet."""


class SizeError(StrategyError):
    """A strategy that the sizes of a model do not allow; with other sizes, it may."""


class OpenSizesError(StrategyError):
    """Layouts that open sizes do not allow. `nodes` split what cannot be told before a run: factors
    of their rules, where it is known which."""

    def __init__(self, message: str, nodes: Mapping[str, frozenset[str]] | None = None) -> None:
        super().__init__(message)
        self.nodes = dict(nodes or {})


class InputError(OnnxparError):
    """A missing or unknown feed, or one of the wrong shape or dtype."""


class RankError(OnnxparError):
    """A rank died, stopped, disagreed with others or did not start, which ends a session."""


class RunError(RankError):
    """A run that failed on its feeds. The ranks go on: states are as before, runs may follow."""


class DivergenceError(OnnxparError):
    """A training run whose loss is no number any more."""


class PassError(OnnxparError):
    """A pass that failed: a bug of the pass, or of the graph that a pass before it has left."""
