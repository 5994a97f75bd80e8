"""An allreduce as a piece of work that can run alone, or fused with others."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.hvd.process_sets import Members
from onnxpar.hvd.reductions import ReduceOp, Reduction

_PREFIX = "ALLREDUCE "


@dataclass(frozen=True)
class Reduce:
    """The reduction of `wire`, the array to send; `finish` turns the result into that of the
    call."""

    members: Members
    name: str
    wire: Array
    reduction: Reduction
    finish: Callable[[Array], Any]

    def __call__(self) -> Any:
        return self.finish(self.reduction.all_reduce(self.members, self.wire, self.name))

    def __str__(self) -> str:
        """A text from which `parse` makes the same reduction of zeros."""
        how = self.reduction
        factors = [how.prescale_factor, how.postscale_factor]
        about = [self.name, self.wire.dtype.name, list(self.wire.shape), how.op.name, *factors]
        return _PREFIX + json.dumps(about)

    @staticmethod
    def parse(members: Members, text: str) -> Reduce | None:
        """Returns the reduction of zeros that a text describes; None if it is of another
        collective."""
        if not text.startswith(_PREFIX + "["):
            return None
        import ml_dtypes  # noqa: F401  (lets np.dtype know bfloat16)

        name, dtype, shape, op, before, after = json.loads(text.removeprefix(_PREFIX))
        wire = np.zeros(tuple(shape), np.dtype(dtype))
        return Reduce(members, name, wire, Reduction(ReduceOp[op], before, after), lambda x: x)


def reduced_together(
    members: Members, works: Sequence[Reduce], threshold: float
) -> tuple[list[Array], int]:
    """Returns the reductions of arrays in buffers of one dtype and reduction, of up to `threshold`
    bytes, and the number of buffers. The results have the same bits as those of each alone."""
    buckets: list[list[int]] = []
    open_: dict[Any, tuple[list[int], int]] = {}
    for index, work in enumerate(works):
        key = (work.wire.dtype, work.reduction)
        bucket, used = open_.get(key, ([], 0))
        if not bucket or used + work.wire.nbytes > threshold:
            bucket, used = [], 0
            buckets.append(bucket)
        bucket.append(index)
        open_[key] = bucket, used + work.wire.nbytes
    results: dict[int, Array] = {}
    for number, bucket in enumerate(buckets):
        wires, names = [works[i].wire for i in bucket], [works[i].name for i in bucket]
        here, sizes = members.communicator, [wire.size for wire in wires]
        with here.activity(names, "MEMCPY_IN_FUSION_BUFFER"):
            buffer = np.concatenate([wire.reshape(-1) for wire in wires])
        with here.activity(names, "GLOO_ALLREDUCE"):
            called = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            details = f"bucket {number + 1} of {len(buckets)}"
            reduction = works[bucket[0]].reduction
            reduction.all_reduce(members, buffer, called, details, buffer, sizes)
        parts = np.split(buffer, np.cumsum(sizes)[:-1])
        for index, wire, part in zip(bucket, wires, parts, strict=True):
            results[index] = part.reshape(wire.shape)
    return [results[index] for index in range(len(works))], len(buckets)
