"""Fused and compressed reductions."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from onnxpar import hvd
from onnxpar.base.errors import InputError, RankError
from onnxpar.hvd.compression import Cast, Compression
from onnxpar.hvd.fusion import Fusion, layout_of

pytestmark = pytest.mark.usefixtures("medium")

SHAPES = [(3, 4), (7,), (), (0, 2), (100, 11), (2, 2, 2), (5,), (1000,)]
NAMES = ["f4", "f8", "f4", "f4", "f2", "f4", "f8", "f4"]


def arrays(rank: int) -> list[np.ndarray]:
    random = np.random.default_rng(rank)
    return [
        np.asarray(random.standard_normal(shape), name)
        for shape, name in zip(SHAPES, NAMES, strict=True)
    ]


@pytest.mark.matrix
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_fused_equals_unfused_bit_by_bit(ranks: int, compression: str) -> None:
    compressor = getattr(Compression, compression)

    def body() -> list[list[np.ndarray]]:
        xs = arrays(hvd.rank())
        alone = [hvd.allreduce(x, compression=compressor) for x in xs]
        fused = [
            hvd.grouped_allreduce(xs, compression=compressor, fusion_threshold=threshold)
            for threshold in (0, 64, 2000, 64 << 20)
        ]
        return [alone, *fused]

    for alone, *fused in hvd.run_on_threads(body, ranks):
        for found in fused:
            for x, y in zip(alone, found, strict=True):
                assert x.dtype == y.dtype and x.shape == y.shape
                assert x.tobytes() == y.tobytes()


def bucket_indices(compression: Cast, threshold: int) -> list[list[int]]:
    xs = arrays(0)
    fusion = Fusion(layout_of([str(i) for i in range(len(xs))], xs), compression, threshold)
    return [list(bucket.indices) for bucket in fusion.buckets]


def test_what_travels_together() -> None:
    """Of one dtype on the wire, in order, up to the threshold; larger ones alone."""
    assert bucket_indices(Compression.none, 64 << 20) == [[0, 2, 3, 5, 7], [1, 6], [4]]
    assert bucket_indices(Compression.none, 84) == [[0, 2, 3, 5], [1], [4], [6], [7]]
    assert bucket_indices(Compression.none, 83) == [[0, 2, 3], [1], [4], [5], [6], [7]]
    assert bucket_indices(Compression.none, 0) == [[i] for i in (0, 1, 2, 3, 4, 5, 6, 7)]
    assert bucket_indices(Compression.fp16, 64 << 20) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert bucket_indices(Compression.bf16, 64 << 20) == [[0, 1, 2, 3, 5, 6, 7], [4]]


def test_buckets_of_unequal_shapes_with_as_many_elements() -> None:
    """What a buffer does not show: it would add up elements that have nothing to do."""

    def body() -> float:
        shape = (3, 2) if hvd.rank() == 1 else (2, 3)
        message = r"g: rank 0 has 'g.1' float64\[2, 3\], but rank 1 has 'g.1' float64\[3, 2\]"
        with pytest.raises(InputError, match=message):
            hvd.grouped_allreduce([np.ones(2), np.ones(shape)], name="g")
        return float(hvd.allreduce(np.float64(1), op=hvd.Sum))

    assert hvd.run_on_threads(body, 3) == [3.0] * 3


@pytest.mark.parametrize(
    "counts,thresholds,message",
    [
        ((1, 2), (64, 64), "rank 0 has 1 tensors, but rank 1 has 2"),
        ((2, 2), (64, 8), "rank 0 has a fusion threshold of 64, but rank 1 has"),
    ],
)
def test_groups_that_differ(counts: Any, thresholds: Any, message: str) -> None:
    def body() -> None:
        xs = [np.ones(1)] * counts[hvd.rank()]
        with pytest.raises(InputError, match=message):
            hvd.grouped_allreduce(xs, fusion_threshold=thresholds[hvd.rank()])

    hvd.run_on_threads(body, 2)


def test_a_layout_that_one_rank_has_changed() -> None:
    def body() -> str:
        hvd.grouped_allreduce([np.ones((2, 3))])
        with pytest.raises(RankError, match="disagree") as raised:
            hvd.grouped_allreduce([np.ones((3, 2) if hvd.rank() else (2, 3))])
        return str(raised.value)

    for message in hvd.run_on_threads(body, 2):
        assert "AllReduce 'group, bucket 1 of 1'" in message
        assert "AllGather 'group, layout'" in message


def test_layouts_that_are_known_but_not_the_same() -> None:
    def body() -> str:
        shapes = [(2, 3), (3, 2)]
        for shape in shapes:
            hvd.grouped_allreduce([np.ones(shape)])
        with pytest.raises(RankError, match="disagree") as raised:
            hvd.grouped_allreduce([np.ones(shapes[hvd.rank()])])
        return str(raised.value)

    for message in hvd.run_on_threads(body, 2):
        assert message.count("layout=") == 2


@pytest.mark.parametrize("name,bits", [("fp16", 11), ("bf16", 8)])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_the_error_of_compression(name: str, bits: int, dtype: str) -> None:
    """At most one rounding of each rank's value and one of the average."""
    xs = [np.random.default_rng(rank).standard_normal(5000).astype(dtype) for rank in range(3)]
    exact = np.mean([x.astype("f8") for x in xs], axis=0)
    bound = 2.0**-bits * (np.mean(np.abs(xs), axis=0) + np.abs(exact)) * 1.01 + 1e-7

    def body() -> np.ndarray:
        return hvd.allreduce(xs[hvd.rank()], compression=getattr(Compression, name))

    for found in hvd.run_on_threads(body, 3):
        assert found.dtype == dtype
        assert (np.abs(found - exact) <= bound).all()
        assert (found != exact).any()


def test_what_is_compressed() -> None:
    for dtype in ("float16", "int64", "bool", "uint8"):
        assert Compression.bf16.wire_dtype(np.dtype(dtype)) == dtype
    assert Compression.fp16.wire_dtype(np.dtype("f8")) == np.float16
    assert Compression.bf16.wire_dtype(np.dtype("f4")) == ml_dtypes.bfloat16
    assert Compression.fp16.wire_dtype(np.dtype(ml_dtypes.bfloat16)) == ml_dtypes.bfloat16
