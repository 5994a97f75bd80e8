"""Training data that a program has as objects: sequences of samples, loaders, functions that return
them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.trainer.needs import Chunk, Needs, check_keys
from onnxpar.trainer.sources import Shard, Shards, Source

Items = Iterable[Mapping[str, Any]]
"""Samples or batches, each a mapping from input names to values."""
Samples = (
    str
    | os.PathLike[str]
    | Mapping[str, Any]
    | Sequence[Mapping[str, Any]]
    | Items
    | Callable[[], Items]
)
"""Training data: a path, arrays by input name, a sequence of samples, an iterable of samples or
batches, or a function that returns such an iterable."""


def source_of(data: Any, needs: Needs) -> Source:
    """Returns the samples of an object. An object with a length and numbered samples gives them in
    any order; an iterable, in its own order. Errors: InputError for an object that is neither."""
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        if not len(data):
            raise InputError("data has no samples; its length is 0")
        try:
            first = data[0]
        except NotImplementedError:  # of torch's IterableDataset
            return Stream(lambda: data, needs)
        except (LookupError, TypeError) as error:
            raise InputError(
                f"data is a {type(data).__name__} without samples 0, 1, ...: {error!r}; give "
                "arrays by input name, or a list of dicts"
            ) from None
        check_keys(first, needs.ports, "sample 0 of the data")
        if not needs.is_sample(first):
            return Stream(lambda: data, needs)
        return Shards([Shard(len(data), lambda: lambda rows: _taken(data, rows, needs))], str)
    if isinstance(data, Iterator):
        raise InputError(
            f"data is a {type(data).__name__}, which can be read only once; give the function that "
            "makes it, so that each epoch reads it anew"
        )
    if not isinstance(data, Iterable) and not callable(data):
        raise InputError(
            f"data is a {type(data).__name__}; give a path, arrays by input name, or an iterable "
            "of dicts, such as a DataLoader"
        )
    return Stream(data if not isinstance(data, Iterable) else lambda: data, needs)


def _taken(data: Sequence[Any], rows: Array, needs: Needs) -> Chunk:
    """Returns the samples of `data` with the numbers `rows`, as arrays by input name."""
    numbers = [int(i) for i in rows]
    if hasattr(data, "__getitems__"):  # torch's optional method for several at once
        samples = data.__getitems__(numbers)
    else:
        samples = [data[i] for i in numbers]
    return needs.stacked(samples, [f"sample {i} of the data" for i in rows])


@dataclass(frozen=True)
class Stream:
    """Samples in an order of their own, which cannot be shuffled. `make` returns the samples or
    batches of an epoch."""

    make: Callable[[], Items]
    needs: Needs

    @property
    def count(self) -> None:
        """None: only the end of an epoch tells the number of samples."""

    def digest(self) -> str:
        """Returns "": the samples have no digest."""
        return ""

    def chunks(self, number: int, seed: int | None, first: int, size: int) -> Iterator[Chunk]:
        """Yields the samples of epoch `number` as they come, without the `first` ones, in chunks of
        up to `size`. Calls `set_epoch(number)` of an object that has this method, as samplers and
        data sets of PyTorch and Hugging Face have. The seed is not used."""
        items = self.make()
        if hasattr(items, "set_epoch"):
            items.set_epoch(number)
        for i, item in enumerate(items):
            chunk = self._chunk(item, f"item {i} of the data")
            count = self.needs.count(chunk)
            for start in range(min(first, count), count, size):
                yield self.needs.take(chunk, np.arange(start, min(start + size, count)))
            first = max(first - count, 0)

    def _chunk(self, item: Mapping[str, Any], source: str) -> Chunk:
        """Returns an item, which is one sample or a batch of any size, as arrays by input name.
        `source` names the item in errors. Errors: InputError."""
        check_keys(item, self.needs.ports, source)
        if self.needs.is_sample(item):
            return self.needs.stacked([item], [source])
        return self.needs.chunk(item, source)
