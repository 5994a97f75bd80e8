"""How the ranks' values become one."""

from __future__ import annotations

from enum import Enum

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.errors import InputError


class ReduceOp(Enum):
    """A reduction; the value is its name in the native library."""

    AVERAGE = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "prod"


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


def is_float(dtype: np.dtype[np.generic]) -> bool:
    """Whether it is one of NumPy's or ml_dtypes' floats."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


def check_reduction(op: ReduceOp, array: Array, what: str) -> None:
    """Errors: InputError where `op` is none, or would have to round."""
    if not isinstance(op, ReduceOp):
        raise InputError(f"{what}: op={op!r} is no reduction; use hvd.Average, hvd.Sum, ...")
    if op is Average and not is_float(array.dtype):
        raise InputError(
            f"{what}: an average of {array.dtype} is no {array.dtype}; "
            "use op=hvd.Sum, or convert it to a float dtype first"
        )
