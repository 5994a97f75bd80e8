"""Divides data among the ranks."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DistributedSampler as _Sampler

from onnxpar.hvd.communicator import rank as own_rank
from onnxpar.hvd.communicator import size


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
