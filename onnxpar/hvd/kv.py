"""MXNet's key-value store over the ranks of hvd, without server processes: the value of each key is
on one rank, the owner.

    store = kv.create("dist_sync")
    store.init("w", np.zeros(3))
    store.set_optimizer(hvd.SGD(lr=0.1))
    store.push("w", gradient)
    store.pull("w", out=w)

All ranks make the same calls in the same order. `init` gives each key to the rank that owns the
fewest bytes so far. The owner adds up the values that ranks push, in the order of ranks, and holds
the state of the optimizer for its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.graph.tensors import numel
from onnxpar.hvd.allreduce import writable
from onnxpar.hvd.arrays import barrier
from onnxpar.hvd.broadcast_state import broadcast_optimizer_state
from onnxpar.hvd.communicator import current
from onnxpar.hvd.distributed import SteppingOptimizer
from onnxpar.hvd.process_sets import Members
from onnxpar.hvd.reductions import Reduction, Sum
from onnxpar.hvd.sparse import IndexedSlices, check_sparse
from onnxpar.hvd.two_bit import TwoBit
from onnxpar.lowering.compression import NONE, TWO_BIT
from onnxpar.runtime.ranks import collectives

Key = int | str
Keys = Key | Sequence[Key]
Updater = Callable[[Key, Any, Array], object]
"""A function of a key, the sum over the ranks of pushed values, and the value to change in
place."""
_SYNC = ("dist_sync", "dist_device_sync", "dist_sync_device", "dist")
_LOCAL = ("local", "device", "local_update_cpu", "local_allreduce_cpu", "local_allreduce_device")
THRESHOLD = 0.5
"""MXNet's default threshold of 2bit."""


def create(name: str = "local") -> KVStore:
    """Returns a store: "dist_sync" over all ranks, "local" of this rank alone. Both also have
    MXNet's other names, such as "dist" and "device".

    Errors: InputError for other types; "dist_async" would need servers.
    """
    here = current()
    if name in _SYNC:
        return KVStore(name, Members(here, here.process_sets[0]))
    if name in _LOCAL:
        return KVStore(name, Members(here, (here.rank,)))
    raise InputError(
        f"kv.create({name!r}): use 'dist_sync', or 'local'; stores without servers are synchronous"
    )


