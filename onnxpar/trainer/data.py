"""Batches of training data: samples of an .npz file, in an order that a seed decides."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.errors import InputError
from onnxpar.runtime.feeds import read_npz


@dataclass(frozen=True)
class Data:
    """Samples by input: arrays whose first dimension counts them, and others, which every batch
    has as they are."""

    samples: Mapping[str, Array]
    fixed: Mapping[str, Array]
    batch: int
    count: int

    @staticmethod
    def read(path: str | os.PathLike[str], ports: Sequence[Any]) -> Data:
        """Reads what the inputs `ports` (`NodeArg`s) need from a file of arrays by input name.

        Errors: InputError for an array that is missing, of another type or shape, or where there
        are fewer samples than a batch has.
        """
        return Data.of(read_npz(Path(path)), ports, str(path))

    @staticmethod
    def of(arrays: Mapping[str, Array], ports: Sequence[Any], source: str = "data") -> Data:
        """The same of arrays in memory."""
        samples, fixed = {}, {}
        batch = int(ports[0].shape[0]) if ports and ports[0].shape else 1
        for port in ports:
            if port.name not in arrays:
                have = ", ".join(sorted(arrays))
                raise InputError(f"{source} has no array {port.name!r}; it has {have}")
            array = arrays[port.name]
            if array.shape == tuple(port.shape) and (not port.shape or port.shape[0] != batch):
                fixed[port.name] = array
            elif array.shape[1:] == tuple(port.shape[1:]) and port.shape[:1] == [batch]:
                samples[port.name] = array
            else:
                wanted = ", ".join(["samples", *map(str, port.shape[1:])])
                raise InputError(
                    f"{source}: {port.name!r} is {list(array.shape)}, expects [{wanted}]"
                )
        counts = {name: len(array) for name, array in samples.items()}
        if len(set(counts.values())) > 1:
            text = ", ".join(f"{n} of {name!r}" for name, n in counts.items())
            raise InputError(f"{source} has different numbers of samples: {text}")
        count = next(iter(counts.values()), 0)
        if not samples or count < batch:
            raise InputError(f"{source} has {count} samples, a batch has {batch}")
        return Data(samples, fixed, batch, count)

    @staticmethod
    def given(data: str | os.PathLike[str] | Mapping[str, Array], ports: Sequence[Any]) -> Data:
        """What a caller gives: a file, or arrays by input name."""
        return Data.of(data, ports) if isinstance(data, Mapping) else Data.read(data, ports)

    def check_batch(self, batch: int | None) -> None:
        """Errors: InputError where a caller expects batches of another size."""
        if batch not in (None, self.batch):
            raise InputError(
                f"--batch {batch}: the step takes {self.batch} samples; write another with "
                "`onnxpar grad --dim`"
            )

    @property
    def batches(self) -> int:
        """How many whole batches there are; what is left over is dropped."""
        return self.count // self.batch

    def epoch(self, number: int, seed: int | None, first: int = 0) -> Iterator[dict[str, Array]]:
        """The batches of an epoch from the one numbered `first` on; shuffled unless the seed is
        None, in an order of its own for each epoch."""
        order = np.arange(self.count)
        if seed is not None:
            order = np.random.default_rng([seed, number]).permutation(self.count)
        for i in range(first, self.batches):
            at = order[i * self.batch : (i + 1) * self.batch]
            yield {**self.fixed, **{name: array[at] for name, array in self.samples.items()}}
