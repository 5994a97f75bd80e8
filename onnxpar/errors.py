"""Errors for users. A failed `assert` is our own bug; everything a user can cause is an
OnnxparError."""


class OnnxparError(Exception):
    """Base of every error that a user can cause and remedy; the message names both."""


class ModelError(OnnxparError):
    """The model file cannot be read, or breaks the ONNX standard."""


class StrategyError(OnnxparError):
    """A strategy, mesh or preset that this model cannot meet."""


class InputError(OnnxparError):
    """A missing or unknown feed, or one of the wrong shape or dtype."""


class RankError(OnnxparError):
    """A rank died, stopped, or failed in a run."""


class DivergenceError(OnnxparError):
    """A training run whose loss is no number any more."""


class PassError(OnnxparError):
    """A pass that failed: a bug of the pass, or of the graph that a pass before it has left."""
