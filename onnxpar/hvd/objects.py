"""Sends objects, parameters and optimizer state between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.typed_bytes import of_bytes, to_bytes
from onnxpar.errors import InputError, RankError
from onnxpar.hvd.arrays import broadcast, check_root
from onnxpar.hvd.communicator import current
from onnxpar.runtime import collectives


class Stateful(Protocol):
    """An object with state: an optimizer of this package, or any object with these two methods."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """Returns the object of the rank `root_rank`; the objects of the other ranks are ignored.

    `typed_bytes.ALLOWED` lists the types that can be sent. Errors: TypeError for other types;
    RankError if the bytes from the root do not encode an object.
    """
    here, called = current(), name or "object"
    check_root(root_rank, here.size, f"broadcast_object {called!r}")
    is_root = here.rank == root_rank
    payload = np.frombuffer(to_bytes(obj), np.uint8) if is_root else np.empty(0, np.uint8)
    length = int(broadcast(np.array(len(payload)), root_rank, f"{called}, length"))
    data = broadcast(payload if is_root else _memory(length, root_rank), root_rank, called)
    return obj if is_root else _object(data.tobytes(), root_rank)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Returns the objects of all ranks, by rank. Types and errors are as for `broadcast_object`."""
    here, payload = current(), to_bytes(obj)
    rows = here.ordered(lambda: collectives.gather_bytes(here.world, payload, name or "objects"))
    return [_object(row, rank) for rank, row in enumerate(rows)]


def _memory(length: int, root: int) -> Array:
    try:
        return np.empty(length, np.uint8)
    except (MemoryError, ValueError) as error:
        raise RankError(
            f"rank {root} announces an object of {length} bytes, for which this rank has no "
            f"memory: {error}"
        ) from error


def _object(data: bytes, rank: int) -> Any:
    try:
        return of_bytes(data)
    except ValueError as error:
        raise RankError(
            f"rank {rank} has sent bytes that cannot be read as an object: {error}"
        ) from error


def broadcast_parameters(params: Mapping[str, Array], root_rank: int = 0) -> None:
    """Overwrites the arrays of every rank with those of the rank `root_rank`.

    Errors: InputError if a value is not a writable array.
    """
    for name, array in params.items():
        if not isinstance(array, np.ndarray) or not array.flags.writeable:
            raise InputError(
                f"broadcast_parameters: {name!r} is not a writable array; make it one with "
                "np.array(...)"
            )
    for name in sorted(params):
        params[name][...] = broadcast(params[name], root_rank, name)


def broadcast_optimizer_state(optimizer: Stateful, root_rank: int = 0) -> None:
    """Gives the optimizer of every rank the state and the options of the optimizer on rank
    `root_rank`."""
    here = current()
    state = optimizer.state_dict() if here.rank == root_rank else None
    state = broadcast_object(state, root_rank, "optimizer state")
    if here.rank != root_rank:
        optimizer.load_state_dict(state)
