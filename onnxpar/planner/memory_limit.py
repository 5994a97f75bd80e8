"""Finds plans within a limit on the bytes of a rank (--memory-limit, or the memory of devices); or
the number of ranks that the limit requires."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from onnxpar.base.errors import StrategyError
from onnxpar.base.units import text_of
from onnxpar.compiler.plan import Plan
from onnxpar.cost.topology import Topology
from onnxpar.planner.attempt import Attempt, Planned
from onnxpar.planner.host_memory import PROCESS, SHARE, bytes_of_all_ranks, host_bytes
from onnxpar.search.enough_devices import enough_devices
from onnxpar.search.objective import Objective, OverLimit
from onnxpar.search.search import AUTO, EXHAUSTIVE, PROPAGATION

SLACK, LEAST = 0.005, 0.5
"""Fractions of the real limit. As plans may need more than the search counts, the search gets a
limit that is lowered by at least SLACK each time, and never below LEAST."""
MORE = 16
"""Up to this multiple of `devices` is tried as the number of ranks."""
GROWING = 12.0
"""Seconds that the search for a sufficient number of ranks may take."""
_FEWER_PAGES = (
    "; or give --typical pages=N: the states are caches in pages, whose number a plan assumes, and "
    "--kv-memory decides how many there are when the model runs"
)

Make = Callable[[Attempt], Planned]
"""Makes the plan of an attempt. Errors: OverLimit if no strategy is within the attempt's limit."""


class _FixedError(StrategyError):
    """Raised if a plan exceeds the limit and its strategy is fixed, so that no search can change
    it."""


def within_limit(attempt: Attempt, may_grow: bool, make: Make) -> Planned:
    """Returns a plan within the memory limit of the attempt's objective.

    may_grow  True: if there is no such plan, the error names a number of ranks that would suffice
    make      makes the plan of an attempt

    Errors: StrategyError if there is no such plan. If the states are caches in pages, it says how
    to plan for fewer pages.
    """
    pages = _FEWER_PAGES if attempt.page_size else ""
    patience = attempt.objective.patience.renewed()
    attempt = replace(attempt, objective=replace(attempt.objective, patience=patience))
    try:
        planned = _lower(attempt, make)
    except OverLimit as error:
        raise StrategyError(f"{_advice(error, attempt, may_grow, make)}{pages}") from None
    except _FixedError as error:
        raise StrategyError(f"{error}{pages}") from None
    if patience.is_out:
        planned.plan.notes.append(
            f"the search within the limit stopped after {patience.seconds:.0f} s: there may be "
            "faster strategies within it"
        )
    return planned


@dataclass(frozen=True)
class _Excess:
    """The memory that a plan needs beyond the present memory.

    per_rank  bytes that a rank may hold; if ranks differ, the largest number
    needed    the bytes that are needed, and by whom, as text
    present   the memory that there is, and where, as text
    memories  bytes that each rank may hold, if ranks differ; infinite if unknown
    """

    per_rank: float
    needed: str
    present: str
    memories: tuple[float, ...] = ()


def _excess(plan: Plan, topology: Topology | None) -> _Excess | None:
    """Returns how much memory a plan lacks: on the topology's devices, or without a topology, on
    this host for all ranks together. None if it lacks none, or if the memory is unknown."""
    if plan.mesh.size == 1:
        return None
    if topology is not None and topology.devices:
        return _excess_of_devices(plan, [d.memory for d in topology.devices[: plan.mesh.size]])
    if topology is not None:
        memory = topology.device.memory
        held = sum(plan.memory.values())
        if memory is None or held <= memory:
            return None
        present = f"the {text_of(memory, 'B')} of a device of the topology"
        return _Excess(memory, f"a rank needs {text_of(held, 'B')}", present)
    memory, held = host_bytes(), bytes_of_all_ranks(plan)
    if memory is None or held <= SHARE * memory:
        return None
    ranks = plan.mesh.size
    needed = f"the {ranks} ranks need {text_of(held, 'B')} together"
    return _Excess(SHARE * memory / ranks, needed, f"the {text_of(memory, 'B')} of this host")


def _excess_of_devices(plan: Plan, memories: Sequence[float | None]) -> _Excess | None:
    """`_excess` for devices that differ: for the rank that exceeds the memory of its device
    most."""
    held = _held_by_rank(plan)
    over = [
        (need / memory, rank, need, memory)
        for rank, (need, memory) in enumerate(zip(held, memories, strict=True))
        if memory is not None and need > memory
    ]
    if not over:
        return None
    _, rank, need, memory = max(over)
    return _Excess(
        max(m for m in memories if m is not None),
        f"rank {rank} needs {text_of(need, 'B')}",
        f"the {text_of(memory, 'B')} of its device in the topology",
        tuple(math.inf if m is None else m for m in memories),
    )


def _held_by_rank(plan: Plan) -> list[int]:
    """Returns the bytes that each rank needs."""
    if plan.loads:
        return [load.held for load in plan.loads]
    return [sum(plan.memory.values())] * plan.mesh.size


def _held(plan: Plan, objective: Objective) -> float:
    """Returns the bytes of the rank that is nearest to its limit, in units of the rank with the
    largest limit."""
    if not plan.loads:
        return sum(plan.memory.values())
    return max(load.held * objective.weight_of(rank) for rank, load in enumerate(plan.loads))


