"""How data is dealt, against torch.utils.data.DistributedSampler (2.13)."""

from __future__ import annotations

import numpy as np
import pytest

from onnxpar import hvd
from onnxpar.base.errors import InputError

TORCH: list[tuple[int, bool, list[list[int]]]] = [
    (10, False, [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]),
    (10, True, [[0, 3, 6], [1, 4, 7], [2, 5, 8]]),
    (2, False, [[0], [1], [0], [1], [0]]),
    (2, True, [[], [], [], [], []]),
    (8, False, [[0, 4], [1, 5], [2, 6], [3, 7]]),
    (7, True, [[0, 2, 4], [1, 3, 5]]),
    (0, False, [[], []]),
]


@pytest.mark.parametrize("length,drop_last,expected", TORCH)
def test_unshuffled_as_torch_deals(length: int, drop_last: bool, expected: list[list[int]]) -> None:
    for rank, indices in enumerate(expected):
        for dataset in (length, "x" * length):
            sampler = hvd.DistributedSampler(
                dataset, len(expected), rank, shuffle=False, drop_last=drop_last
            )
            assert list(sampler) == indices
            assert sampler.indices().tolist() == indices
            assert len(sampler) == len(indices)


def deal(length: int, ranks: int, epoch: int, seed: int = 0) -> list[list[int]]:
    samplers = [hvd.DistributedSampler(length, ranks, rank, seed=seed) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_an_epoch_has_every_sample(ranks: int) -> None:
    dealt = deal(50, ranks, epoch=1)
    assert {len(indices) for indices in dealt} == {-(-50 // ranks)}
    assert {i for indices in dealt for i in indices} == set(range(50))


def test_epochs_and_seeds_shuffle_anew_and_repeat() -> None:
    orders = [deal(50, 2, epoch, seed) for epoch, seed in ((0, 0), (1, 0), (0, 1))]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert sorted(orders[0][0]) != orders[0][0]
    assert orders == [deal(50, 2, epoch, seed) for epoch, seed in ((0, 0), (1, 0), (0, 1))]


def test_a_global_batch_is_the_same_for_any_number_of_ranks() -> None:
    (whole,) = deal(48, 1, epoch=3)
    for ranks in (2, 3, 4):
        parts = np.array(deal(48, ranks, epoch=3))
        for batch in range(4):
            width = 12 // ranks
            found = parts[:, batch * width : (batch + 1) * width]
            assert sorted(found.ravel()) == sorted(whole[12 * batch : 12 * (batch + 1)])


def test_ranks_by_default() -> None:
    def body() -> list[int]:
        return list(hvd.DistributedSampler(7, shuffle=False))

    assert hvd.run_on_threads(body, 3) == [[0, 3, 6], [1, 4, 0], [2, 5, 1]]


def test_a_rank_that_is_none() -> None:
    with pytest.raises(InputError, match="rank=3 must be from 0 to num_replicas - 1, which is 2"):
        hvd.DistributedSampler(10, 3, 3)
