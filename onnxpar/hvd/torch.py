"""Data parallelism for loops of PyTorch (`pip install 'onnxpar[torch]'`): onnxpar's transport
averages gradients over the ranks during the backward pass.

    hvd.init()
    model = DistributedDataParallel(module)
    loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))
    ...
    loss.backward()  # param.grad is the average
    optimizer.step()

Tensors are on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.errors import InputError
from onnxpar.hvd.allreduce import grouped_allreduce_async
from onnxpar.hvd.arrays import broadcast_
from onnxpar.hvd.communicator import rank as own_rank
from onnxpar.hvd.communicator import size
from onnxpar.hvd.compression import Compression, Compressor
from onnxpar.hvd.handles import Handle
from onnxpar.hvd.process_sets import ProcessSet, global_process_set
from onnxpar.hvd.reductions import Average

try:
    import torch
    from torch.utils.data import DistributedSampler as _Sampler
except ImportError as error:
    raise ImportError("onnxpar.hvd.torch needs PyTorch: pip install 'onnxpar[torch]'") from error


def DistributedSampler(
    dataset: Any,
    num_replicas: int | None = None,
    rank: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
) -> Any:
    """Returns torch.utils.data.DistributedSampler, by default for the ranks of hvd."""
    ranks = size() if num_replicas is None else num_replicas
    return _Sampler(dataset, ranks, own_rank() if rank is None else rank, shuffle, seed, drop_last)


@dataclass
class _Bucket:
    """Parameters whose gradients are sent together."""

    parameters: list[Any]
    missing: int = 0
    contexts: list[Any] = field(default_factory=list)
    handle: Handle[list[Array]] | None = None


class DistributedDataParallel(torch.nn.Module):  # type: ignore[misc]
    """A module whose gradients are averages over the ranks after each backward pass.

    module             the model of this rank, on the CPU; all ranks get the parameters and buffers
                       of the first rank
    bucket_cap_mb      size in MiB of the buckets, in which gradients are sent while the backward
                       pass goes on
    broadcast_buffers  all ranks get the buffers of the first rank before each forward pass in
                       training
    compression        dtype in which gradients are sent
    process_set        ranks that take part

    A parameter without a gradient on this rank counts as 0. As in torch, gradients that have been
    added up inside `no_sync` are averaged by the next backward pass outside of it.
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
        self._compression = compression
        self._set = process_set
        self._root = process_set.ranks[0]
        self._broadcasts = broadcast_buffers
        self._synchronizes = True
        self._queued = False
        self._started = 0
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.device.type != "cpu":
                raise InputError(f"DistributedDataParallel: a tensor is on {tensor.device}")
        self._broadcast((*module.parameters(), *module.buffers()))
        trained = [p for p in module.parameters() if p.requires_grad]
        if not trained:
            raise InputError("DistributedDataParallel: no parameter requires a gradient")
        self._buckets = _filled(list(reversed(trained)), bucket_cap_mb * (1 << 20))
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._hook(bucket))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        if self._broadcasts and self._synchronizes and self.training:
            self._broadcast(tuple(self.module.buffers()))
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets backward passes inside the block add up gradients on this rank alone."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    def _broadcast(self, tensors: Sequence[Any]) -> None:
        for index, tensor in enumerate(tensors):
            broadcast_(array_of(tensor), self._root, f"tensor {index}", self._set)

    def _hook(self, bucket: _Bucket) -> Any:
        def ready(_: Any) -> None:
            if not self._synchronizes:
                return
            if not self._queued:
                self._queued, self._started = True, 0
                for each in self._buckets:
                    each.missing = len(each.parameters)
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)
            bucket.missing -= 1
            while self._started < len(self._buckets):
                if self._buckets[self._started].missing:
                    break
                self._start()

        return ready

    def _start(self) -> None:
        """Starts the next bucket; all ranks start them in the same order."""
        number, self._started = self._started, self._started + 1
        bucket, wires = self._buckets[number], []
        bucket.contexts = []
        for parameter in bucket.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            wire, context = self._compression.compress(array_of(parameter.grad))
            wires.append(wire)
            bucket.contexts.append(context)
        name = f"bucket {number}"
        bucket.handle = grouped_allreduce_async(wires, name=name, op=Average, process_set=self._set)

    def _finish(self) -> None:
        """Ends the backward pass: waits for the averages, and makes them the gradients."""
        self._queued = False
        while self._started < len(self._buckets):
            self._start()
        for bucket in self._buckets:
            assert bucket.handle is not None
            results = bucket.handle()
            for parameter, result, context in zip(
                bucket.parameters, results, bucket.contexts, strict=True
            ):
                np.copyto(array_of(parameter.grad), self._compression.decompress(result, context))
            bucket.handle = None


def array_of(tensor: Any) -> Array:
    """Returns the memory of a tensor as an array. Errors: InputError for a sparse tensor, or one
    that is not in C order."""
    if tensor.is_sparse or not tensor.is_contiguous():
        raise InputError("DistributedDataParallel needs dense, contiguous tensors")
    plain = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        found: Array = plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return found
    array: Array = plain.numpy()
    return array


def _filled(parameters: Sequence[Any], limit: float) -> list[_Bucket]:
    """Returns buckets of up to `limit` bytes, or of one larger parameter, in order."""
    buckets: list[_Bucket] = []
    used = 0.0
    for parameter in parameters:
        bytes_ = parameter.numel() * parameter.element_size()
        if not buckets or used + bytes_ > limit:
            buckets.append(_Bucket([]))
            used = 0.0
        buckets[-1].parameters.append(parameter)
        used += bytes_
    return buckets
