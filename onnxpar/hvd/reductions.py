"""The reductions over ranks: Average, Sum, Min, Max, Product and Adasum, with factors before and
after."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.hvd.adasum import adasum, check_ranks
from onnxpar.hvd.process_sets import Members
from onnxpar.runtime.ranks import collectives


class ReduceOp(Enum):
    """A reduction over ranks; the value is its name in the native library, or, for Adasum, which is
    computed in Python, a name that the library does not know."""

    AVERAGE = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "prod"
    ADASUM = "adasum"


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
Adasum = ReduceOp.ADASUM


def op_of(op: ReduceOp | None, average: bool | None, what: str) -> ReduceOp:
    """Returns the reduction that Horovod's argument `op` requests, or the deprecated `average`;
    Average by default. Errors: InputError if both are given."""
    if average is None:
        return Average if op is None else op
    if not isinstance(average, bool | np.bool_):
        raise InputError(f"{what}: average={average} must be True or False; give op={average}")
    if op is not None:
        raise InputError(f"{what}: op replaces average; give only one of them")
    warnings.warn("average is deprecated; use op", DeprecationWarning, stacklevel=4)
    return Average if average else Sum


def is_float(dtype: np.dtype[np.generic]) -> bool:
    """True if a dtype is a NumPy float (16 to 64 bits) or bfloat16."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


@dataclass(frozen=True)
class Reduction:
    """A reduction whose inputs are multiplied by `prescale_factor`, and whose result by
    `postscale_factor`. Averages and products of integers are rounded towards 0."""

    op: ReduceOp
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0

    def check(self, dtype: np.dtype[Any], size: int, what: str) -> None:
        """Errors: InputError if `op` is no ReduceOp, or cannot reduce arrays of `dtype` over `size`
        ranks. `what` names the call in errors."""
        if not isinstance(self.op, ReduceOp):
            raise InputError(
                f"{what}: op={self.op!r} is not a reduction; use hvd.Average, hvd.Sum, ..."
            )
        scales = self.prescale_factor != 1 or self.postscale_factor != 1
        if dtype.kind == "b" and (self.op is Average or scales):
            raise InputError(f"{what}: an array of bool cannot be averaged or scaled")
        if self.op is Adasum:
            check_ranks(size, what)
            if not is_float(dtype):
                raise InputError(f"{what}: Adasum needs an array of floats, not of {dtype}")

    def all_reduce(
        self,
        members: Members,
        x: Array,
        name: str = "",
        details: str = "",
        out: Array | None = None,
        sizes: Sequence[int] | None = None,
    ) -> Array:
        """Returns the reduction of `x` over the members, in `out` if given; `out` may be `x`.

        name     name of the collective, for errors and traces
        details  a text that must be equal on all ranks
        sizes    the elements of each gradient in `x`, which Adasum combines separately
        """
        x, details = scaled(x, self.prescale_factor), self._details(x.dtype, details)
        if self.op is Adasum:
            flat = adasum(members, x.reshape(-1), sizes or [x.size], name, details)
            result = flat.reshape(x.shape)
        else:
            native = self._native(x.dtype)
            result = collectives.all_reduce(members.world, x, native, name, details, out)
        result = self._finished(result, members.size)
        if out is None or result is out:
            return result
        np.copyto(out, result)
        return out

    def reduce_scatter(self, members: Members, x: Array, name: str = "") -> Array:
        """Returns this rank's rows of the reduction of `x` over the members."""
        x, details = scaled(x, self.prescale_factor), self._details(x.dtype, "")
        native = self._native(x.dtype)
        rows = collectives.reduce_scatter(members.world, x, native, name, details)
        return self._finished(rows, members.size)

    def _native(self, dtype: np.dtype[Any]) -> str:
        """Returns the reduction that the native library runs; the average of integers is a sum,
        which `_finished` divides."""
        return "sum" if self.op is Average and not is_float(dtype) else self.op.value

    def _finished(self, result: Array, size: int) -> Array:
        """Returns what remains to do after the native reduction over `size` ranks: divides a sum of
        integers for Average, rounding towards 0, and applies `postscale_factor`."""
        if self.op is Average and not is_float(result.dtype):
            floor = result // size
            result = floor + ((floor < 0) & (floor * size != result)).astype(result.dtype)
        return scaled(result, self.postscale_factor)

    def _details(self, dtype: np.dtype[Any], details: str) -> str:
        """Returns `details`, followed by what the ranks must agree on beside the native reduction:
        the reduction, if it has another name, and the factors."""
        parts = [details] if details else []
        if self._native(dtype) != self.op.value or self.op is Adasum:
            parts.append(f"op={self.op.name.capitalize()}")
        for name in ("prescale_factor", "postscale_factor"):
            if getattr(self, name) != 1:
                parts.append(f"{name}={getattr(self, name)}")
        return ", ".join(parts)


def scaled(x: Array, factor: float) -> Array:
    """Returns `x` times `factor`, in the dtype of `x`. 16-bit floats are multiplied in float32;
    integers in float64, then rounded towards 0."""
    if factor == 1:
        return x
    if not is_float(x.dtype):
        return np.trunc(x * np.float64(factor)).astype(x.dtype)
    wide = np.promote_types(np.float32, x.dtype) if x.dtype.kind == "f" else np.dtype(np.float32)
    product = x.astype(wide, copy=False) * wide.type(factor)
    return np.asarray(product).astype(x.dtype, copy=False)
