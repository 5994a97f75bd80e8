"""Elastic training: a failed collective takes the ranks back to their last commit.

    @hvd.elastic.run
    def train(state):
        while state.batch < 1000:
            ...
            state.batch += 1
            state.commit()

    train(hvd.elastic.ArrayState(params=params, optimizer=optimizer, batch=0))

When a rank dies, each other rank restores its last commit, connects again with `shutdown` and
`init`, and waits for a process that replaces the lost one, up to the timeout. Then all ranks take
the latest committed state and call the function again. The launcher of the ranks must start the new
process.
"""

from __future__ import annotations

import copy
import functools
import math
import queue
import random
from collections.abc import Callable, Iterator, Mapping, Sized
from itertools import cycle, islice
from typing import Any, Protocol, TypeVar

import numpy as np

from onnxpar.base.errors import RankError
from onnxpar.hvd.broadcast_state import (
    Stateful,
    allgather_object,
    broadcast_object,
    broadcast_parameters,
    named_arrays,
)
from onnxpar.hvd.communicator import rank as own_rank
from onnxpar.hvd.communicator import shutdown, size
from onnxpar.hvd.initialization import again

R = TypeVar("R")

REMOVED = 2
"""The `update_res` of `on_hosts_updated` if hosts were only removed; 1 is for added ones."""


class HostsUpdatedInterrupt(Exception):
    """Raised by `commit` on all ranks after rank 0 was told of new hosts by `on_hosts_updated`.
    `skip_sync` is True if hosts were only removed: the ranks that stay have equal states."""

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("the hosts have changed")
        self.skip_sync = skip_sync


class State:
    """The state that ranks keep when they reset: disconnect and connect again, with other ranks. A
    subclass defines `save`, `restore` and `sync`.

    bcast_object  broadcasts an object from rank 0
    get_rank      returns the number of this rank
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._updated = 0.0
        self._callbacks: list[Callable[[], object]] = []

    def register_reset_callbacks(self, callbacks: list[Callable[[], object]]) -> None:
        """Adds functions to call after each reset, for instance to set the learning rate."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called after the ranks have connected again: forgets changes of hosts, and calls `reset`
        and the registered functions."""
        self._messages = queue.Queue()
        self.reset()
        for callback in self._callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Lets the next commit of all ranks raise HostsUpdatedInterrupt. Call it on rank 0, from
        any thread, after the environment variables of all ranks describe the new hosts.

        timestamp   when the hosts changed; a change that is not later than the last is ignored
        update_res  1: hosts were added, 2: removed, 3: both
        """
        self._messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Saves the state in memory. Errors: HostsUpdatedInterrupt if hosts have changed."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Errors: HostsUpdatedInterrupt, on all ranks, if hosts have changed."""
        before, last, result = self._updated, self._updated, 0
        while not self._messages.empty():
            timestamp, update = self._messages.get()
            if timestamp > last:
                last, result = timestamp, result | update
        before, self._updated, result = self._bcast_object((before, last, result))
        if self._updated > before:
            raise HostsUpdatedInterrupt(result == REMOVED)

    def save(self) -> None:
        """Keeps a copy of the state in memory, for `restore`."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to the last saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Takes the state of rank 0; called on all ranks."""
        raise NotImplementedError

    def reset(self) -> None:
        """Called after the ranks have connected again, before `sync`; does nothing here."""


class ObjectState(State):
    """State of plain objects, each an attribute: `state.batch` for the argument `batch=0`. Objects
    are copied deeply."""

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)
        self._saved_state = kwargs
        self._set_attrs()

    def save(self) -> None:
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attrs()

    def sync(self) -> None:
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attrs()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))


class _Kept(Protocol):
    """One part of an ArrayState: saves its value, goes back to the saved value, or takes that of
    the rank `root`."""

    def save(self) -> None: ...
    def restore(self) -> None: ...
    def sync(self, root: int) -> None: ...


class _Arrays:
    """Parameters of an ArrayState; the arrays stay the same objects, and `restore` overwrites
    them."""

    def __init__(self, value: Any) -> None:
        self._named = named_arrays(value, "ArrayState")
        self.save()

    def save(self) -> None:
        self._saved = {name: array.copy() for name, array in self._named.items()}

    def restore(self) -> None:
        for name, array in self._saved.items():
            np.copyto(self._named[name], array)

    def sync(self, root: int) -> None:
        broadcast_parameters(self._named, root)
        self.save()


