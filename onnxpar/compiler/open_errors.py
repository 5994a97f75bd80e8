"""Adds a remedy to errors about sizes if the model's sizes are open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from onnxpar.errors import SizeError
from onnxpar.load.load import Model


@contextmanager
def at_open_sizes(model: Model) -> Iterator[None]:
    """Adds to a SizeError which sizes are open, and the --dim that fixes them."""
    try:
        yield
    except SizeError as error:
        if model.sizes is None:
            raise
        imagined = ", ".join(f"{k}={v}" for k, v in model.sizes.bindings[0].items())
        raise SizeError(
            f"{error}; if that comes from the model's open sizes (tried here as {imagined}), fix "
            f"them with {model.sizes.flags}"
        ) from None
