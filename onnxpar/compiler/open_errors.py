"""Adds the remedy to errors that are due to open sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import onnx_graphsurgeon as gs

from onnxpar.base.errors import SizeError
from onnxpar.graph.open_sizes import OpenSizes
from onnxpar.load.load import Model


@contextmanager
def at_open_sizes(model: Model) -> Iterator[None]:
    """A block in which a SizeError about an open size gets more text: the sizes that were tried,
    and the --dim that fixes them."""
    try:
        yield
    except SizeError as error:
        if model.sizes is None or error.size not in _open_values(model.graph, model.sizes):
            raise
        imagined = ", ".join(f"{k}={v}" for k, v in model.sizes.bindings[0].items())
        raise SizeError(
            f"{error}; the model's sizes are open (tried here as {imagined}): fix them with "
            f"{model.sizes.flags}",
            error.size,
        ) from None


def _open_values(graph: gs.Graph, sizes: OpenSizes) -> set[int]:
    """Returns all sizes of open dimensions in `graph`, which is at the first of the sample
    sizes."""
    tensors, other_tensors = graph.tensors(), sizes.graph(1).tensors()
    return {
        size
        for name in tensors.keys() & other_tensors.keys()
        for size, other in zip(
            tensors[name].shape or (), other_tensors[name].shape or (), strict=False
        )
        if size != other
    }
