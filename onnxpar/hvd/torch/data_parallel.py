"""A module whose gradients are averages over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from onnxpar.errors import InputError
from onnxpar.hvd.communicator import current
from onnxpar.hvd.compression import Compression, Compressor
from onnxpar.hvd.gradients import GradientReducer
from onnxpar.hvd.process_sets import ProcessSet, global_process_set, members_of
from onnxpar.hvd.reductions import Average, Reduction
from onnxpar.hvd.torch.averaging import Averaging, trained_of
from onnxpar.hvd.torch.states import share


class DistributedDataParallel(torch.nn.Module):  # type: ignore[misc]
    """A module whose gradients are averages over the ranks after each backward pass.

    module             the model of this rank, on the CPU; all ranks get the parameters and buffers
                       of the first rank
    bucket_cap_mb      size in MiB of the buckets, in which gradients are sent while the backward
                       pass goes on
    broadcast_buffers  all ranks get the buffers of the first rank after each step in training
    compression        dtype in which gradients are sent
    process_set        ranks that take part

    A parameter without a gradient on this rank counts as 0; where no rank has one, `grad` stays
    None. As in torch, the gradients of a forward pass inside `no_sync` are added up, and averaged
    with those of the next backward pass outside of it. Parameters may be frozen and unfrozen
    between steps, on all ranks alike. After an exception in a backward pass on all ranks, go on
    with `zero_grad`.
    """

    def __init__(
        self,
        module: Any,
        *,
        bucket_cap_mb: float = 25,
        broadcast_buffers: bool = True,
        compression: Compressor = Compression.none,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__()
        self.module = module
        self._bytes = bucket_cap_mb * (1 << 20)
        self._broadcasts = broadcast_buffers
        self._compression = compression
        self._process_set = process_set
        self._synchronizes = True
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.device.type != "cpu":
                raise InputError(f"DistributedDataParallel: a tensor is on {tensor.device}")
        if not trained_of(module):
            raise InputError("DistributedDataParallel: no parameter requires a gradient")
        among = f"module over ranks {list(members_of(process_set, 'the module').ranks)}"
        counts = current().counts
        counts[among] += 1
        self._label = f"{among}, number {counts[among]}"
        self._share()
        self._average()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        if not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)
        if self._synchronizes and not self._averaging.is_current():
            self._share()
            self._average()
        averaging = self._averaging
        averaging.active = self._synchronizes
        if averaging.active and self.training and self._broadcasts:
            averaging.share_buffers()
            averaging.buffers_differ()
        outputs = self.module(*inputs, **kwargs)
        if averaging.active:
            averaging.follow(outputs)
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets the backward passes of forward passes inside the block add up gradients on this rank
        alone."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    def __getstate__(self) -> dict[str, Any]:
        """Returns what copies and files keep, which have hooks of their own."""
        return {name: value for name, value in vars(self).items() if name != "_averaging"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._label += ", copy"
        self._average()

    def _share(self) -> None:
        """Gives all ranks the parameters and buffers of the first rank."""
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        share(tensors, self._process_set.ranks[0], self._process_set)

    def _average(self) -> None:
        """Averages the gradients of the parameters that require them now."""
        self._averaging = Averaging(self._label, self.module, self._bytes, self._reducer())

    def _reducer(self) -> Any:
        """Returns what makes the reducers of buckets."""
        compression, process_set = self._compression, self._process_set
        return lambda: GradientReducer(Reduction(Average), process_set, compression, float("inf"))
