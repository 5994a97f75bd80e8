"""Batches of training data, from samples in an .npz file or in memory, shuffled by a seed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.errors import InputError
from onnxpar.ir.training_spec import IGNORED, Step
from onnxpar.runtime.feeds import read_npz

_DIGESTED = 1 << 28
"""Most bytes of data of which a digest reads all."""


@dataclass(frozen=True)
class Rest:
    """How a step leaves out samples: by labels that do not count, or by an input for the number of
    samples that do. `of_labels` is the dimension of labels that numbers samples."""

    labels: str | None
    samples: str | None
    of_labels: int = 0

    @staticmethod
    def of(step: Step, in_training: bool) -> Rest | None:
        """Returns how a step, or else its evaluation, leaves out samples; None if it cannot."""
        if (in_training and step.full_batches) or not (step.labels or step.samples):
            return None
        return Rest(step.labels, step.samples, step.batch.get(step.labels or "", 0))

    def without(self, batch: Mapping[str, Array], count: int) -> dict[str, Array]:
        """Returns the inputs by which only the first `count` samples of a batch count."""
        found = {self.samples: np.array(count, np.float32)} if self.samples else {}
        if self.labels:
            labels, at = batch[self.labels], self.of_labels
            place = np.arange(labels.shape[at]) < count
            kept = place.reshape([-1 if axis == at else 1 for axis in range(labels.ndim)])
            found[self.labels] = np.where(kept, labels, IGNORED)
        return found


@dataclass(frozen=True)
class Data:
    """Training data by input: `samples`, arrays of samples along the dimensions `dims`, and `fixed`
    arrays, which are the same in every batch. `batch` is the number of samples in a batch, `count`
    in total. `rest` says how a step leaves out samples that only fill a batch; None if it cannot,
    so that the last samples of each epoch are not used."""

    samples: Mapping[str, Array]
    fixed: Mapping[str, Array]
    dims: Mapping[str, int]
    batch: int
    count: int
    rest: Rest | None = None

    @staticmethod
    def read(
        path: str | os.PathLike[str],
        ports: Sequence[Any],
        dims: Mapping[str, int],
        rest: Rest | None = None,
    ) -> Data:
        """Reads arrays for the inputs `ports` (`NodeArg`s) from an .npz file, by input name.
        `dims` are the dimensions that number samples, of inputs and of arrays.

        Errors: InputError if an array is missing or has another shape or number of samples, or if
        there are fewer samples than in a batch.
        """
        return Data.of(read_npz(Path(path)), ports, dims, str(path), rest)

    @staticmethod
    def of(
        arrays: Mapping[str, Array],
        ports: Sequence[Any],
        dims: Mapping[str, int],
        source: str = "data",
        rest: Rest | None = None,
    ) -> Data:
        """Like `read`, but with arrays in memory, by input name; errors name them by `source`."""
        samples: dict[str, Array] = {}
        fixed: dict[str, Array] = {}
        for port in ports:
            if port.name not in arrays:
                have = ", ".join(sorted(arrays))
                raise InputError(
                    f"{source} has no array for the input {port.name!r}; its arrays: {have}"
                )
            array, at = arrays[port.name], dims.get(port.name)
            wanted: list[Any] = list(port.shape)
            if at is not None:
                wanted[at] = "samples"
            fits = all(w in ("samples", s) for w, s in zip(wanted, array.shape, strict=False))
            if array.ndim != len(wanted) or not fits:
                text = ", ".join(map(str, wanted))
                raise InputError(
                    f"{source}: the array {port.name!r} has the shape {list(array.shape)}; the "
                    f"step needs [{text}]"
                )
            (fixed if at is None else samples)[port.name] = array
        counts = {name: array.shape[dims[name]] for name, array in samples.items()}
        if len(set(counts.values())) > 1:
            text = ", ".join(f"{n} of {name!r}" for name, n in counts.items())
            raise InputError(
                f"{source}: the arrays must have equal numbers of samples, but have {text}"
            )
        count = next(iter(counts.values()), 0)
        sizes = [int(port.shape[dims[port.name]]) for port in ports if port.name in dims]
        batch = sizes[0] if sizes else 1
        if rest is not None and rest.labels is not None and rest.labels not in samples:
            rest = None
        if not samples:
            raise InputError(
                f"{source}: no input of the step has samples; write the step again with `onnxpar "
                "grad`, which says what it finds, or takes --batch-dim NAME=K"
            )
        if count < (batch if rest is None else 1):
            raise InputError(
                f"{source} has {count} samples, but a batch has {batch}; add samples, or write a "
                "step for smaller batches with `onnxpar grad --dim`"
            )
        return Data(samples, fixed, dims, batch, count, rest)

    @staticmethod
    def given(
        data: str | os.PathLike[str] | Mapping[str, Array],
        ports: Sequence[Any],
        dims: Mapping[str, int],
        rest: Rest | None = None,
    ) -> Data:
        """Like `read`, with an .npz file or with arrays by input name."""
        if isinstance(data, Mapping):
            return Data.of(data, ports, dims, rest=rest)
        return Data.read(data, ports, dims, rest)

    def check_batch(self, batch: int | None) -> None:
        """Errors: InputError if the user expects another batch size; None expects nothing."""
        if batch not in (None, self.batch):
            raise InputError(
                f"--batch {batch}: this step was written for batches of {self.batch} samples; to "
                "change that, write the step again with `onnxpar grad --dim`"
            )

    @property
    def batches(self) -> int:
        """Number of batches in an epoch."""
        return self.left(0)

    def left(self, first: int) -> int:
        """Returns the number of batches that an epoch has after its `first` samples."""
        rest = max(self.count - first, 0)
        return rest // self.batch if self.rest is None else -(-rest // self.batch)

    def digest(self) -> str:
        """Returns a digest of all arrays: of every byte up to 256 MiB, else of 4,096 samples."""
        found = hashlib.sha256()
        arrays = {**self.samples, **self.fixed}
        is_large = sum(a.nbytes for a in arrays.values()) > _DIGESTED
        for name, array in sorted(arrays.items()):
            found.update(f"{name} {array.dtype.str} {array.shape}".encode())
            parts = array
            if is_large and name in self.samples:
                at = np.linspace(0, self.count - 1, 4096).astype(np.int64)
                parts = np.take(array, at, self.dims[name])
            found.update(np.ascontiguousarray(parts).tobytes())
        return found.hexdigest()[:16]

    def left_out(self) -> str:
        """Says how many samples an epoch leaves out, and why; "" if none."""
        left = 0 if self.rest is not None else self.count % self.batch
        used = f"{self.count - left} of {self.count} samples, in {self.batches} batches"
        why = f"the other {left} do not fill a batch"
        return f"each epoch uses {used} of {self.batch}; {why}" if left else ""

    def epoch(self, number: int, seed: int | None, first: int = 0) -> Iterator[dict[str, Array]]:
        """Yields the batches of epoch `number`, after its `first` samples. Each epoch has its own
        order; without a seed, samples are not shuffled."""
        order = np.arange(self.count)
        if seed is not None:
            order = np.random.default_rng([seed, number]).permutation(self.count)
        for i in range(self.left(first)):
            start = first + i * self.batch
            at = order[start : start + self.batch]
            rows = np.resize(at, self.batch)
            batch = {n: np.take(array, rows, self.dims[n]) for n, array in self.samples.items()}
            if self.rest is not None and len(at) < self.batch:
                batch |= self.rest.without(batch, len(at))
            yield {**self.fixed, **batch}
