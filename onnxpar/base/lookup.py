"""Graph inputs whose elements are indices into a table, such as token ids, and a check of their
range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxpar.base.arrays import Array


@dataclass(frozen=True)
class Lookup:
    """A graph input (`input`) whose elements are row numbers of a table (`table`, a tensor with
    `rows` rows) that a node (`node`, such as a Gather) reads; valid values are in [-rows, rows).

    table    empty for a loss: then elements are classes, valid in [0, rows)
    ignored  a further valid value of classes, such as -100; None: there is none
    columns  the elements that are indices, at `start`, `start + step`, ... below `stop` along a
             dimension, as (dimension, start, stop, step); empty: all elements
    """

    input: str
    node: str
    table: str
    rows: int
    columns: Sequence[int] = ()
    ignored: int | None = None

    def fault(self, value: Array) -> str | None:
        """Returns a message that names the first element of `value` that is out of range; None if
        there is none."""
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
