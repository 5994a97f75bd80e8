"""Turns the options of `train` into the objects that a training run needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxpar.base.custom_ops import use_libraries
from onnxpar.planner.option_entry import check_options, same_names, with_defaults
from onnxpar.runtime.profile.trace import check_place
from onnxpar.runtime.session.checks import check_timeout
from onnxpar.trainer.data import Data
from onnxpar.trainer.elastic import Elastic
from onnxpar.trainer.iterables import Samples
from onnxpar.trainer.loop import Run
from onnxpar.trainer.rates import Schedule
from onnxpar.trainer.train_options import TrainOptions
from onnxpar.trainer.trainer import Trainer


@dataclass(frozen=True)
class RunRequest:
    """The options of a call of `train`, checked and converted.

    run         the options of the run
    elastic     how the run goes on when ranks die; None: it ends
    of_trainer  the options of its `Trainer`
    profile     the file for a trace; None for none
    values      the values of all options, with defaults
    """

    run: Run
    elastic: Elastic | None
    of_trainer: Mapping[str, Any]
    profile: str | os.PathLike[str] | None
    values: Mapping[str, Any]

    def data(self, trainer: Trainer, data: Samples) -> tuple[Data, Data | None]:
        """Returns the samples for training, and the samples for evaluations (None if there are
        none). `data` is as in `train`. Errors: InputError."""
        pad, held_out = self.values["pad"], self.values["eval"]
        batches = trainer.batches_of(data, pad=pad)
        evaluated = None if held_out is None else trainer.batches_of(held_out, False, pad)
        batches.check_batch(self.values["batch"])
        return batches, evaluated


def run_request(options: TrainOptions) -> RunRequest:
    """Checks and converts the options of `train`. Errors: TypeError, StrategyError, InputError."""
    check_options(options, TrainOptions, "train")
    values = with_defaults(options, TrainOptions)
    use_libraries(values["libraries"])
    folder, profile = values["checkpoint"], values["profile"]
    own = {
        "rate": values["lr"],
        "schedule": Schedule(*(values[name] for name in _OF_SCHEDULE)),
        "checkpoint": Path(folder) if folder else None,
    }
    run = Run(**same_names(Run, values) | own)
    run.check_evaluation(values["eval"] is not None)
    check_timeout(values["timeout"])
    if profile:
        check_place(profile)
    limits = values["min_ranks"], values["max_restarts"]
    elastic = Elastic.of(values["elastic"], *limits, values["step"], bool(profile))
    of_trainer = {name: values[name] for name in _OF_TRAINER} | {"profile": bool(profile)}
    return RunRequest(run, elastic, of_trainer, profile, values)


_OF_SCHEDULE = (
    *("schedule", "warmup", "min_lr", "lr_power", "lr_step_size", "lr_gamma"),
    "decay_steps",
)
_OF_TRAINER = (
    *("timeout", "log_dir", "table_dir", "table_cache", "threads", "bind", "ranks_per_numa"),
    "verify",
)
"""The options that a `Schedule`, in this order, and a `Trainer` take as they are."""
