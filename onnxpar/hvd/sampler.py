"""Divides the samples of a dataset among the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.hvd.communicator import rank as own_rank
from onnxpar.hvd.communicator import size


class DistributedSampler:
    """The indices of this rank's samples: every `num_replicas`-th sample, starting with sample
    number `rank`. Of 5 samples over 2 ranks, rank 0 gets 0, 2, 4 and rank 1 gets 1, 3, 0.

    All ranks get the same number of samples, as in torch.utils.data.DistributedSampler: some of the
    first samples repeat at the end or, with `drop_last`, some of the last are dropped. With
    `shuffle`, the order depends only on `seed` and the epoch, so it is the same on all ranks, and
    for any number of ranks.
    """

    def __init__(
        self,
        dataset: int | Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.dataset_size = dataset if isinstance(dataset, int) else len(dataset)
        self.num_replicas = size() if num_replicas is None else num_replicas
        self.rank = own_rank() if rank is None else rank
        if self.num_replicas < 1 or not 0 <= self.rank < self.num_replicas:
            raise InputError(
                f"rank={self.rank} must be from 0 to num_replicas - 1, which is "
                f"{self.num_replicas - 1}"
            )
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        whole, rest = divmod(self.dataset_size, self.num_replicas)
        self.num_samples = whole + (rest > 0 and not drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which determines the order of samples; call it before each epoch, on all
        ranks."""
        self.epoch = epoch

    def indices(self) -> Array:
        """Returns the indices (int64) of this rank's samples in the current epoch, in order."""
        order = np.arange(self.dataset_size)
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(order)
        return np.resize(order, self.num_samples * self.num_replicas)[
            self.rank :: self.num_replicas
        ]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices().tolist())

    def __len__(self) -> int:
        return self.num_samples
