"""Groups of consecutive classes; a step samples the same number from each group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxpar.training.gradients.value import Value


@dataclass(frozen=True)
class ClassGroups:
    """Divides `classes` into `count` groups as equal as possible, the larger ones first.

    The larger groups and the other groups are two segments of the classes. Each segment is divided
    evenly, so ranks that share groups hold whole groups of both.
    """

    classes: int
    count: int

    @property
    def size(self) -> int:
        """The number of classes of the largest group."""
        return -(-self.classes // self.count)

    @property
    def least(self) -> int:
        """The number of classes of the smallest group."""
        return self.classes // self.count

    @property
    def _larger(self) -> int:
        """The number of groups that are larger than the others."""
        return self.classes % self.count

    def apart(self, table: Value) -> Value:
        """Returns a table [class, ...] as [group, class of the group, ...], with zeros where a
        group is smaller."""
        rest = table.shape[1:]
        if not self._larger:
            return table.reshape([self.count, self.size, *rest])
        first = self._larger * self.size
        parts = self._split(table, [first, self.classes - first])
        larger = parts[0].reshape([self._larger, self.size, *rest])
        others = parts[1].reshape([self.count - self._larger, self.least, *rest])
        none = [0] * len(rest)
        others = others.pad([0, 0, *none], [0, 1, *none])
        return larger.op("Concat", others, axis=0)

    def joined(self, table: Value) -> Value:
        """The inverse of `apart`: returns a table [group, class of the group, ...] as [class,
        ...]."""
        rest = table.shape[2:]
        if not self._larger:
            return table.reshape([self.classes, *rest])
        larger, others = self._split(table, [self._larger, self.count - self._larger])
        others = others.slice(0, self.least, 1)
        parts = [x.reshape([x.shape[0] * x.shape[1], *rest]) for x in (larger, others)]
        return parts[0].op("Concat", parts[1], axis=0)

    @staticmethod
    def _split(table: Value, sizes: list[int]) -> list[Value]:
        """Returns the parts of these sizes along the first dimension."""
        return table.builder.add_each("Split", [table, np.array(sizes, np.int64)], 2, axis=0)
