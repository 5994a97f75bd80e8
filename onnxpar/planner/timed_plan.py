"""Corrects the predicted times of a plan for this host by timing the unsplit model."""

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
"""The planner runs a model only if its weights and states have at most MOST_BYTES, and a run is
predicted to take at most LONGEST seconds."""


def time_here(plan: Plan, path: Path, topology: Topology, tell: Callable[[str], object]) -> None:
    """If the topology was measured on this host and the model is small and fast, times the unsplit
    model at the plan's typical sizes, and corrects the predicted times. Calls `tell` with a text
    before, and with an empty text after."""
    times = plan.predicted
    if times is None or topology.origin != MEASURED:
        return
    zeros = {name for name, initial in plan.initial.items() if initial == ZERO}
    specs = list(_specs(plan, zeros))
    states = sum(prod(s) * np.dtype(d).itemsize for name, d, s in specs if name in zeros)
    size = sum(weight.bytes for weight in plan.weights) + states
    if size > MOST_BYTES or times.one_rank > LONGEST:
        return
    tell("timing the unsplit model")
    ranges = {name: plan.ranges[name] for name, *_ in specs if name in plan.ranges.keys() - zeros}
    runs = time_unsplit(path, specs, ranges, plan.mesh.size, zeros)
    tell("")
    if runs is not None:
        plan.predicted = times.timed(runs.alone, runs.beside * topology.turns)


def _specs(plan: Plan, zeros: Collection[str]) -> Iterator[tuple[str, str, list[Any]]]:
    """Yields (name, dtype, typical shape) of each input that needs a value in these runs."""
    sizes = plan.typical[0][0] if plan.typical else {}
    for port in (p for p in plan.inputs if not p.has_default or p.name in zeros):
        shape = port.shape if port.open is None else port.open.shape
        numbers = [Polynomial.parse(s).at(sizes) if isinstance(s, str) else s for s in shape or ()]
        yield port.name, port.dtype or port.type, numbers