def within_hardware(planned: Planned, topology: Topology | None, make: Make) -> Planned:
    """Returns a plan that fits into the memory of the topology's devices, or without a topology, of
    this host: `planned` itself if it fits. If the user's strategy leaves no choice, or no plan
    fits, returns `planned` with a note."""
    plan, present = planned.plan, host_bytes()
    ranks = plan.mesh.size
    if topology is None and present is not None and ranks * PROCESS > SHARE * present:
        plan.notes.append(
            f"the processes of {ranks} ranks alone need {text_of(ranks * PROCESS, 'B')}, more than "
            f"the {text_of(present, 'B')} of this host; --topology FILE plans for several hosts"
        )
        return planned
    excess = _excess(plan, topology)
    if excess is None:
        return planned
    said = f"{excess.needed}, more than {excess.present}"
    if plan.preset not in (AUTO, EXHAUSTIVE):
        plan.notes.append(
            f"{said}; to split the weights, give --preset tensor-parallel or --memory-limit SIZE"
        )
        return planned
    objective = planned.attempt.objective
    patience = objective.patience.renewed()
    limited = replace(
        objective, memory=excess.per_rank, memories=excess.memories, patience=patience
    )
    try:
        fitting = _lower(replace(planned.attempt, objective=limited, whole={}), make)
    except OverLimit:
        plan.notes.append(f"{said}, and the search found no strategy that fits: use more hosts")
        return planned
    most = f"at most {text_of(excess.per_rank, 'B')}, to fit {excess.present}"
    if excess.memories:
        most = "no more than its device has"
    fitting.plan.notes.append(
        f"each rank needs {most}; with the fastest strategy, {excess.needed}. --memory-limit sets "
        "another limit"
    )
    return fitting


def _advice(error: OverLimit, attempt: Attempt, may_grow: bool, make: Make) -> str:
    """Returns the error message for the case that no strategy over this many ranks is within the
    limit, with a remedy."""
    devices, limit = attempt.devices, attempt.objective.memory or 0
    text = f"{error}, more than --memory-limit {text_of(limit, 'B')}"
    states = _of_states(error.states)
    if error.least:
        text += f" (with any strategy, it would need at least {text_of(error.least, 'B')}{states})"
    if devices is None or not may_grow:
        return f"{text}: raise the limit, or give a mesh of more ranks"
    enough, is_fewest, is_sure = _enough(attempt, devices, make, error.least or 0.0)
    if enough is not None:
        fewest = "the fewest found that suffice" if is_fewest else "which suffice"
        return f"{text}: raise the limit, or give --devices {enough}, {fewest}"
    if is_sure:
        return (
            f"{text}: raise the limit; up to {MORE * devices} ranks were tried and do not suffice"
        )
    return f"{text}: raise the limit; the time to look for a sufficient number of ranks ran out"


def _lower(attempt: Attempt, make: Make) -> Planned:
    """Returns a plan within the memory limit of the attempt. The search cannot count the bytes of
    reshards, so that its plan may exceed the limit; then it searches again with a lower one.
    Errors: OverLimit; _FixedError if no search decides."""
    objective = attempt.objective
    limit = most = objective.memory or math.inf
    over: OverLimit | None = None
    while most >= LEAST * limit and not (over and objective.patience.is_out):
        lowered = replace(attempt, objective=replace(objective, memory=most))
        try:
            with objective.patience.spending() if over else nullcontext():
                planned = make(lowered)
        except OverLimit as error:
            raise over or error from None
        held = _held(planned.plan, objective)
        if held <= limit:
            return planned
        decided = planned.ctx.request.preset or PROPAGATION
        states = _of_states(planned.plan.memory["states_per_rank"])
        needed = f"a rank would need {text_of(held, 'B')}{states}"
        over = OverLimit(f"{decided} over {planned.plan.mesh}: {needed}", None)
        if decided not in (AUTO, EXHAUSTIVE):
            text = f"{over}, more than --memory-limit {text_of(limit, 'B')}"
            raise _FixedError(
                f"{text}: raise the limit, or let --search {AUTO} choose the strategy"
            )
        most -= max(held - limit, SLACK * limit)
    assert over is not None
    raise over


def _of_states(held: float) -> str:
    """Returns `, N bytes of it for states`; empty if there are no states."""
    return f", {text_of(held, 'B')} of it for states" if held else ""


class _OutOfTime(Exception):
    """Raised when the time for finding a number of ranks is over."""


def _enough(
    attempt: Attempt, devices: int, make: Make, least: float
) -> tuple[int | None, bool, bool]:
    """Finds a number of ranks for which a plan is within the limit: tries multiples of `devices`
    first, then fewer ranks. Returns (that number or None, True if it is the fewest ranks, True if
    there was time to try all numbers).

    least  bytes that the plan over `devices` ranks needs at least, to skip numbers that are too
           small
    """
    objective = attempt.objective
    patience = objective.patience.renewed(GROWING)
    quick = replace(objective, any_fit=True, patience=patience)

    def fits(count: int) -> bool:
        if patience.is_out:
            raise _OutOfTime
        patience.tell(f"{count} ranks")
        try:
            _lower(replace(attempt, objective=quick, devices=count), make)
        except StrategyError:
            if patience.is_out:
                raise _OutOfTime from None
            return False
        return True

    first = max(devices + 1, math.ceil(devices * least / (objective.memory or math.inf)))
    high: int | None = None
    with patience.spending():
        try:
            multiples = [devices * 2**i for i in range(1, MORE.bit_length())]
            high = next((n for n in multiples if n >= first and fits(n)), None)
            if high is None:
                return None, False, True
            return enough_devices(fits, first, high), True, True
        except _OutOfTime:
            return high, False, False
