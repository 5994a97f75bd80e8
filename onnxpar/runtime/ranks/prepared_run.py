"""A run whose request was checked, so that an equal run needs no checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.runtime.ranks.executor import Request
from onnxpar.runtime.session.bundle import Bundle

Kept = Mapping[str, tuple[int, ...]]
"""The global shapes of kept states, by input."""


@dataclass(frozen=True)
class PreparedRun:
    """A run without run options: what the caller asked for, the dtypes and shapes of the feeds and
    of kept states, and what follows from these: the names of the results, in order, and the request
    to the ranks. A request with the same identity has feeds of the same shapes."""

    asked: Sequence[str] | None
    keeps: bool
    feeds: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
    kept: Kept
    names: Sequence[str]
    request: Request

    @staticmethod
    def of(
        bundle: Bundle,
        asked: Sequence[str] | None,
        keeps: bool,
        feeds: Mapping[str, Any],
        kept: Kept,
        names: Sequence[str],
        request: Request,
    ) -> PreparedRun | None:
        """Returns the run; None if an equal run must be checked again: if a feed is not a tensor of
        numbers, or with run options."""
        if request.options is not None or any(bundle.inputs[name].is_value for name in feeds):
            return None
        if asked is not None and not isinstance(asked, list):
            return None
        specs = {name: (array.dtype, array.shape) for name, array in feeds.items()}
        asked = None if asked is None else list(asked)
        return PreparedRun(asked, keeps, specs, dict(kept), names, request)

    def fits(
        self,
        asked: Sequence[str] | None,
        keeps: bool,
        times: int,
        carried: Mapping[str, str],
        feeds: Mapping[str, Any],
        kept: Kept,
    ) -> bool:
        """True if a call is like this run, and needs no check: the same outputs, repetitions and
        carried states, and feeds of the same dtypes and shapes. The caller checks that it has no
        run options."""
        if keeps is not self.keeps or len(feeds) != len(self.feeds):
            return False
        if times != self.request.times or carried != self.request.carried:
            return False
        for name, (dtype, shape) in self.feeds.items():
            array: Array | None = feeds.get(name)
            if type(array) is not np.ndarray or array.shape != shape or array.dtype != dtype:
                return False
        is_asked = asked is self.asked or (isinstance(asked, list) and asked == self.asked)
        return is_asked and kept == self.kept
