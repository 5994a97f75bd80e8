"""Sends objects, parameters and optimizer state between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError, RankError
from onnxpar.base.typed_bytes import of_bytes, to_bytes
from onnxpar.hvd.allreduce import writable
from onnxpar.hvd.arrays import broadcast, check_root
from onnxpar.hvd.communicator import current
from onnxpar.hvd.process_sets import ProcessSet, global_process_set, members_of
from onnxpar.runtime.ranks import collectives


class Stateful(Protocol):
    """An object with state: an optimizer of this package, or any object with these two methods."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the object of the rank `root_rank`; what the other ranks pass is ignored.

    `typed_bytes.ALLOWED` lists the types that can be sent. Errors: TypeError for other types;
    RankError if the bytes from the root do not encode an object.
    """
    called = name or "object"
    members = members_of(process_set, f"broadcast_object {called!r}")
    check_root(root_rank, members.ranks, f"broadcast_object {called!r}")
    is_root = members.communicator.rank == root_rank
    payload = np.frombuffer(to_bytes(obj), np.uint8) if is_root else np.empty(0, np.uint8)
    size = np.array(len(payload))
    length = int(broadcast(size, root_rank, f"{called}, length", process_set))
    memory = payload if is_root else _memory(length, root_rank)
    data = broadcast(memory, root_rank, called, process_set)
    return obj if is_root else _object(data.tobytes(), root_rank)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Returns the objects of all ranks, by rank. Types and errors are as for `broadcast_object`."""
    here, payload = current(), to_bytes(obj)
    rows = here.ordered(lambda: collectives.gather_bytes(here.world, payload, name or "objects"))
    return [_object(row, rank) for rank, row in enumerate(rows)]


def _memory(length: int, root: int) -> Array:
    """Returns an array of `length` bytes. Errors: RankError if there is not so much memory: a
    damaged rank `root` could announce any length."""
    try:
        return np.empty(length, np.uint8)
    except (MemoryError, ValueError) as error:
        raise RankError(
            f"rank {root} announces an object of {length} bytes, for which this rank has no "
            f"memory: {error}"
        ) from error


def _object(data: bytes, rank: int) -> Any:
    """Returns the object that bytes from a rank encode. Errors: RankError if they encode none."""
    try:
        return of_bytes(data)
    except ValueError as error:
        raise RankError(
            f"rank {rank} has sent bytes that cannot be read as an object: {error}"
        ) from error


Parameters = Mapping[str, Array] | Sequence[Array] | Sequence[tuple[str, Array]]


def broadcast_parameters(params: Parameters, root_rank: int = 0) -> None:
    """Overwrites the arrays of every rank with the arrays of the rank `root_rank`.

    `params` maps names to arrays, or is a list of arrays or of pairs of name and array. Errors:
    InputError if a value is not a writable array.
    """
    named = named_arrays(params, "broadcast_parameters")
    for name, array in named.items():
        writable(array, f"broadcast_parameters: {name!r}")
    for name in sorted(named):
        named[name][...] = broadcast(named[name], root_rank, name)


def named_arrays(params: Parameters, what: str) -> dict[str, Array]:
    """Returns the arrays of `params` by name; array i of a list without names is "parameter i".
    `what` names the call in errors. Errors: InputError if two arrays have the same name."""
    if isinstance(params, Mapping):
        return dict(params)
    named: dict[str, Array] = {}
    for index, each in enumerate(params):
        name, array = each if isinstance(each, tuple) else (f"parameter {index}", each)
        if name in named:
            raise InputError(f"{what}: two parameters are called {name!r}; names must be unique")
        named[name] = array
    return named


def broadcast_optimizer_state(optimizer: Stateful, root_rank: int = 0, model: Any = None) -> None:
    """Gives the optimizer of every rank the state and the options of the optimizer on rank
    `root_rank`. `model` is not used."""
    here = current()
    state = optimizer.state_dict() if here.rank == root_rank else None
    state = broadcast_object(state, root_rank, "optimizer state")
    if here.rank != root_rank:
        optimizer.load_state_dict(state)
