"""Gives a plan for this host the times of runs of the unsplit model here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.compiler.plan import Plan
from onnxpar.cost.host import MEASURED
from onnxpar.cost.topology import Topology
from onnxpar.cost.unsplit_runs import time_unsplit
from onnxpar.layout.symbols import Polynomial
from onnxpar.runtime.states.first_states import ZERO

MOST_BYTES, LONGEST = 256 << 20, 0.5
"""Most bytes of weights and states of a model that is run to make a plan, and the longest predicted
run, in seconds."""


def time_here(made: Plan, path: Path, topology: Topology, tell: Callable[[str], object]) -> None:
    """Runs the unsplit model at the plan's typical sizes, and corrects the predicted times, if the
    topology is that of this host and the model is small and fast. Calls `tell` with a text before,
    and with an empty one after the runs.
    """
    told = made.predicted
    if told is None or topology.origin != MEASURED:
        return
    zeros = {name for name, initial in made.initial.items() if initial == ZERO}
    specs = list(_specs(made, zeros))
    states = sum(prod(s) * np.dtype(d).itemsize for name, d, s in specs if name in zeros)
    held = sum(weight.bytes for weight in made.weights) + states
    if held > MOST_BYTES or told.one_rank > LONGEST:
        return
    tell("timing the unsplit model")
    ranges = {name: made.ranges[name] for name, *_ in specs if name in made.ranges.keys() - zeros}
    found = time_unsplit(path, specs, ranges, made.mesh.size, zeros)
    tell("")
    if found is not None:
        made.predicted = told.timed(found.alone, found.beside * topology.turns)


def _specs(made: Plan, zeros: Collection[str]) -> Iterator[tuple[str, str, list[Any]]]:
    """Yields the name, the dtype and the typical shape of each input of which the file has no
    value."""
    sizes = made.typical[0][0] if made.typical else {}
    for port in (p for p in made.inputs if not p.has_default or p.name in zeros):
        shape = port.shape if port.open is None else port.open.shape
        numbers = [Polynomial.parse(s).at(sizes) if isinstance(s, str) else s for s in shape or ()]
        yield port.name, port.dtype or port.type, numbers
