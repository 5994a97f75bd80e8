"""A sampler of PyTorch that divides a dataset among the ranks."""

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
    """Returns a torch.utils.data.DistributedSampler, by default for the ranks of hvd: the i-th of n
    ranks gets samples i, i + n, i + 2 n and so on."""
    ranks = size() if num_replicas is None else num_replicas
    return _Sampler(dataset, ranks, own_rank() if rank is None else rank, shuffle, seed, drop_last)
