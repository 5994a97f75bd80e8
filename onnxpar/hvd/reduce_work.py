"""An allreduce as a function to call later: alone, or fused with others in one buffer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.hvd.compression import Compressor
from onnxpar.hvd.fusion import Bucket, fill, layout_of
from onnxpar.hvd.process_sets import Members
from onnxpar.hvd.reductions import ReduceOp, Reduction
from onnxpar.runtime.ranks import collectives

_PREFIX = "ALLREDUCE "


@dataclass(frozen=True)
class Reduce:
    """An allreduce that is not run yet; calling it runs it alone.

    wire    the array to send, compressed if the call requests it
    finish  converts the reduced `wire` to the result of the call
    """

    members: Members
    name: str
    wire: Array
    reduction: Reduction
    finish: Callable[[Array], Any]

    @staticmethod
    def of(
        members: Members,
        name: str,
        array: Array,
        compression: Compressor,
        reduction: Reduction,
        what: str,
    ) -> Reduce:
        """Returns the allreduce of `array`, which is compressed here. `what` names the call in
        errors."""
        wire, context = compression.compress(array)
        wire = collectives.as_exchangeable(wire, what)
        finish = partial(_decompressed, compression, context)
        return Reduce(members, name, wire, reduction, finish)

    def __call__(self) -> Any:
        return self.finish(self.reduction.all_reduce(self.members, self.wire, self.name))

    def __str__(self) -> str:
        """Returns the name, dtype, shape and reduction in words, equal on all ranks. From them,
        `parse` makes an allreduce of zeros that fits the allreduces of the other ranks."""
        how = self.reduction
        factors = [how.prescale_factor, how.postscale_factor]
        about = [self.name, self.wire.dtype.name, list(self.wire.shape), how.op.name, *factors]
        return _PREFIX + json.dumps(about)

    @staticmethod
    def parse(members: Members, text: str) -> Reduce | None:
        """Returns an allreduce of zeros with the name, dtype, shape and reduction in `text`, which
        `str(work)` returned for another Reduce. None if the text is that of another collective."""
        if not text.startswith(_PREFIX + "["):
            return None
        import ml_dtypes  # noqa: F401  (lets np.dtype know bfloat16)

        name, dtype, shape, op, before, after = json.loads(text.removeprefix(_PREFIX))
        wire = np.zeros(tuple(shape), np.dtype(dtype))
        return Reduce(members, name, wire, Reduction(ReduceOp[op], before, after), lambda x: x)


def _decompressed(compression: Compressor, context: Any, received: Array) -> Array:
    return compression.decompress(received, context)


def reduced_together(
    members: Members, works: Sequence[Reduce], threshold: float
) -> tuple[list[Array], int]:
    """Returns the reduced array of each work, and the number of buffers in which they were sent. A
    buffer holds arrays of one dtype and reduction, up to `threshold` bytes. The results have the
    bits of separate reductions."""
    layout = layout_of([work.name for work in works], [work.wire for work in works])
    keys = [(work.wire.dtype, work.reduction) for work in works]
    filled = fill(keys, [work.wire.nbytes for work in works], threshold)
    results: dict[int, Array] = {}
    for number, indices in enumerate(filled):
        first = works[indices[0]]
        bucket = Bucket(layout, indices, first.wire.dtype)
        names = [layout[index].name for index in indices]
        called = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        details = f"bucket {number + 1} of {len(filled)}"
        wires = [work.wire for work in works]
        bucket.reduce(members, wires, first.reduction, called, details)
        results.update(bucket.unpack())
    return [results[index] for index in range(len(works))], len(filled)
