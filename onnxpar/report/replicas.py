"""Compares the replicas of an output that ranks of a manual program hold, after one run or after
many training steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.report.compare import Closeness, Comparison, Report, compare_arrays
from onnxpar.runtime.session.session import Session
from onnxpar.strategy.manual import REPLICAS
from onnxpar.trainer.trainer import Trainer


def compare_replicas(
    session: Session, feeds: Mapping[str, Array], close: Closeness | None = None
) -> Report:
    """Runs a model whose outputs have all replicas along a first dimension, and compares each
    replica with the first. Errors: InputError; RankError."""
    names = _names(session)
    outputs = session.run(names, feeds) if names else session.run(None, feeds)[:0]
    rows = []
    for name, copies in zip(names, outputs, strict=True):
        own = name.removesuffix(REPLICAS)
        comparisons = [compare_arrays(own, copy, copies[0], close=close) for copy in copies[1:]]
        rows.append(max(comparisons, key=lambda row: row.badness))
    return Report(tuple(rows))


def compare_trained_replicas(
    trainer: Trainer, batches: Iterable[Mapping[str, Array]], rate: float
) -> Report:
    """Takes training steps of a manual program whose outputs have all replicas, and compares these
    after the last step; they must have the same bits. Errors: RankError."""
    names = _names(trainer.session)
    copies: list[Array] = []
    for seed, batch in enumerate(batches):
        copies = trainer.run(names, batch, rate, seed)
    return Report(tuple(_equal(name, own) for name, own in zip(names, copies, strict=True)))


def _names(session: Session) -> list[str]:
    """Returns the names of the outputs that have all replicas of another output."""
    return [port.name for port in session.get_outputs() if port.name.endswith(REPLICAS)]


def _equal(name: str, copies: Array) -> Comparison:
    """Compares all copies with the first one; the error is the largest fraction of elements in
    which a copy differs."""
    count, *shape = copies.shape
    bits = np.frombuffer(copies.tobytes(), np.uint8).reshape(count, copies[0].size, copies.itemsize)
    differs = (bits != bits[0]).any(axis=2)
    share = float(differs.mean(axis=1).max()) if differs.size else 0.0
    return Comparison(name.removesuffix(REPLICAS), copies.dtype.name, tuple(shape), share, 0.0)
