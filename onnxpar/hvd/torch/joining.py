"""Training loops in which ranks have different numbers of steps."""

from __future__ import annotations

import numpy as np

from onnxpar.hvd.arrays import allgather
from onnxpar.hvd.process_sets import ProcessSet
from onnxpar.hvd.torch.averaging import Averaging


class Join:
    """Tells all ranks of a set, before each step, which ranks have a step.

    label           the name of the module, equal on all ranks
    divides_by_all  averages divide by the number of all ranks; otherwise by that of the ranks with
                    a step
    """

    def __init__(self, label: str, process_set: ProcessSet, divides_by_all: bool) -> None:
        self._name = f"{label}, which ranks have a step"
        self._process_set = process_set
        self._divides_by_all = divides_by_all

    def announce(self, averaging: Averaging) -> None:
        """Tells the other ranks that this rank has a step, whose gradients `averaging` will
        reduce."""
        self._exchange(averaging, True)

    def wait(self, averaging: Averaging) -> bool:
        """Tells the other ranks that this rank has no more steps; returns True if another rank has
        a step."""
        return self._exchange(averaging, False)

    def _exchange(self, averaging: Averaging, has_step: bool) -> bool:
        """Tells the ranks whether this rank has a step, and returns True if any rank has one. Sets
        in `averaging` the factor of averages, and the root: the last rank with a step."""
        flags = allgather(np.array([has_step]), self._name, self._process_set)
        ranks = [rank for rank, flag in zip(self._process_set.ranks, flags, strict=True) if flag]
        if ranks:
            averaging.root = ranks[-1]
            averaging.factor = 1.0 if self._divides_by_all else len(flags) / len(ranks)
        return bool(ranks)
