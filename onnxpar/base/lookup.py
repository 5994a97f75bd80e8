"""Inputs whose elements are indices into a table, so that one out of range can be named."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxpar.base.arrays import Array


@dataclass(frozen=True)
class Lookup:
    """An input that a node looks up in a table: its elements are in [-rows, rows)."""

    input: str
    node: str
    table: str
    rows: int

    def fault(self, value: Array) -> str | None:
        """Names the first element of the input that is out of range; None where all are in it."""
        if value.dtype.kind not in "iu":
            return None
        outside = (value >= self.rows) | (value < -self.rows)
        if not outside.any():
            return None
        at = tuple(int(i) for i in np.argwhere(outside)[0])
        where = f" at {list(at)}" if at else ""
        return (
            f"input {self.input!r}: index {value[at]}{where} is out of range for {self.table!r} of "
            f"{self.rows} rows, in node {self.node!r}"
        )
