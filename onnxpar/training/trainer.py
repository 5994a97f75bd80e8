"""Runs a sharded training step again and again; parameters and state stay on their ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.arrays import Array
from onnxpar.errors import InputError, ModelError
from onnxpar.runtime.bundle import Bundle, NodeArg
from onnxpar.runtime.closing import Closing
from onnxpar.runtime.launch import launched_rank
from onnxpar.runtime.session import InferenceSession
from onnxpar.step import EVALUATION, RESIDUAL, Step
from onnxpar.training.checkpoint import Checkpoint, Progress, begin, finish, unfinished


class Trainer(Closing):
    """A session of a sharded training step (`onnxpar shard step.onnx`).

    `options` are those of `InferenceSession`. Errors: ModelError where the folder is no sharded
    training step.
    """

    def __init__(self, par: str | os.PathLike[str], **options: Any) -> None:
        self.bundle = Bundle.load(par)
        if self.bundle.step is None:
            raise ModelError(
                f"{par}: is no training step; write one with `onnxpar grad`, then shard that"
            )
        self.spec: Step = self.bundle.step
        if self.spec.rate not in self.bundle.inputs:
            raise ModelError(
                f"{par}: updates nothing, it only tells gradients; give `onnxpar grad` an "
                "--optimizer"
            )
        rank = launched_rank()
        self.leads = rank is None or rank.rank == 0
        self.session = InferenceSession(par, **options)

    @property
    def data(self) -> list[NodeArg]:
        """The inputs that each batch feeds."""
        by_name = {port.name: port for port in self.session.get_inputs()}
        return [by_name[name] for name in self.spec.data]

    def step(self, batch: Mapping[str, Array], rate: float, seed: int = 0) -> dict[str, float]:
        """Takes one step on a global batch; returns the loss before it, and the metrics. What is
        random follows from the seed. Errors: InputError, RankError."""
        names = [self.spec.loss, *self.spec.metrics]
        values = self.run(names, batch, rate, seed)
        return {name: float(value) for name, value in zip(names, values, strict=True)}

    def run(
        self, names: Sequence[str], batch: Mapping[str, Array], rate: float, seed: int = 0
    ) -> list[Array]:
        """Takes one step, and returns these of its outputs."""
        port = self.bundle.inputs[self.spec.rate]
        feeds = {**batch, self.spec.rate: np.asarray(rate, port.dtype)}
        if self.spec.seed is not None:
            feeds[self.spec.seed] = np.asarray(seed, np.int64)
        return self.session.run(names, feeds, keep_states=True)

    def evaluate(self, batch: Mapping[str, Array]) -> dict[str, float]:
        """How good the model is on a batch, as it is used; nothing changes. Errors: InputError,
        RankError."""
        names = self.spec.evaluation
        values = self.session.run(names, batch)
        start = len(EVALUATION) + 1
        return {name[start:]: float(v) for name, v in zip(names, values, strict=True)}

    def save(self, folder: str | os.PathLike[str], progress: Progress) -> None:
        """Writes a checkpoint into a folder of them: each rank its own parts, all or nothing."""
        folder = Path(folder)
        if self.leads:
            begin(folder, progress)
        try:
            self.session.states.save(unfinished(folder, progress))
        except BaseException:
            if self.leads:
                shutil.rmtree(unfinished(folder, progress), ignore_errors=True)
            raise
        if self.leads:
            finish(folder, progress, self.bundle, self.spec)

    def load(self, checkpoint: Checkpoint) -> None:
        """Goes on from a checkpoint, whatever mesh it was written on and however gradients
        travelled there. Errors: ModelError where it is one of another step."""
        known = {slot.input for slot in checkpoint.slots}
        unsent = {slot.input for slot in self.spec.slots if slot.kind == RESIDUAL}
        for name in self.bundle.states:
            if name not in known | unsent:
                raise ModelError(
                    f"{checkpoint.path}: has no {name!r}; it is a checkpoint of another training "
                    "step"
                )
        inputs, states = self.bundle.inputs, checkpoint.states
        alike = [n for n in self.bundle.states if states.is_dealt(n, self.bundle.mesh, inputs[n])]
        self.session.states.load(checkpoint.path, alike)
        for name in [name for name in self.bundle.states if name not in alike]:
            try:
                value = states.read(name) if name in known else self._zeros(name)
                self.session.states.write(name, value)
            except InputError as error:
                raise ModelError(f"{checkpoint.path}: {error}") from None

    def _zeros(self, name: str) -> Array:
        port = self.bundle.inputs[name]
        return np.zeros([s for s in port.shape or () if isinstance(s, int)], port.dtype)

    def close(self) -> None:
        """Ends the ranks."""
        self.session.close()
