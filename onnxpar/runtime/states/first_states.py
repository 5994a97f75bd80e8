"""The initial values of a rank's states: zeros, or shards of values stored with the model."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import ModelError
from onnxpar.runtime.session.bundle import Bundle

if TYPE_CHECKING:  # ranks without stored states need no onnx
    from onnx import TensorProto

STORED, ZERO = "stored", "zero"
"""Kinds of initial values: in the rank's states file, or zeros."""


class FirstStates:
    """The initial values of one rank's states. Reads each value when it is asked for, and keeps
    none in memory."""

    def __init__(self, bundle: Bundle, rank: int) -> None:
        self._bundle = bundle
        self._rank = rank

    def __contains__(self, name: object) -> bool:
        return name in self._bundle.initial

    def value(self, name: str, shape: tuple[int, ...] | None) -> Array:
        """Returns this rank's shard of a state's initial value; `shape` is the shard's shape, None
        if unknown. Errors: ModelError if the state has no initial value."""
        kind = self._bundle.initial.get(name)
        if kind is None or (kind != STORED and shape is None):
            raise ModelError(f"state {name!r} has no initial value; feed it")
        if kind != STORED:
            return np.zeros(shape or (), self._bundle.inputs[name].dtype)
        from onnx import TensorProto, numpy_helper

        proto = TensorProto()
        proto.CopyFrom(self._stored[name])
        array: Array = numpy_helper.to_array(proto, str(self._bundle.path))
        return array

    def is_zero(self, name: str) -> bool:
        """True if the initial value of a state is zeros."""
        return self._bundle.initial.get(name) == ZERO

    def place(self, name: str) -> tuple[Path, int] | None:
        """Returns (file, offset) of a state's initial value in a file of weights; None if the value
        is zeros, or in the states file itself."""
        if self._bundle.initial.get(name) != STORED:
            return None
        from onnxpar.graph.stored import external_location

        proto = self._stored[name]
        if proto.data_location != proto.EXTERNAL:
            return None
        location, offset, _ = external_location(proto)
        return self._bundle.path / location, offset

    @cached_property
    def _stored(self) -> dict[str, TensorProto]:
        """The stored initial values of this rank's shards, by state; large data stay in their file
        until `value` reads them."""
        import onnx

        file = self._bundle.states_file(self._rank)
        model = onnx.load(str(file), load_external_data=False)
        return {tensor.name: tensor for tensor in model.graph.initializer}
