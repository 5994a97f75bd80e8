"""Values of weights that are read from files on first use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto

from onnxpar.graph.stored import read_stored


class ExternalValues(gs.ir.tensor.LazyValues):  # type: ignore[misc]
    """The value of a weight that is read from a file in the model's folder on first use."""

    def __init__(self, tensor: TensorProto, folder: Path) -> None:
        super().__init__(tensor)
        self.folder = folder

    def load(self) -> np.ndarray[Any, Any]:
        """Reads the value from its file; returns it."""
        return read_stored(self.tensor, self.folder)


class StackedValues(gs.ir.tensor.LazyValues):  # type: ignore[misc]
    """The value of a weight that stacks several weights of one shape along a new first dimension,
    read on first use.

    parts    the protos of the weights, which have the data, or refer to files in `folder`
    weights  the graph's constants that were stacked; their shapes may have more leading dimensions
             of 1
    tensor   (attribute) the proto of the stack, without data
    """

    def __init__(
        self, name: str, parts: Sequence[TensorProto], folder: Path, weights: Sequence[gs.Constant]
    ) -> None:
        first = parts[0]
        dims = [len(parts), *first.dims]
        tensor = TensorProto(name=name, data_type=first.data_type, dims=dims)
        tensor.data_location = TensorProto.EXTERNAL
        super().__init__(tensor)
        self.parts = list(parts)
        self.weights = list(weights)
        self.folder = folder

    def load(self) -> np.ndarray[Any, Any]:
        """Reads the values of all weights; returns them stacked."""
        return np.stack([read_stored(p, self.folder) for p in self.parts])


def stack_of(tensor: gs.Constant) -> StackedValues | None:
    """Returns the value of a constant if it is a stack of weights that has not been read yet; else
    None."""
    return tensor._values if isinstance(tensor._values, StackedValues) else None


def stacked_parts(tensor: gs.Constant) -> list[TensorProto]:
    """Returns the protos of the weights that a constant stacks; empty for any other constant."""
    values: Any = tensor._values
    return values.parts if isinstance(values, StackedValues) else []


def stored_proto(tensor: gs.Constant) -> TensorProto | None:
    """Returns the TensorProto of a weight that has not been read yet; None for a value in
    memory."""
    values: Any = tensor._values
    return values.tensor if isinstance(values, gs.ir.tensor.LazyValues) else None


def peeked(tensor: gs.Constant) -> np.ndarray[Any, Any]:
    """Returns the value of a constant, without keeping it in memory if it had not been read yet."""
    values: Any = tensor._values
    return np.asarray(values.load() if isinstance(values, gs.ir.tensor.LazyValues) else values)
