"""Compares the replicas of outputs of a training step with each other after many steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.checking.compare import Comparison, Report
from onnxpar.manual.manual import REPLICAS
from onnxpar.trainer.trainer import Trainer


def compare_copies(trainer: Trainer, batches: Iterable[Mapping[str, Array]], rate: float) -> Report:
    """Takes steps of a manual program that gathers the replicas of its outputs; after the last
    step, all replicas must have the same bits. Errors: RankError."""
    names = [port.name for port in trainer.session.get_outputs() if port.name.endswith(REPLICAS)]
    copies: list[Array] = []
    for seed, batch in enumerate(batches):
        copies = trainer.run(names, batch, rate, seed)
    return Report(tuple(_equal(name, own) for name, own in zip(names, copies, strict=True)))


def _equal(name: str, copies: Array) -> Comparison:
    """A comparison whose error is the largest share of elements in which a copy differs from the
    first."""
    count, *shape = copies.shape
    bits = np.frombuffer(copies.tobytes(), np.uint8).reshape(count, copies[0].size, copies.itemsize)
    differs = (bits != bits[0]).any(axis=2)
    share = float(differs.mean(axis=1).max()) if differs.size else 0.0
    return Comparison(name.removesuffix(REPLICAS), copies.dtype.name, tuple(shape), share, 0.0)
