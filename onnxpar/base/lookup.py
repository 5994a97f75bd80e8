"""Inputs whose elements are indices into a table, and a check of their range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxpar.base.arrays import Array


@dataclass(frozen=True)
class Lookup:
    """An input whose elements index the rows of a node's table; valid indices are in [-rows,
    rows). Those of a loss, whose `table` is empty, are classes in [0, rows), or `ignored`.

    columns  the elements that do so, if not all: those at `start`, `start + step`, ... below `stop`
             along a dimension, as (dimension, start, stop, step)
    """

    input: str
    node: str
    table: str
    rows: int
    columns: Sequence[int] = ()
    ignored: int | None = None

    def fault(self, value: Array) -> str | None:
        """A message that names the first element out of range; None if all elements are in
        range."""
        if value.dtype.kind not in "iu" or (self.columns and value.ndim <= self.columns[0]):
            return None
        outside = (value >= self.rows) | (value < (-self.rows if self.table else 0))
        if self.ignored is not None:
            outside &= value != self.ignored
        if self.columns:
            dim, *bounds = self.columns
            read = np.zeros(value.shape[dim], bool)
            read[slice(*bounds)] = True
            outside &= np.expand_dims(read, [d for d in range(value.ndim) if d != dim])
        if not outside.any():
            return None
        at = tuple(int(i) for i in np.argwhere(outside)[0])
        where = f" at {list(at)}" if at else ""
        if not self.table:
            more = "" if self.ignored is None else f", or {self.ignored} for none"
            return (
                f"input {self.input!r}: label {value[at]}{where} is none of the {self.rows} "
                f"classes; give a number from 0 to {self.rows - 1}{more}"
            )
        return (
            f"input {self.input!r}: index {value[at]}{where} is out of range for {self.table!r} of "
            f"{self.rows} rows, in node {self.node!r}"
        )
