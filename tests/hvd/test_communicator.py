"""Who this process is."""

from __future__ import annotations

import numpy as np
import pytest

from onnxpar import hvd
from onnxpar.base.errors import InputError, RankError
from onnxpar.hvd import initialization


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no launcher had started the tests."""
    monkeypatch.setattr(initialization, "launched_rank", lambda: None)


def place() -> tuple[int, ...]:
    return (
        hvd.rank(),
        hvd.size(),
        hvd.local_rank(),
        hvd.local_size(),
        hvd.cross_rank(),
        hvd.cross_size(),
    )


@pytest.mark.usefixtures("alone")
def test_a_process_on_its_own_is_a_world_of_one() -> None:
    assert not hvd.is_initialized()
    for _ in range(2):  # also after a shutdown
        hvd.init()
        hvd.init()
        assert hvd.is_initialized()
        assert place() == (0, 1, 0, 1, 0, 1)
        np.testing.assert_array_equal(hvd.allreduce(np.arange(3.0)), [0, 1, 2])
        hvd.barrier()
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()


def test_before_init() -> None:
    for call in (hvd.rank, hvd.barrier, lambda: hvd.allreduce(np.ones(3))):
        with pytest.raises(RankError, match=r"call onnxpar.hvd.init\(\) first"):
            call()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_a_timeout_that_is_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("ONNXPAR_TIMEOUT", text)
    with pytest.raises(InputError, match="give a number of seconds above 0"):
        hvd.init()


def test_places_on_one_host() -> None:
    expected = [(rank, 3, rank, 3, 0, 1) for rank in range(3)]
    assert hvd.run_on_threads(place, 3) == expected


def test_places_on_several_hosts() -> None:
    """Ranks of a host need not follow each other, and hosts may have other numbers of them."""
    assert hvd.run_on_threads(place, 5, hosts=["a", "b", "a", "b", "a"]) == [
        (0, 5, 0, 3, 0, 2),
        (1, 5, 0, 2, 1, 2),
        (2, 5, 1, 3, 0, 2),
        (3, 5, 1, 2, 1, 2),
        (4, 5, 2, 3, 0, 1),
    ]


def test_a_rank_that_does_not_come(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("ONNXPAR_RANK", "0")
    monkeypatch.setenv("ONNXPAR_WORLD_SIZE", "2")
    monkeypatch.setenv("ONNXPAR_STORE", f"file:{tmp_path}")
    with pytest.raises(RankError, match=r"rank 1 has not joined the world within 0\.2 s"):
        hvd.init(timeout=0.2)
    assert not hvd.is_initialized()
