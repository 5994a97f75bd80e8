"""Batch normalization with the mean and variance of all ranks' batches together."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from onnxpar.base.errors import InputError
from onnxpar.hvd.process_sets import ProcessSet, global_process_set
from onnxpar.hvd.reductions import Sum
from onnxpar.hvd.torch.reductions import allreduce


class SyncBatchNorm(_BatchNorm):  # type: ignore[misc]
    """Normalizes like a torch.nn.BatchNorm on the concatenated batches of all ranks, whose sizes
    may differ. The arguments are those of torch.nn.BatchNorm."""

    process_set: ProcessSet = global_process_set

    @classmethod
    def convert_sync_batchnorm(
        cls, module: Any, process_set: ProcessSet = global_process_set
    ) -> Any:
        """Returns the module with each BatchNorm in it replaced by a SyncBatchNorm of the same
        parameters and statistics. A module that is a BatchNorm itself is returned as a new
        SyncBatchNorm."""
        new: Any = module
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
            new = cls.__new__(cls)
            new.__dict__.update(vars(module))
            new.process_set = process_set
        for name, child in module.named_children():
            new.add_module(name, cls.convert_sync_batchnorm(child, process_set))
        return new

    def forward(self, input: Any) -> Any:
        """Returns the normalized input, of shape [batch, channels, ...]. In training, all ranks
        call `forward` together, and the running statistics change."""
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        others = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        own = x.new_tensor([x.numel() // x.shape[1]])
        total = self._sum(torch.cat([x.sum(others), own]), "sum")
        count, mean = int(total[-1]), total[:-1] / total[-1].detach()
        if count < 2:
            raise InputError(f"SyncBatchNorm needs 2 values per channel on all ranks, not {count}")
        centered = x - mean.reshape(shape)
        variance = self._sum(centered.square().sum(others), "squares") / count
        if self.training and self.running_mean is not None:
            self._track(mean.detach(), variance.detach() * (count / (count - 1)))
        normal = centered * torch.rsqrt(variance + self.eps).reshape(shape)
        if self.weight is not None:
            normal = normal * self.weight.reshape(shape) + self.bias.reshape(shape)
        return normal.to(input.dtype)

    def _check_input_dim(self, input: Any) -> None:
        """Errors: InputError if the input has fewer than 2 dimensions."""
        if input.dim() < 2:
            raise InputError(f"SyncBatchNorm: an input of {input.dim()} dimensions has no channels")

    def _sum(self, tensor: Any, what: str) -> Any:
        """Returns the sum of a tensor over the ranks; `what` is part of the name of the
        collective."""
        name = f"batch normalization, {what}"
        return allreduce(tensor, name=name, op=Sum, process_set=self.process_set)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _track(self, mean: Any, variance: Any) -> None:
        """Moves the running mean and variance towards the mean and variance of this batch, as torch
        does."""
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            momentum = 1 / self.num_batches_tracked.item()
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)
