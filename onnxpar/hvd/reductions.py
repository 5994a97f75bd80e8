"""The reductions over ranks."""

from __future__ import annotations

from enum import Enum

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.errors import InputError


class ReduceOp(Enum):
    """A reduction over ranks; the value is its name in the native library."""

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
    """True if a dtype is a NumPy float or bfloat16."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


def check_reduction(op: ReduceOp, array: Array, what: str) -> None:
    """Errors: InputError if `op` is not a reduction, or cannot reduce the array's dtype."""
    if not isinstance(op, ReduceOp):
        raise InputError(f"{what}: op={op!r} is not a reduction; use hvd.Average, hvd.Sum, ...")
    if op is Average and not is_float(array.dtype):
        raise InputError(
            f"{what}: an average of {array.dtype} values is not {array.dtype}; use op=hvd.Sum, or "
            "convert the array to a float dtype first"
        )
