"""Callbacks for training loops of your own; each does what Horovod's Keras callback of that name
does.

    callbacks = CallbackList([MetricAverageCallback(), ...], params, optimizer, steps_per_epoch)
    callbacks.on_train_begin()
    for epoch in range(epochs):
        callbacks.on_epoch_begin(epoch)
        for batch in range(steps_per_epoch):
            callbacks.on_batch_begin(batch)
            ...
            callbacks.on_batch_end(batch)
        callbacks.on_epoch_end(epoch, logs)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.hvd.allreduce import allreduce
from onnxpar.hvd.broadcast_state import broadcast_optimizer_state, broadcast_parameters
from onnxpar.hvd.communicator import rank, size

Logs = MutableMapping[str, Any]


class Loop:
    """The training loop that callbacks work on.

    params           its parameters by name
    optimizer        its optimizer
    steps_per_epoch  the number of steps of an epoch; None if unknown
    """

    def __init__(
        self, params: Mapping[str, Array], optimizer: Any, steps_per_epoch: int | None = None
    ) -> None:
        self.params = params
        self.optimizer = optimizer
        self.steps_per_epoch = steps_per_epoch


class Callback:
    """The base class of callbacks; its methods do nothing. `CallbackList` sets `loop`."""

    loop: Loop

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Called before the first epoch."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Called before the first batch of an epoch, which counts from 0."""

    def on_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Called before a batch, which counts from 0 in each epoch."""

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Called after the optimizer's step."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Called after the last batch of an epoch; callbacks may change `logs`."""


class CallbackList(Callback):
    """Calls each method of several callbacks, in their order.

    params           parameters by name
    optimizer        the optimizer, or a DistributedOptimizer
    steps_per_epoch  batches of an epoch, for callbacks that need the number
    """

    def __init__(
        self,
        callbacks: Iterable[Callback],
        params: Mapping[str, Array],
        optimizer: Any,
        steps_per_epoch: int | None = None,
    ) -> None:
        self.loop = Loop(params, optimizer, steps_per_epoch)
        self.callbacks = list(callbacks)
        for callback in self.callbacks:
            callback.loop = self.loop

    def on_train_begin(self, logs: Logs | None = None) -> None:
        for callback in self.callbacks:
            callback.on_train_begin(logs)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        for callback in self.callbacks:
            callback.on_epoch_begin(epoch, logs)

    def on_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        for callback in self.callbacks:
            callback.on_batch_begin(batch, logs)

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        for callback in self.callbacks:
            callback.on_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        for callback in self.callbacks:
            callback.on_epoch_end(epoch, logs)


class BroadcastGlobalVariablesCallback(Callback):
    """Gives all ranks the parameters and the optimizer state of `root_rank` after the first batch.

    `local_variables` are names of parameters whose values each rank keeps; `device` is not used.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: str | Sequence[str] | None = None
    ) -> None:
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        names = [local_variables] if isinstance(local_variables, str) else local_variables
        self._local = set(names or ())

    def register_local_var(self, var: str) -> None:
        """Adds a parameter whose value each rank keeps, by name."""
        self._local.add(var)

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if not self.broadcast_done:
            params = {n: p for n, p in self.loop.params.items() if n not in self._local}
            broadcast_parameters(params, self.root_rank)
            broadcast_optimizer_state(self.loop.optimizer, self.root_rank)
            self.broadcast_done = True


class BroadcastGlobalVariablesHook:
    """Gives all ranks the parameters and the optimizer state of `root_rank`: call
    `after_create_session` with a `Loop` before the first step. `device` is not used."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        self.root_rank = root_rank
        self.device = device

    def begin(self) -> None:
        """Does nothing; Horovod's hook has this method."""

    def after_create_session(self, session: Loop, coord: Any = None) -> None:
        """Broadcasts the parameters and the optimizer state of the loop `session`. `coord` is not
        used."""
        broadcast_parameters(session.params, self.root_rank)
        broadcast_optimizer_state(session.optimizer, self.root_rank)


class MetricAverageCallback(Callback):
    """Replaces the metrics in `logs` by their averages over the ranks at the end of each epoch. Put
    this callback before callbacks that read metrics. `device` is not used."""

    def __init__(self, device: str = "") -> None:
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        for metric in sorted(logs or {}):
            assert logs is not None
            logs[metric] = float(allreduce(np.float64(logs[metric]), name=metric))


class LearningRateScheduleCallback(Callback):
    """Sets the learning rate to `initial_lr` times `multiplier`, a function of the epoch, from
    `start_epoch` until before `end_epoch`.

    initial_lr           the learning rate at the start
    multiplier           a function, or a number m for m ** (epoch - start_epoch)
    staircase            sets the rate at the start of each epoch; otherwise before each batch, for
                         the fractional epoch epoch + batch / steps_per_epoch
    momentum_correction  scales the optimizer's momentum, if it has one, by the change of the rate,
                         for the next step (arXiv:1706.02677)
    steps_per_epoch      needed without staircase, unless the loop gives it
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self._momentum: float | None = None
        self.multiplier: Callable[[float], float]
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            base = multiplier
            self.multiplier = lambda epoch: base ** (epoch - start_epoch)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.loop.steps_per_epoch
            if not self.steps_per_epoch:
                raise InputError(f"{type(self).__name__} needs steps_per_epoch")

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        ends = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or ends:
            return
        if not self.staircase:
            assert self.steps_per_epoch
            self._adjust(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._adjust(self.current_epoch)

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if self._momentum is not None:
            _inner(self.loop.optimizer).momentum = self._momentum
            self._momentum = None

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if logs is not None:
            logs["lr"] = _inner(self.loop.optimizer).lr

    def _adjust(self, epoch: float) -> None:
        """Sets the learning rate for `epoch`, which may be a fraction, and scales the momentum for
        one step."""
        optimizer = _inner(self.loop.optimizer)
        old, optimizer.lr = optimizer.lr, self.initial_lr * self.multiplier(epoch)
        momentum = getattr(optimizer, "momentum", 0.0)
        if momentum and self.momentum_correction:
            self._momentum = momentum
            optimizer.momentum = momentum * optimizer.lr / old


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr` divided by the number of ranks to `initial_lr`
    during the first `warmup_epochs`; with `verbose`, rank 0 then prints a line."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch
            reached = epoch + 1.0 / self.steps_per_epoch  # round numbers at the ends of epochs
            return 1.0 / size() * (reached * (size() - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        assert self.end_epoch is not None
        if epoch == self.end_epoch - 1 and self.verbose > 0 and rank() == 0:
            rate = _inner(self.loop.optimizer).lr
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


def _inner(optimizer: Any) -> Any:
    """Returns the optimizer inside a DistributedOptimizer; any other optimizer as it is."""
    return getattr(optimizer, "optimizer", optimizer)
