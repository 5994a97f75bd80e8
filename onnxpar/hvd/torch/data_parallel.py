"""A DistributedDataParallel: a PyTorch module whose gradients are averages over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from onnxpar.base.errors import InputError
from onnxpar.hvd.communicator import current
from onnxpar.hvd.compression import Compression, Compressor
from onnxpar.hvd.gradients import GradientReducer
from onnxpar.hvd.process_sets import ProcessSet, global_process_set, members_of
from onnxpar.hvd.reductions import Average, Reduction
from onnxpar.hvd.torch.averaging import Averaging, trained_of
from onnxpar.hvd.torch.broadcast_state import share
from onnxpar.hvd.torch.buckets import Reducer
from onnxpar.hvd.torch.comm_hooks import Hook, HookReducers
from onnxpar.hvd.torch.joining import Join


class DistributedDataParallel(torch.nn.Module):  # type: ignore[misc]
    """A module whose gradients are averages over the ranks after each backward pass.

    module             the model of this rank, on the CPU; all ranks get the parameters and buffers
                       of the first rank
    bucket_cap_mb      size in MiB of the buckets, in which gradients are sent while the backward
                       pass goes on
    broadcast_buffers  all ranks get the buffers of the first rank after each step in training
    compression        dtype in which gradients are sent
    process_set        ranks that take part

    The other arguments are torch's, and do nothing: this class always behaves as they request. A
    parameter without a gradient on this rank counts as 0; if no rank has one, `grad` stays None. As
    in torch, the gradients of a forward pass inside `no_sync` are added to the gradients of the
    next backward pass outside of it, and averaged with these. Parameters may be frozen and unfrozen
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
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self._bytes = bucket_cap_mb * (1 << 20)
        self._broadcasts = broadcast_buffers
        self._compression = compression
        self._process_set = process_set
        self._synchronizes = True
        self._hook: tuple[Any, Hook] | None = None
        self._joined: Join | None = None
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
        """Runs the module, and prepares the backward pass from its outputs to average the
        gradients."""
        if not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)
        if self._synchronizes and not self._averaging.is_current():
            self._share()
            self._average()
        averaging = self._averaging
        averaging.active = self._synchronizes
        if averaging.active and self._joined is not None:
            self._joined.announce(averaging)
        if averaging.active and self.training and self._broadcasts:
            averaging.share_buffers()
            averaging.buffers_differ()
        outputs = self.module(*inputs, **kwargs)
        if averaging.active:
            averaging.follow(outputs)
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Returns a context for gradient accumulation: backward passes from forward passes inside
        the block add up gradients on this rank alone."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    @contextmanager
    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True
    ) -> Iterator[None]:
        """Returns a context for loops in which ranks have different numbers of steps. At the end of
        the block, a rank that has finished contributes zeros to the steps of the others, until all
        have finished. Then all ranks get the parameters and buffers of a rank with the last step.

        divide_by_initial_world_size  averages divide by the number of all ranks; otherwise by the
                                      number of ranks that have a step
        """
        if not enable:
            yield
            return
        joined = self._joined = Join(self._label, self._process_set, divide_by_initial_world_size)
        try:
            yield
            while joined.wait(self._averaging):
                if self.training and self._broadcasts:
                    self._averaging.buffers_differ()
                self._averaging.contribute_nothing()
            self._share(self._averaging.root)
        finally:
            self._joined = None
            self._averaging.root, self._averaging.factor = None, 1.0

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Lets `hook(state, bucket)` reduce each bucket instead of the average: the hook returns
        the reduced `bucket.buffer()`, or a torch.futures.Future of it. All ranks call it for the
        same buckets in the same order."""
        if self._compression is not Compression.none:
            raise InputError("register_comm_hook: a hook takes the place of compression")
        self._hook = state, hook
        self._average()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for copies and pickles, without the hooks: the copy registers hooks of
        its own."""
        return {name: value for name, value in vars(self).items() if name != "_averaging"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._label += ", copy"
        self._average()

    def _share(self, root: int | None = None) -> None:
        """Overwrites the parameters and buffers of all ranks with the values of the rank `root`, by
        default the first rank of the process set."""
        root = self._process_set.ranks[0] if root is None else root
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        share(tensors, root, self._process_set)

    def _average(self) -> None:
        """Registers the hooks that average the gradients of the parameters that require one now."""
        process_set, compression = self._process_set, self._compression
        reducer: Callable[[], Reducer]
        if self._hook is None:
            reducer = partial(
                GradientReducer, Reduction(Average), process_set, compression, float("inf")
            )
        else:
            reducer = HookReducers(*self._hook, self.module, process_set)
        self._averaging = Averaging(self._label, process_set, self.module, self._bytes, reducer)
