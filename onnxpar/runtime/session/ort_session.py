"""Loads an ONNX model in onnxruntime."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import onnxruntime as ort

_PROPAGATION = "QDQPropagationTransformer"
_MISTYPED = "does not match y_zero_point type"
"""Part of the error of onnxruntime 1.32 if this optimizer, at opset 21 or later, moves the
quantization of int8 past a Transpose or Reshape, and gives it a zero point of uint8."""


def load_ort_session(
    model: str | os.PathLike[str] | bytes,
    options: ort.SessionOptions,
    disabled: Sequence[str] = (),
    **how: Any,
) -> ort.InferenceSession:
    """Returns onnxruntime's session of a model. If the model does not load because of the optimizer
    QDQPropagationTransformer, switches that off, too. Errors: onnxruntime's.

    disabled  optimizers to switch off
    how       further arguments of `onnxruntime.InferenceSession`
    """
    try:
        return ort.InferenceSession(model, options, disabled_optimizers=[*disabled], **how)
    except Exception as error:
        if _MISTYPED not in str(error) or _PROPAGATION in disabled:
            raise
    return load_ort_session(model, options, [*disabled, _PROPAGATION], **how)
