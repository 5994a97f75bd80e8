"""The shards of one rank, at the open sizes of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.runtime.ranks.arena import Spec
from onnxpar.runtime.session.bundle import Bundle, Port, Sizes
from onnxpar.runtime.session.shards import PortParts, Shards
from onnxpar.runtime.session.tensors import is_packed


class OwnShards:
    """How inputs and outputs are split, by name, as one rank needs it: the shapes of its shards,
    and which of them it returns. If `everywhere`, every rank returns tensors that all ranks have
    whole; otherwise, only rank 0 does."""

    def __init__(self, bundle: Bundle, rank: int, *, everywhere: bool) -> None:
        self.ports: Mapping[str, Port] = {**bundle.inputs, **bundle.outputs}
        self.passed = bundle.inputs.keys() & bundle.outputs.keys()
        self.sizes: Sizes = ()
        self._symbols = bundle.symbols
        self._rank = rank
        self._everywhere = everywhere
        self._parts_at = PortParts(bundle).at
        self._parts: Mapping[str, Shards] = {}

    def at(self, sizes: Sizes) -> None:
        """Sets the open sizes, on which the shapes of shards depend."""
        self.sizes = tuple(sizes)
        self._parts = self._parts_at(self.sizes)

    def __getitem__(self, name: str) -> Shards:
        """How a tensor is split over all ranks."""
        return self._parts[name]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of this rank's shard; None if a size depends on data."""
        return self._parts[name].local_shape(self._rank)

    def check(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the global shape of a tensor whose shard on this rank has the shape `shape`.
        Errors: RankError if that shape contradicts the layout at the sizes of the run."""
        binding = dict(zip(self._symbols, self.sizes, strict=True))
        return self._parts[name].check_shape(name, self._rank, tuple(shape), binding)

    def are_given(self, name: str) -> bool:
        """True if this rank returns its shard of the tensor: if no lower rank has the same shard,
        or if all ranks return whole tensors."""
        parts = self._parts[name]
        return self._rank in parts.sources or (self._everywhere and parts.is_whole)

    def empty(self, name: str) -> Array:
        """Returns a new array for this rank's shard of a tensor whose size does not depend on data;
        its contents are arbitrary."""
        shape = self.shape(name)
        assert shape is not None, f"{name} has a known size"
        return np.empty(shape, self.ports[name].dtype)

    def direct(self, name: str) -> Spec | None:
        """Returns (dtype, shape) of an output that onnxruntime can write directly to bound memory;
        None for any other, such as an input that is also an output, which onnxruntime does not
        write there."""
        if name not in self.ports:
            return None
        shape = self.shape(name)
        dtype = self.ports[name].dtype
        if shape is None or not self.are_given(name) or name in self.passed or is_packed(dtype):
            return None
        return dtype, shape
