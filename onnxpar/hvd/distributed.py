"""Data-parallel training: an optimizer that reduces gradients over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.hvd.broadcast_state import Parameters, Stateful, named_arrays
from onnxpar.hvd.communicator import current, size
from onnxpar.hvd.compression import Compression, Compressor
from onnxpar.hvd.fusion import default_threshold
from onnxpar.hvd.gradients import GradientReducer, Gradients, Groups, compression_of
from onnxpar.hvd.optimizers import fitted
from onnxpar.hvd.process_sets import ProcessSet, global_process_set
from onnxpar.hvd.reductions import Adasum, Average, ReduceOp, Reduction
from onnxpar.hvd.sparse import IndexedSlices
from onnxpar.hvd.two_bit import TwoBit
from onnxpar.lowering.compression import LEAST_BYTES, NONE, THRESHOLD, TWO_BIT


class SteppingOptimizer(Stateful, Protocol):
    """An optimizer: `hvd.SGD`, `hvd.Adam`, `hvd.AdamW`, or any object with their methods."""

    lr: float

    def step(self, params: Mapping[str, Array], grads: Mapping[str, Any]) -> Any: ...


def scale_learning_rate(lr: float) -> float:
    """Returns `lr` times the number of ranks, for a batch size that grows with the number of
    ranks."""
    return lr * size()


class DistributedOptimizer:
    """An optimizer whose steps use the gradients of all ranks, reduced by `op`.

    optimizer                  updates the parameters on each rank
    named_parameters           the parameters, by name or as pairs of name and array; then `step`
                                   takes gradients alone, and a parameter without a gradient has
                                   gradient 0
    compression                dtype in which gradients are sent
    backward_passes_per_step   number of calls of `step` per update: all add up gradients on this
                               rank, and the last reduces them and updates the parameters
    op                         Average, Sum, Min, Max, Product, or Adasum, which combines the
                               updates that the ranks would make rather than the gradients
    gradient_predivide_factor  divides gradients before they are added; the sum is divided by the
                               rest of the number of ranks
    groups, num_groups         gradients that are sent together: lists of parameters (arrays or
                               names), or a number of groups of about equal counts
    sparse_as_dense            reduces `IndexedSlices` as whole arrays, not as their rows
    process_set                ranks that reduce; the others update with their own gradients
    fusion_threshold           size in bytes of the buffers in which gradients are sent together; 0
                               sends each gradient separately; the default is the environment
                               variable HOROVOD_FUSION_THRESHOLD, or 64 MiB
    gc_type, threshold         compression as in the graph: "float16", "bfloat16" or "2bit" (sends
                               0, `threshold` or its negative, and keeps the remainder); gradients
                               of less than 1 kB are sent as they are
    """

    def __init__(
        self,
        optimizer: SteppingOptimizer,
        named_parameters: Parameters | None = None,
        compression: Compressor = Compression.none,
        backward_passes_per_step: int = 1,
        op: ReduceOp = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Groups = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
        *,
        fusion_threshold: int | None = None,
        gc_type: str = NONE,
        threshold: float = THRESHOLD,
    ) -> None:
        if gradient_predivide_factor != 1 and op is not Average:
            raise InputError("gradient_predivide_factor needs op=hvd.Average")
        self.optimizer = optimizer
        self.op = op
        self.process_set = process_set
        self._sums: dict[str, Any] = {}
        self._passes = self._passed = 0
        self.set_backward_passes_per_step(backward_passes_per_step)
        self._named = None
        if named_parameters is not None:
            self._named = named_arrays(named_parameters, "named_parameters")
        factor = gradient_predivide_factor
        self._reducer = GradientReducer(
            reduction=Reduction(op, 1 / factor, factor),
            process_set=process_set,
            compression=compression_of(compression, gc_type),
            threshold=default_threshold() if fusion_threshold is None else fusion_threshold,
            groups=(num_groups or None) if groups is None else groups,
            named=self._named or {},
            sparse_as_dense=sparse_as_dense,
            two_bit=TwoBit(threshold) if gc_type == TWO_BIT else None,
            least_bytes=0 if gc_type == NONE else LEAST_BYTES,
        )
        self._synchronizes = True

    @property
    def lr(self) -> float:
        """The learning rate of the inner optimizer."""
        return self.optimizer.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.optimizer.lr = value

    def step(self, params: Mapping[str, Any], grads: Gradients | None = None) -> bool:
        """Reduces the gradients over all ranks and updates the parameters in place. Returns True if
        it has updated, False if it only added up gradients on this rank
        (`backward_passes_per_step`). With `named_parameters`, `step(grads)` suffices.

        Errors: InputError if a gradient has no parameter or another shape; InputError, on every
        rank, if names, dtypes or shapes of the gradients differ between ranks; RankError as for
        `allreduce`.
        """
        params, grads = self._arguments(params, grads)
        grads = {name: fitted(name, params, grad) for name, grad in grads.items()}
        if self._synchronizes:
            if self._passed + 1 < self._passes:
                self._accumulate(grads)
                return False
            grads = self._with_earlier(grads)
        if self.op is Adasum and current().size > 1:
            self._combine_updates(params, grads)
        else:
            reduced = self.synchronize(grads) if self._synchronizes else grads
            self.optimizer.step(params, reduced)
        return True

    def synchronize(self, grads: Gradients) -> dict[str, Any]:
        """Returns the gradients by name, reduced over all ranks, without an update. Use it to clip
        gradients; then pass the result to `step` in a `skip_synchronize` block. The next call
        overwrites the returned arrays.

        With `backward_passes_per_step`, call `synchronize` instead of `step` in the last pass of an
        update: the result includes the gradients that earlier calls of `step` have added up.
        """
        grads = self._with_earlier(grads)
        if not self.process_set.included():
            return dict(grads)
        return self._reducer.reduce(grads)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Lets `step`, within the `with` block, update with its gradients as they are:
        `synchronize` has reduced them already. Errors: InputError for Adasum."""
        if self.op is Adasum:
            raise InputError("Adasum combines updates inside step, which cannot skip it")
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets the number of calls of `step` per update, and drops the gradients that earlier calls
        have added up."""
        if passes < 1:
            raise InputError(f"backward_passes_per_step={passes} must be at least 1")
        self._passes, self._passed, self._sums = passes, 0, {}

    def zero_grad(self) -> None:
        """Does nothing, because gradients are arguments of `step`. Errors: InputError between the
        passes of an update (`backward_passes_per_step`)."""
        if self._passed:
            raise InputError("zero_grad() between the passes of an update would lose gradients")

    def state_dict(self) -> Any:
        """Returns the state of the inner optimizer. Errors: InputError between the passes of an
        update (`backward_passes_per_step`)."""
        if self._passed:
            raise InputError(
                f"state_dict() between passes {self._passed} and {self._passed + 1} of "
                f"{self._passes} would lose the gradients added up so far; call it after `step` "
                "has returned True"
            )
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Restores a state that `state_dict` returned, of this object or of the inner optimizer.
        Drops gradients that earlier calls of `step` have added up."""
        self._sums, self._passed = {}, 0
        self.optimizer.load_state_dict(state)

    def _arguments(
        self, params: Mapping[str, Any], grads: Gradients | None
    ) -> tuple[Mapping[str, Array], Gradients]:
        """Returns the parameters and the gradients of a call of `step`: its two arguments, or, for
        `step(grads)`, the named parameters, and zeros for each parameter without a gradient."""
        if grads is not None:
            return params, grads
        if self._named is None:
            raise InputError("step(grads) needs named_parameters; otherwise call it with both")
        missing = {n: np.zeros_like(p) for n, p in self._named.items() if n not in params}
        return self._named, {**params, **missing}

    def _combine_updates(self, params: Mapping[str, Array], grads: Gradients) -> None:
        """Updates the parameters on this rank, then replaces the update of each parameter by the
        Adasum of all ranks' updates."""
        before = {name: params[name].copy() for name in grads}
        self.optimizer.step(params, grads)
        updates = {name: np.asarray(params[name] - old) for name, old in before.items()}
        for name, update in self.synchronize(updates).items():
            np.add(before[name], update, out=params[name])

    def _with_earlier(self, grads: Gradients) -> Gradients:
        """Returns the gradients plus the sum of the gradients of earlier passes of this update. The
        sum is then forgotten."""
        if not self._passed:
            return grads
        self._accumulate(grads)
        sums, self._sums, self._passed = self._sums, {}, 0
        return sums

    def _accumulate(self, grads: Gradients) -> None:
        """Adds gradients to the sums of this update on this rank, and counts the pass."""
        for name, grad in grads.items():
            sums = self._sums
            if isinstance(grad, IndexedSlices):
                sums[name] = grad.plus(sums.get(name))
            elif name in sums:
                sums[name] += grad
            else:
                sums[name] = np.array(grad)
        self._passed += 1
