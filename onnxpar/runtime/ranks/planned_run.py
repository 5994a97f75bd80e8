"""The request of a run to the ranks, and whether a run repeats one that was already planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.runtime.ranks.arena import Spec
from onnxpar.runtime.session.bundle import Sizes

Places = Mapping[str, int]
"""Where inputs lie that are read in place, by name: offsets or addresses."""
KeptShapes = Mapping[str, tuple[int, ...]]
"""The global shapes of kept states, by the name of the state's input."""
_NONE: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Request:
    """The request of a run.

    fetch    the names of the outputs to return
    keep     True to keep states for the next run
    options  onnxruntime's run options, as data
    sizes    the values of the open sizes
    times    the number of runs
    carried  {input: the output that is its value in the next run}; such tensors are whole on all
             ranks
    """

    fetch: Sequence[str]
    keep: bool = False
    options: Mapping[str, Any] | None = None
    sizes: Sizes = ()
    times: int = 1
    carried: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedRun:
    """A run that is prepared (checked, bound or announced to ranks), and that serves each run for
    which `is_again` is True.

    asked   the request; an equal object requests the same
    feeds   dtype and shape of each input; one that is not a tensor of numbers is left out, so that
            no run repeats this one
    places  where some of the inputs must be; the others may be anywhere
    kept    the shapes of the kept states before the run
    """

    asked: Any
    feeds: Mapping[str, Spec]
    places: Places
    kept: KeptShapes

    @staticmethod
    def of(
        asked: Any,
        feeds: Mapping[str, Any],
        places: Places = _NONE,
        kept: KeptShapes = _NONE,
    ) -> PlannedRun:
        """Returns the plan for a run with this request and these inputs."""
        specs = {n: (a.dtype, a.shape) for n, a in feeds.items() if _is_numeric(a)}
        return PlannedRun(asked, specs, places, dict(kept))

    def is_again(
        self,
        asked: Any,
        feeds: Mapping[str, Any],
        places: Places = _NONE,
        kept: KeptShapes = _NONE,
    ) -> bool:
        """True if a run with this request and these inputs can use this run's preparation: names,
        dtypes, shapes and `places` are equal. The same object `asked` must always come with inputs
        of the same dtypes and shapes."""
        if places != self.places or kept != self.kept or len(feeds) != len(self.feeds):
            return False
        if asked is self.asked:
            return True
        if asked != self.asked:
            return False
        for name, (dtype, shape) in self.feeds.items():
            array: Array | None = feeds.get(name)
            if type(array) is not np.ndarray or array.shape != shape or array.dtype != dtype:
                return False
        return True


def _is_numeric(value: Any) -> bool:
    """True for a tensor of numbers."""
    return isinstance(value, np.ndarray) and value.dtype.kind != "O"
