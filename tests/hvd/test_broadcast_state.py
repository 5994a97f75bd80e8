"""What one rank has is what all have."""

from __future__ import annotations

import os
import pickle
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from onnxpar import hvd
from onnxpar.base.errors import InputError, RankError
from onnxpar.hvd.communicator import current
from onnxpar.runtime.ranks import collectives


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_objects(ranks: int) -> None:
    def body() -> tuple[object, list[object]]:
        own = {"rank": hvd.rank(), "many": "x" * 10_000 * hvd.rank()}
        return hvd.broadcast_object(own, ranks - 1), hvd.allgather_object(own)

    every = [{"rank": rank, "many": "x" * 10_000 * rank} for rank in range(ranks)]
    assert hvd.run_on_threads(body, ranks) == [(every[-1], every)] * ranks


class Evil:
    def __reduce__(self) -> object:
        return os.mkdir, ("evil",)


def test_a_false_peer_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a peer sends is a value or an error; a pickle is an error."""
    monkeypatch.chdir(tmp_path)

    def body() -> str:
        if hvd.rank() == 1:
            collectives.gather_bytes(current().world, pickle.dumps(Evil()), "objects")
            return ""
        with pytest.raises(
            RankError, match="rank 1 has sent bytes that cannot be read as an object"
        ) as raised:
            hvd.allgather_object({"a": 1})
        return str(raised.value)

    assert all(hvd.run_on_threads(body, 3)[::2])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", [-1, 2**62])
def test_a_false_root(length: int) -> None:
    def body() -> None:
        if hvd.rank() == 1:
            hvd.broadcast(np.array(length), 1, "object, length")
            return
        with pytest.raises(RankError, match=f"rank 1 announces an object of {length} bytes"):
            hvd.broadcast_object(None, root_rank=1)

    hvd.run_on_threads(body, 2)


def test_objects_of_other_types_are_named() -> None:
    with pytest.raises(TypeError, match=r"is a fractions.Fraction, .*; give None,"):
        hvd.run_on_threads(lambda: hvd.allgather_object({"a": Fraction(1, 2)}), 1)


@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_parameters_are_overwritten_in_place(ranks: int) -> None:
    def body() -> list[bytes]:
        rank = hvd.rank()
        base = np.full((4, 6), rank, np.float32)
        params = {
            "b": np.array(0.5 + rank),
            "a": base[::2, 1:4].T,  # a view, neither whole nor in C-order
            "c": np.full(70_000, rank, ml_dtypes.bfloat16),
        }
        order = sorted(params, reverse=rank == 1)
        hvd.broadcast_parameters({name: params[name] for name in order}, root_rank=1)
        assert base[1, 0] == rank, "beside the view"
        assert (base[::2, 1:4] == 1).all()
        return [params[name].tobytes() for name in sorted(params)]

    found = hvd.run_on_threads(body, ranks)
    assert found == [found[1]] * ranks
    assert found[0][1] == np.array(1.5).tobytes()


@pytest.mark.usefixtures("medium")
def test_parameters_of_other_names() -> None:
    def body() -> str:
        with pytest.raises(RankError, match="disagree") as raised:
            hvd.broadcast_parameters({"v" if hvd.rank() else "w": np.ones(3)})
        return str(raised.value)

    for message in hvd.run_on_threads(body, 2):
        assert "Broadcast 'w'" in message and "Broadcast 'v'" in message


def test_parameters_that_cannot_be_written() -> None:
    frozen = np.ones(3)
    frozen.flags.writeable = False

    def body() -> None:
        for value in (frozen, 1.0):
            with pytest.raises(InputError, match="'w': the tensor is not a writable array"):
                hvd.broadcast_parameters({"w": value})  # type: ignore[dict-item]

    hvd.run_on_threads(body, 2)


@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_optimizer_state(ranks: int, wrapped: bool) -> None:
    """Of a root that has stepped, to ranks that have not, or otherwise."""

    def body() -> tuple[object, bytes]:
        rank, param = hvd.rank(), np.ones(4)
        inner = hvd.Adam(lr=0.1 * (1 + rank))
        for step in range(0 if rank == 1 else 2 + rank):
            inner.step({"w": param}, {"w": np.full(4, 1.0 + rank + step)})
        optimizer = hvd.DistributedOptimizer(inner) if wrapped else inner
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        state = inner.state_dict()
        assert (state["lr"], state["state"]["w"]["step"]) == (0.1, 2)
        param[...] = 1
        inner.step({"w": param}, {"w": np.full(4, 2.0)})
        return state["betas"], state["state"]["w"]["exp_avg"].tobytes() + param.tobytes()

    found = hvd.run_on_threads(body, ranks)
    assert found == [found[0]] * ranks
