"""The norm over all gradients together, and gradients scaled so that it is at most a limit."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxpar.training.gradients.value import Value
from onnxpar.training.rewrite import add_output
from onnxpar.training.step_state import StepState


def add_norm(to: StepState) -> None:
    """Computes the sum of the squares of all gradients."""
    kind = to.scalar_dtype
    squares = {n: reduce_to_number(g, "ReduceSumSquare", kind) for n, g in to.gradients.items()}
    to.total = to.request.program.totals(to.builder, squares)[1].sum()


def clip(to: StepState) -> None:
    """Scales all gradients so that the norm over all of them together is at most `clip_norm`."""
    norm, most = to.total.sqrt(), to.request.clip_norm
    assert most is not None
    factor = (most / (norm + 1e-6)).op("Min", 1.0)
    to.gradients = {n: g * factor.cast(g.dtype) for n, g in to.gradients.items()}
    add_output(to.graph, norm, "gradient_norm")
    to.step.metrics.append("gradient_norm")


def reduce_to_number(x: Value, op: str, dtype: np.dtype[Any]) -> Value:
    """Returns the number to which `op` reduces a tensor."""
    x = x.wide() if x.rank else x.wide().reshape([1])
    return x.op(op, np.arange(x.rank), keepdims=0).cast(dtype)
