"""Compares the replicas of an output on several ranks with each other."""

from __future__ import annotations

from collections.abc import Mapping

from onnxpar.base.arrays import Array
from onnxpar.checking.compare import Closeness, Report, compare_arrays
from onnxpar.manual.manual import REPLICAS
from onnxpar.runtime.session import Session


def compare_replicas(
    session: Session, feeds: Mapping[str, Array], close: Closeness | None = None
) -> Report:
    """Runs a model that gathers the replicas of its outputs, and compares each with the first.

    Errors: InputError; RankError.
    """
    names = [a.name for a in session.get_outputs() if a.name.endswith(REPLICAS)]
    outputs = session.run(names, feeds) if names else session.run(None, feeds)[:0]
    rows = []
    for name, copies in zip(names, outputs, strict=True):
        own = name.removesuffix(REPLICAS)
        found = [compare_arrays(own, copy, copies[0], close=close) for copy in copies[1:]]
        rows.append(max(found, key=lambda row: row.badness))
    return Report(tuple(rows))