@dataclass(frozen=True)
class _Entry:
    """A key of the store: the position of the rank that owns its value, and the value's dtype and
    shape."""

    owner: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class KVStore:
    """A store of arrays by key; `create` returns one.

    The arguments of the calls are MXNet's: a key or a list of keys, and for each key an array, or a
    list of arrays, which are added up. `priority` is not used.
    """

    def __init__(self, type: str, members: Members) -> None:
        self.type = type
        self._members = members
        self._entries: dict[Key, _Entry] = {}
        self._values: dict[Key, Array] = {}
        self._bytes = [0] * members.size
        self._updater: Updater | None = None
        self._two_bit: TwoBit | None = None

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self._members.rank

    @property
    def num_workers(self) -> int:
        """The number of ranks."""
        return self._members.size

    def init(self, key: Keys, value: Any) -> None:
        """Adds keys, whose first values are the values that rank 0 passes. Errors: InputError if a
        key exists."""
        for each, array_like in _pairs(key, value, "init"):
            array = collectives.as_exchangeable(array_like, f"init {each!r}")
            if each in self._entries:
                raise InputError(f"init: the key {each!r} exists already")
            first: Array = self._ordered(partial(self._first, each, array))
            owner = min(range(self.num_workers), key=lambda rank: self._bytes[rank])
            self._bytes[owner] += first.nbytes
            self._entries[each] = _Entry(owner, first.dtype, first.shape)
            if owner == self.rank:
                self._values[each] = first

    def push(self, key: Keys, value: Any, priority: int = 0) -> None:
        """Adds up values over the ranks, and lets the optimizer (or the updater) update each key's
        value by its sum. Without an optimizer, the sum becomes the value. Values may be
        `IndexedSlices`, on all ranks."""
        dense: dict[Key, Array] = {}
        sparse: dict[Key, IndexedSlices] = {}
        for each, pushed in _pairs(key, value, "push"):
            merged = self._merged(each, pushed)
            if isinstance(merged, IndexedSlices):
                sparse[each] = merged
            else:
                dense[each] = merged
        sums: dict[Key, Any] = self._ordered(lambda: self._sums(dense)) if dense else {}
        for each, rows in sparse.items():
            gathered = self._ordered(partial(self._rows_of, each, rows))
            if gathered is not None:
                sums[each] = gathered
        for each, total in sums.items():
            if self._updater is not None:
                self._updater(each, total, self._values[each])
            else:
                dense_total = total.dense() if isinstance(total, IndexedSlices) else total
                self._values[each] = dense_total

    def pull(
        self, key: Keys, out: Any = None, priority: int = 0, ignore_sparse: bool = True
    ) -> Any:
        """Writes the values of keys to `out`: for each key an array, or a list of arrays that all
        get the value. Without `out`, returns the values. `ignore_sparse` is not used: no value is
        sparse."""
        keys = _keys(key)
        values = self._ordered(lambda: self._gathered(keys))
        if out is None:
            return values if isinstance(key, list | tuple) else values[0]
        targets = [out] if not isinstance(key, list | tuple) else list(out)
        _check_count(targets, keys, "pull")
        for each, value, target in zip(keys, values, targets, strict=True):
            for array in target if isinstance(target, list | tuple) else [target]:
                _write(writable(array, f"pull {each!r}"), value, each)
        return None

    def pushpull(self, key: Keys, value: Any, out: Any = None, priority: int = 0) -> None:
        """Pushes values, then pulls the values of the same keys to `out`, or else to the pushed
        arrays."""
        self.push(key, value, priority)
        self.pull(key, value if out is None else out, priority)

    def broadcast(self, key: Keys, value: Any, out: Any, priority: int = 0) -> None:
        """Adds keys with the values that rank 0 passes, and writes these values to `out`."""
        self.init(key, value)
        self.pull(key, out, priority)

    def row_sparse_pull(
        self, key: Keys, out: Any = None, priority: int = 0, row_ids: Any = None
    ) -> Any:
        """Returns the rows `row_ids` of each key's value as `IndexedSlices` with ascending indices.
        Also writes them to the arrays `out`, if given, whose other rows become 0. `row_ids`, an
        array or one for each key, may differ between ranks."""
        if row_ids is None:
            raise InputError("row_sparse_pull needs row_ids")
        many = isinstance(key, list | tuple)
        keys = _keys(key)
        ids = list(row_ids) if many and isinstance(row_ids, list | tuple) else [row_ids] * len(keys)
        _check_count(ids, keys, "row_sparse_pull: row_ids")
        pulled = []
        for each, rows in zip(keys, ids, strict=True):
            wanted = self._wanted(each, rows)
            pulled.append(self._ordered(partial(self._pull_rows, each, wanted)))
        if out is not None:
            for slices, target in zip(pulled, list(out) if many else [out], strict=True):
                array = writable(target, "row_sparse_pull")
                array[...] = 0
                array[slices.indices] = slices.values
        return pulled if many else pulled[0]

    def set_optimizer(self, optimizer: SteppingOptimizer) -> None:
        """Lets an optimizer update the values; the pushed values are then gradients. All ranks take
        the options of rank 0's optimizer, and each rank keeps the state for the keys that it
        owns."""
        if self.num_workers > 1:
            broadcast_optimizer_state(optimizer, 0)
        self.set_updater(
            lambda key, total, value: optimizer.step({str(key): value}, {str(key): total})
        )

    def set_updater(self, updater: Updater) -> None:
        """Lets `updater(key, sum, value)` change each value in place after a push, on the rank that
        owns the key."""
        self._updater = updater

    _set_updater = set_updater

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Sends pushed values in two bits per element: `{"type": "2bit", "threshold": 0.5}`. Each
        rank sends 0, the threshold or its negative, and keeps the remainder for the next push.
        `{"type": "none"}` ends compression."""
        params = dict(compression_params)
        kind, threshold = params.pop("type", None), float(params.pop("threshold", THRESHOLD))
        if params or kind not in (TWO_BIT, NONE):
            raise InputError(
                f"set_gradient_compression({dict(compression_params)!r}): give type '2bit' or "
                "'none', and threshold"
            )
        self._two_bit = TwoBit(threshold) if kind == TWO_BIT else None

    def barrier(self) -> None:
        """Waits until all ranks have called `barrier`."""
        if self.num_workers > 1:
            barrier()

    def _ordered(self, work: Callable[[], Any]) -> Any:
        """Runs a collective after all collectives that were started earlier; a store of one rank
        needs no order."""
        return work() if self.num_workers == 1 else self._members.communicator.ordered(work)

    def _first(self, key: Key, array: Array) -> Array:
        """Returns the array of rank 0."""
        return collectives.broadcast(self._members.world, array, 0, f"init {key}")

    def _entry(self, key: Key, what: str) -> _Entry:
        if key not in self._entries:
            raise InputError(f"{what}: there is no key {key!r}; call init first")
        return self._entries[key]

    def _merged(self, key: Key, value: Any) -> Any:
        """Returns the value that this rank pushes, with the dtype and shape of the key: an array,
        the sum of a list of arrays, or `IndexedSlices`. Errors: InputError if it does not fit the
        key."""
        entry, what = self._entry(key, "push"), f"push {key!r}"
        if isinstance(value, IndexedSlices):
            rows = check_sparse(IndexedSlices(*value[:2], entry.shape), Reduction(Sum), what)
            _check_rows(rows.indices, entry, f"{what}: indices")
            return rows
        parts = value if isinstance(value, list | tuple) else [value]
        total = collectives.as_exchangeable(parts[0], what)
        for part in parts[1:]:
            total = total + part
        if total.shape != entry.shape or total.dtype != entry.dtype:
            raise InputError(
                f"{what}: the value is {total.dtype}{list(total.shape)}, but that of the key is "
                f"{entry.dtype}{list(entry.shape)}"
            )
        return total

    def _sums(self, pushed: Mapping[Key, Array]) -> dict[Key, Any]:
        """Returns the sums over the ranks of the pushed arrays, for the keys that this rank
        owns."""
        sums: dict[Key, Any] = {}
        for dtype in sorted({array.dtype.name for array in pushed.values()}):
            chosen = {k: v for k, v in pushed.items() if v.dtype.name == dtype}
            sums.update(self._sums_of_dtype(chosen, f"push {list(chosen)}"))
        return sums

    def _sums_of_dtype(self, pushed: Mapping[Key, Array], name: str) -> dict[Key, Any]:
        """Returns the sums for the keys that this rank owns; all arrays have one dtype, and `name`
        is that of the collective. Each rank sends its arrays to the owners in a single
        all-to-all."""
        by_owner: list[list[Key]] = [[] for _ in range(self.num_workers)]
        for key in pushed:
            by_owner[self._entries[key].owner].append(key)
        payloads = {key: self._payload(key, array) for key, array in pushed.items()}
        rows = [payloads[key] for keys in by_owner for key in keys]
        splits = [sum(len(payloads[key]) for key in keys) for keys in by_owner]
        received, _ = collectives.all_to_all(
            self._members.world, np.concatenate(rows), splits, name
        )
        parts = received.reshape(self.num_workers, -1)
        sums, start = {}, 0
        for key in by_owner[self.rank]:
            end, entry = start + len(payloads[key]), self._entries[key]
            sums[key] = self._total(parts[:, start:end], entry)
            start = end
        return sums

    def _payload(self, key: Key, array: Array) -> Array:
        """Returns the flat array that this rank sends for a pushed array: its elements, or two-bit
        codes."""
        row = array.reshape(-1)
        if self._two_bit is None:
            return row
        return self._two_bit.encode(str(key), array)

    def _total(self, parts: Array, entry: _Entry) -> Array:
        """Returns the sum over the ranks of a key's pushed arrays; `parts` has the payload of one
        rank in each row."""
        if self._two_bit is not None:
            length = numel(entry.shape)
            return self._two_bit.decode(parts, length, entry.dtype).reshape(entry.shape)
        total: Array = parts[0].copy()
        for part in parts[1:]:
            total += part
        return total.reshape(entry.shape)

    def _rows_of(self, key: Key, rows: IndexedSlices) -> IndexedSlices | None:
        """Sends the rows of a pushed sparse value to the owner of the key. Returns there the rows
        of all ranks, with each index once; on other ranks None."""
        entry, world = self._entries[key], self._members.world
        indices = collectives.as_exchangeable(rows.indices, f"push {key!r}").astype(np.int64)
        values = collectives.as_exchangeable(rows.values, f"push {key!r}")
        splits = [len(indices) if r == entry.owner else 0 for r in range(self.num_workers)]
        every, _ = collectives.all_to_all(world, indices, splits, f"push {key}.indices")
        gathered, _ = collectives.all_to_all(world, values, splits, f"push {key}.values")
        if entry.owner != self.rank:
            return None
        return IndexedSlices(gathered, every, entry.shape).merged()

    def _gathered(self, keys: Sequence[Key]) -> list[Array]:
        """Returns the values of keys, in their order, on all ranks; the owners send them."""
        entries = {key: self._entry(key, "pull") for key in keys}
        values: dict[Key, Array] = {}
        for dtype in sorted({entry.dtype.name for entry in entries.values()}):
            chosen = [key for key in entries if entries[key].dtype.name == dtype]
            chosen.sort(key=lambda key: entries[key].owner)
            own = [self._values[k].reshape(-1) for k in chosen if entries[k].owner == self.rank]
            row = np.concatenate([np.empty(0, entries[chosen[0]].dtype), *own])
            every, _ = collectives.all_gather(self._members.world, row, f"pull {chosen}")
            start = 0
            for key in chosen:
                end = start + numel(entries[key].shape)
                values[key] = every[start:end].reshape(entries[key].shape)
                start = end
        return [values[key] for key in keys]

    def _wanted(self, key: Key, row_ids: Any) -> Array:
        """Returns the requested rows of a key, ascending and without duplicates. Errors: InputError
        if the key has no such row."""
        entry = self._entry(key, "row_sparse_pull")
        wanted: Array = np.unique(np.asarray(row_ids, np.int64))
        _check_rows(wanted, entry, f"row_sparse_pull {key!r}: row_ids")
        return wanted

    def _pull_rows(self, key: Key, wanted: Array) -> IndexedSlices:
        """Returns the rows `wanted` of a key's value: all ranks send their row numbers to the
        owner, which sends the rows back."""
        entry, world = self._entries[key], self._members.world
        splits = [len(wanted) if r == entry.owner else 0 for r in range(self.num_workers)]
        asked, counts = collectives.all_to_all(world, wanted, splits, f"row_ids of {key}")
        rows = np.empty((0, *entry.shape[1:]), entry.dtype)
        if entry.owner == self.rank:
            rows = self._values[key][asked]
        else:
            counts = [0] * self.num_workers
        values, _ = collectives.all_to_all(world, rows, counts, f"rows of {key}")
        return IndexedSlices(values, wanted, entry.shape)


def _check_rows(indices: Array, entry: _Entry, what: str) -> None:
    rows = entry.shape[0] if entry.shape else 0
    if len(indices) and not 0 <= indices.min() <= indices.max() < rows:
        raise InputError(f"{what} must be from 0 to {rows - 1}")


def _keys(key: Keys) -> list[Key]:
    """Returns a key, or several, as a list."""
    return list(key) if isinstance(key, list | tuple) else [key]  # type: ignore[list-item]


def _pairs(key: Keys, value: Any, what: str) -> list[tuple[Key, Any]]:
    """Returns pairs of each key and its value. Errors: InputError if a key occurs twice, or if the
    numbers of keys and values differ."""
    keys = _keys(key)
    values = list(value) if isinstance(key, list | tuple) else [value]
    _check_count(values, keys, what)
    if len(set(keys)) < len(keys):
        raise InputError(f"{what}: a key is there twice in {keys}")
    return list(zip(keys, values, strict=True))


def _check_count(values: Sequence[Any], keys: Sequence[Key], what: str) -> None:
    if len(values) != len(keys):
        raise InputError(f"{what}: {len(values)} values for {len(keys)} keys")


def _write(array: Array, value: Array, key: Key) -> None:
    """Copies a value to the array `out` of a pull. Errors: InputError if the shapes differ."""
    if array.shape != value.shape:
        raise InputError(
            f"pull {key!r}: out has shape {list(array.shape)}, the value {list(value.shape)}"
        )
    np.copyto(array, value, casting="unsafe")
