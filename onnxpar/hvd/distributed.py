"""Data-parallel training: an optimizer that reduces gradients over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.errors import InputError
from onnxpar.hvd.communicator import current, size
from onnxpar.hvd.compression import Compression, Compressor
from onnxpar.hvd.fusion import FUSION_THRESHOLD, Fusion, layout_of
from onnxpar.hvd.objects import Stateful
from onnxpar.hvd.optimizers import check_gradient
from onnxpar.hvd.reductions import Average, ReduceOp, check_reduction
from onnxpar.runtime import collectives


class SteppingOptimizer(Stateful, Protocol):
    """An optimizer: `hvd.SGD`, `hvd.Adam`, `hvd.AdamW`, or any object with their methods."""

    lr: float

    def step(self, params: Mapping[str, Array], grads: Mapping[str, Array]) -> Any: ...


def scale_learning_rate(lr: float) -> float:
    """Returns `lr` times the number of ranks, for a batch size that grows with the number of
    ranks."""
    return lr * size()


class DistributedOptimizer:
    """An optimizer whose steps use the gradients of all ranks, reduced by `op`.

    optimizer                 updates the parameters on each rank
    compression               dtype in which gradients are sent
    fusion_threshold          size in bytes of the buffers in which gradients are sent together; 0
                              sends each gradient separately
    backward_passes_per_step  number of calls of `step` per update: all add up gradients on this
                              rank, and the last reduces them and updates the parameters
    """

    def __init__(
        self,
        optimizer: SteppingOptimizer,
        compression: Compressor = Compression.none,
        op: ReduceOp = Average,
        fusion_threshold: int = FUSION_THRESHOLD,
        backward_passes_per_step: int = 1,
    ) -> None:
        if backward_passes_per_step < 1 or fusion_threshold < 0:
            raise InputError(
                f"backward_passes_per_step={backward_passes_per_step} must be at least 1, and "
                f"fusion_threshold={fusion_threshold} must be at least 0"
            )
        self.optimizer = optimizer
        self._compression = compression
        self._op = op
        self._threshold = fusion_threshold
        self._passes = backward_passes_per_step
        self._passed = 0
        self._sums: dict[str, Array] = {}
        self._fusion: Fusion | None = None

    @property
    def lr(self) -> float:
        """The learning rate of the inner optimizer."""
        return self.optimizer.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.optimizer.lr = value

    def step(self, params: Mapping[str, Array], grads: Mapping[str, Array]) -> bool:
        """Reduces the gradients over all ranks and updates the parameters in place. Returns False
        if it only added up gradients on this rank.

        Errors: InputError if a gradient has no parameter or another shape; InputError, on every
        rank, if names, dtypes or shapes of the gradients differ between ranks; RankError as for
        `allreduce`.
        """
        for name, grad in grads.items():
            check_gradient(name, params, grad)
        if self._passes > 1:
            self._accumulate(grads)
            if self._passed < self._passes:
                return False
            grads, self._sums, self._passed = self._sums, {}, 0
        self.optimizer.step(params, self.synchronize(grads))
        return True

    def synchronize(self, grads: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the gradients, reduced over all ranks, without an update. Use it to clip
        gradients before you call `optimizer.optimizer.step` yourself. The next call overwrites the
        returned arrays."""
        here, names = current(), sorted(grads)
        arrays = [collectives.as_exchangeable(grads[n], f"the gradient of {n!r}") for n in names]
        for name, array in zip(names, arrays, strict=True):
            check_reduction(self._op, array, f"the gradient of {name!r}")
        layout = layout_of(names, arrays)
        if self._fusion is None or self._fusion.layout != layout:
            self._fusion = Fusion(layout, self._compression, self._threshold)
        fusion = self._fusion
        reduced = here.ordered(lambda: fusion.reduce(here, arrays, self._op, "gradients"))
        return dict(zip(names, reduced, strict=True))

    def state_dict(self) -> Any:
        """Returns the state of the inner optimizer. Errors: InputError between the passes of an
        update."""
        if self._passed:
            raise InputError(
                f"state_dict() between passes {self._passed} and {self._passed + 1} of "
                f"{self._passes} would lose the gradients added up so far; call it after `step` "
                "has returned True"
            )
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Restores a state that `state_dict`, of this object or of the inner optimizer,
        returned."""
        self._sums, self._passed = {}, 0
        self.optimizer.load_state_dict(state)

    def _accumulate(self, grads: Mapping[str, Array]) -> None:
        for name, grad in grads.items():
            if name in self._sums:
                self._sums[name] += grad
            else:
                self._sums[name] = np.array(grad)
        self._passed += 1
