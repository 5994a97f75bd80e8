"""Batches of training data, from files or from objects of a program, shuffled by a seed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.graph.training_spec import IGNORED, Step
from onnxpar.runtime.session.npz import read_npz
from onnxpar.trainer.batches import Batches, Shapes
from onnxpar.trainer.iterables import Samples, source_of
from onnxpar.trainer.needs import Needs
from onnxpar.trainer.parquet import SUFFIX, parquet_shards
from onnxpar.trainer.shard_files import folder_shards
from onnxpar.trainer.sources import Source, in_memory


@dataclass(frozen=True)
class Rest:
    """How a step ignores samples that only fill a batch: their labels get the value that does not
    count, or an input has the number of samples that count.

    labels     the input of labels; None if the step has none
    samples    the input for the number of samples that count; None if the step has none
    of_labels  the dimension of the labels that numbers samples
    """

    labels: str | None
    samples: str | None
    of_labels: int = 0

    @staticmethod
    def of(step: Step, in_training: bool) -> Rest | None:
        """Returns how a training step ignores samples; None if it cannot. With `in_training` False,
        this is about the evaluation in the step."""
        if (in_training and step.full_batches) or not (step.labels or step.samples):
            return None
        return Rest(step.labels, step.samples, step.batch.get(step.labels or "", 0))

    def without(self, batch: Mapping[str, Array], count: int) -> dict[str, Array]:
        """Returns new values for the inputs of a batch that make only its first `count` samples
        count."""
        inputs = {self.samples: np.array(count, np.float32)} if self.samples else {}
        if self.labels:
            labels, at = batch[self.labels], self.of_labels
            place = np.arange(labels.shape[at]) < count
            kept = place.reshape([-1 if axis == at else 1 for axis in range(labels.ndim)])
            inputs[self.labels] = np.where(kept, labels, IGNORED)
        return inputs


@dataclass(frozen=True)
class Data:
    """Training data: samples from a source, in batches for a step.

    needs    the inputs of the step
    rest     how the step ignores samples that only fill a batch; None if it cannot: the last
             samples of each epoch are then left out
    lengths  the shapes of the inputs in each program of a step for several lengths
    arrays   the arrays that were in memory from the start
    """

    source: Source
    needs: Needs
    rest: Rest | None = None
    lengths: Sequence[Shapes] = ()
    arrays: Mapping[str, Array] = field(default_factory=dict)

    @staticmethod
    def of(
        data: Samples,
        ports: Sequence[Any],
        dims: Mapping[str, int],
        rest: Rest | None = None,
        pad: Mapping[str, float] | None = None,
        labels: str | None = None,
        lengths: Sequence[Shapes] = (),
    ) -> Data:
        """Returns batches of samples for the inputs `ports` (`NodeArg`s).

        data     an .npz file of arrays by input name, a .parquet file of columns, or a folder of
                 shards; arrays by input name, or lists of samples; a sequence of samples (dicts);
                 an iterable of samples or batches, or a function that returns one
        dims     the dimension that numbers samples, by name of an input
        rest     how the step ignores samples that only fill a batch
        pad      by input, the value that fills samples which are shorter than the step's; by
                 default, `labels` are filled with the label that does not count
        labels   the input of labels
        lengths  the shapes of the inputs in each program of a step for several lengths

        Errors: InputError if an input is missing or has another shape or number of samples, or if
        there are fewer samples than in a batch.
        """
        needs = Needs.of(ports, dims, pad, labels)
        Batches.of(needs, lengths)
        return replace(_read(data, needs, rest), lengths=lengths)

    @property
    def batch(self) -> int:
        """Number of samples in a batch."""
        return self.needs.batch

    @property
    def count(self) -> int | None:
        """Number of samples in an epoch; None if only the end of an epoch tells."""
        return self.source.count

    def check_batch(self, batch: int | None) -> None:
        """Checks the batch size that the user expects (None: any). Errors: InputError if the step
        has another."""
        if batch not in (None, self.batch):
            raise InputError(
                f"--batch {batch}: this step was written for batches of {self.batch} samples; to "
                "change that, write the step again with `onnxpar grad --dim`"
            )

    @property
    def batches(self) -> int | None:
        """Number of batches in an epoch; None if only the end of an epoch tells."""
        return self.left(0)

    def left(self, first: int) -> int | None:
        """Returns the number of batches in the rest of an epoch, after its `first` samples; None if
        only the end of an epoch tells."""
        if self.count is None:
            return None
        rest = max(self.count - first, 0)
        return rest // self.batch if self.rest is None else -(-rest // self.batch)

    @cached_property
    def digest(self) -> str:
        """A digest of the data; "" for objects of Python other than arrays."""
        return self.source.digest()

    def left_out(self) -> str:
        """Returns a sentence that says how many samples an epoch leaves out, and why; "" if
        none."""
        if self.count is None or self.rest is not None or not self.count % self.batch:
            return ""
        left = self.count % self.batch
        used = f"{self.count - left} of {self.count} samples, in {self.batches} batches"
        return f"each epoch uses {used} of {self.batch}; the other {left} do not fill a batch"

    def epoch(self, number: int, seed: int | None, first: int = 0) -> Iterator[dict[str, Array]]:
        """Yields the batches of epoch `number`, after its `first` samples, as arrays by input name.
        The seed and the number of the epoch decide the order; without a seed, samples are not
        shuffled. Errors: InputError for a shard or a sample that cannot be read."""
        size, batches = self.batch, Batches.of(self.needs, self.lengths)
        if self.lengths:  # a batch depends on all samples before it
            chunks = batches.made(self.source.chunks(number, seed, 0, size), first // size)
        else:
            chunks = batches.made(self.source.chunks(number, seed, first, size))
        for chunk in chunks:
            count = self.needs.count(chunk)
            if count == size:
                yield chunk
            elif self.rest is not None:
                batch = self.needs.take(chunk, np.resize(np.arange(count), size))
                yield batch | self.rest.without(batch, count)


def _read(data: Samples, needs: Needs, rest: Rest | None) -> Data:
    """Returns the data in a file, a folder or an object, as `Data.of` takes it."""
    if isinstance(data, Mapping):
        return _in_memory(data, needs, rest, "data")
    if not isinstance(data, str | os.PathLike):
        return _checked(source_of(data, needs), needs, rest, "data")
    path = Path(data)
    if path.is_dir():
        return _checked(folder_shards(path, needs), needs, rest, str(path))
    if path.suffix == SUFFIX:
        return _checked(parquet_shards([path], needs), needs, rest, str(path))
    return _in_memory(read_npz(path), needs, rest, str(path))


def _in_memory(arrays: Mapping[str, Any], needs: Needs, rest: Rest | None, name: str) -> Data:
    """Returns the data in arrays by input name; `name` names it in errors."""
    chunk = needs.chunk(arrays, name)
    data = _checked(in_memory(chunk, needs), needs, rest, name)
    return replace(data, arrays=chunk)


def _checked(source: Source, needs: Needs, rest: Rest | None, name: str) -> Data:
    """Returns the data of a source. Errors: InputError, beginning with `name`, if the step has no
    input with samples, or if there are too few samples."""
    if rest is not None and rest.labels is not None and rest.labels not in needs.dims:
        rest = None
    if not needs.dims:
        raise InputError(
            f"{name}: no input of the step has samples; write the step again with `onnxpar "
            "grad`, which says what it finds, or takes --batch-dim NAME=K"
        )
    if source.count is not None and source.count < (needs.batch if rest is None else 1):
        raise InputError(
            f"{name} has {source.count} samples, but a batch has {needs.batch}; add samples, or "
            "write a step for smaller batches with `onnxpar grad --dim`"
        )
    return Data(source, needs, rest)
