"""Corrects the predicted times of a plan for this host by runs of the unsplit model."""

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
"""Most bytes of weights and states, and the longest predicted run in seconds, of a model that the
planner runs."""


def time_here(plan: Plan, path: Path, topology: Topology, tell: Callable[[str], object]) -> None:
    """Runs the unsplit model at the plan's typical sizes, and corrects the predicted times, if the
    topology is that of this host and the model is small and fast. Calls `tell` with a text before
    the runs, and with an empty text after them."""
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
    """Yields the name, the dtype and the typical shape of each input without a value in the
    file."""
    sizes = plan.typical[0][0] if plan.typical else {}
    for port in (p for p in plan.inputs if not p.has_default or p.name in zeros):
        shape = port.shape if port.open is None else port.open.shape
        numbers = [Polynomial.parse(s).at(sizes) if isinstance(s, str) else s for s in shape or ()]
        yield port.name, port.dtype or port.type, numbers
