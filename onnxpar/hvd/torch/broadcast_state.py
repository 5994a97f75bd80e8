"""Sends parameters, states of optimizers, and objects that contain tensors between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

import onnxpar.hvd as arrays
from onnxpar.hvd.broadcast_state import named_arrays
from onnxpar.hvd.communicator import current
from onnxpar.hvd.process_sets import ProcessSet, global_process_set
from onnxpar.hvd.torch.tensors import array_of, store, tensor_of

_MARK = "torch.Tensor"


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any] | Iterable[tuple[str, Any]], root_rank: int
) -> None:
    """Overwrites the tensors of every rank with the tensors of the rank `root_rank`. `params` is a
    `state_dict()`, `named_parameters()` or `parameters()`."""
    tensors = params if isinstance(params, Mapping) else list(params)
    share(named_arrays(tensors, "broadcast_parameters"), root_rank, global_process_set)


def share(named: Mapping[str, Any], root: int, process_set: ProcessSet) -> None:
    """Overwrites tensors, by name, with the tensors of the rank `root`, on all ranks of a process
    set."""
    for name in sorted(named):
        array = array_of(named[name], repr(name))
        if array.dtype.name.startswith("float8"):
            array = array.view("uint8")  # which ranks can exchange
        result = arrays.broadcast(array, root, name, process_set)
        if current().rank != root:
            store(named[name], result)


def broadcast_optimizer_state(optimizer: Any, root_rank: int, model: Any = None) -> None:
    """Gives the optimizer of every rank the state and the options of the optimizer on rank
    `root_rank`. `model` is not used."""
    is_root = current().rank == root_rank
    state = broadcast_object(optimizer.state_dict() if is_root else None, root_rank)
    if not is_root:
        optimizer.load_state_dict(state)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the object of the rank `root_rank`: a dense tensor, or an object of the types that
    `onnxpar.hvd.broadcast_object` sends, with dense tensors in it. Nothing is pickled, so data of
    another rank cannot run code."""
    is_root = current().rank == root_rank
    received = arrays.broadcast_object(
        _packed(obj) if is_root else None, root_rank, name, process_set
    )
    return obj if is_root else _unpacked(received)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Returns the objects of all ranks, by rank. The same types are allowed as in
    `broadcast_object`."""
    return [_unpacked(found) for found in arrays.allgather_object(_packed(obj), name)]


def _packed(value: Any) -> Any:
    """Returns `value` with each tensor in it replaced by a tuple of a mark, its dtype and an
    array."""

    def pack(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return _MARK, str(leaf.dtype).removeprefix("torch."), array_of(leaf)

    return tree_map(pack, value)


def _unpacked(value: Any) -> Any:
    """Returns `value` with the tensors that `_packed` replaced."""

    def is_tensor(leaf: Any) -> bool:
        return isinstance(leaf, tuple) and len(leaf) == 3 and leaf[0] == _MARK

    def unpack(leaf: Any) -> Any:
        return tensor_of(leaf[2], getattr(torch, leaf[1])) if is_tensor(leaf) else leaf

    return tree_map(unpack, value, is_leaf=is_tensor)