class _Stateful:
    """An optimizer or a sampler of an ArrayState: an object with `state_dict` and
    `load_state_dict`."""

    def __init__(self, value: Stateful, broadcast: Callable[..., Any]) -> None:
        self._value = value
        self._broadcast = broadcast
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self._value.state_dict())

    def restore(self) -> None:
        self._value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self, root: int) -> None:
        state = self._broadcast(self._value.state_dict(), root, "elastic state")
        self._value.load_state_dict(state)
        self.save()


class ArrayState(ObjectState):
    """State of a training run: arrays, an optimizer, and plain objects.

    params     the parameters, as for `broadcast_parameters`; they are restored in place
    optimizer  an optimizer, or any object with `state_dict` and `load_state_dict`
    kwargs     more arrays (in mappings), samplers or optimizers, and plain objects that
               `broadcast_object` can send
    """

    _broadcast: Callable[..., Any] = staticmethod(broadcast_object)

    def __init__(
        self, params: Any = None, optimizer: Stateful | None = None, **kwargs: Any
    ) -> None:
        values = {"params": params, "optimizer": optimizer, **kwargs}
        self._handlers: dict[str, _Kept] = {}
        plain: dict[str, Any] = {}
        for name, value in values.items():
            if _is_arrays(value):
                self._handlers[name] = _Arrays(value)
            elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
                self._handlers[name] = _Stateful(value, self._broadcast)
            else:
                plain[name] = value
                continue
            setattr(self, name, value)
        self._commits = 0
        super().__init__(self._broadcast, own_rank, **plain)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()
        self._commits += 1

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Takes the state of the rank that has saved most often, the first of several. A process
        that replaces a lost one has saved nothing yet, so its state is never taken."""
        commits = allgather_object(self._commits, "elastic commits")
        self._commits = max(commits)
        root = commits.index(self._commits)
        for handler in self._handlers.values():
            handler.sync(root)
        if self._saved_state:
            self._saved_state = self._broadcast(self._saved_state, root, "elastic objects")
            self._set_attrs()

    def reset(self) -> None:
        """Lets each ElasticSampler divide its samples among the ranks anew."""
        for name in self._handlers:
            value = getattr(self, name)
            if isinstance(value, ElasticSampler):
                value.reset()


def _is_arrays(value: Any) -> bool:
    """True for a mapping or list of arrays, or a list of pairs of name and array, that is not
    empty."""
    if isinstance(value, Mapping):
        value = list(value.values())
    elif isinstance(value, list):
        value = [each[1] if isinstance(each, tuple) and len(each) == 2 else each for each in value]
    else:
        return False
    return bool(value) and all(isinstance(each, np.ndarray) for each in value)


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Decorates a training function, whose first argument is a `State`. When a collective fails, or
    hosts change, all ranks connect again, take one state, and call the function again.

    The number of such resets is not limited, but each waits for the other ranks no longer than the
    timeout of `init`. Errors: RankError if the others do not connect in time.
    """
    return run_fn(func, _reset)


def run_fn(func: Callable[..., R], reset: Callable[[], object]) -> Callable[..., R]:
    """Decorates a training function like `run`; `reset` connects the ranks again."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> R:
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except RankError:
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            reset()
            state.on_reset()

    return wrapper


def _reset() -> None:
    shutdown()
    again()


class ElasticSampler:
    """Iterates over the indices of this rank's samples that no rank has processed in this epoch.

    dataset  the number of samples, or an object with a length
    shuffle  gives the samples another order in each epoch
    seed     for the shuffle; must be equal on all ranks

    Call `record_batch` after each batch, and `set_epoch` at the end of each epoch. As part of an
    `ArrayState`, it divides the rest of an epoch among the ranks after a reset.
    """

    def __init__(self, dataset: int | Sized, shuffle: bool = True, seed: int = 0) -> None:
        self._count = dataset if isinstance(dataset, int) else len(dataset)
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, in which no sample is processed yet."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Counts `batch_size` samples of every rank as processed: all ranks process batches of one
        size. `batch_idx` is not used."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Returns the epoch and the number of processed samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Restores a state that `state_dict` returned."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divides the samples that are not processed yet among the ranks there are now."""
        self.num_replicas, self.rank = size(), own_rank()
        indices = list(range(self._count))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        total = self.num_samples * self.num_replicas
        return islice(cycle(self.remaining_indices), self.rank, total, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples
