"""Plans that keep to a limit on what a rank holds, or how many ranks would do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from onnxpar.errors import StrategyError
from onnxpar.passes.pass_ import PassContext
from onnxpar.plan import Plan
from onnxpar.quantities import text_of
from onnxpar.search.aim import Aim, OverLimit
from onnxpar.search.enough_devices import enough_devices
from onnxpar.search.search import AUTO, EXHAUSTIVE, PROPAGATION

SLACK, LEAST = 0.005, 0.5
"""Shares of a limit by which the search aims lower at least, and to which at most."""
MORE = 16
"""Times as many ranks are tried at most."""

Made = tuple[Plan, PassContext]
Make = Callable[[Aim, int | None], Made]
"""The plan for an aim, over so many ranks."""


def within_limit(aim: Aim, devices: int | None, may_grow: bool, make: Make) -> tuple[Aim, Made]:
    """The plan that keeps to the limit of `aim`, and the aim that it was made for. Errors:
    StrategyError where there is none, with the fewest ranks that would do where their number
    `may_grow`."""
    try:
        return _lower(aim, devices, make)
    except OverLimit as error:
        more = f"{error}, more than --memory-limit {text_of(aim.memory or 0, 'B')}: raise it"
        if not may_grow or devices is None:
            raise StrategyError(f"{more}, or give a mesh of more ranks") from None
        enough = _enough(aim, devices, make, error.least or 0.0)
        if enough is None:
            raise StrategyError(f"{more}; up to {MORE * devices} ranks do not help") from None
        raise StrategyError(
            f"{more}, or give --devices {enough}, the fewest that would do"
        ) from None


def _lower(aim: Aim, devices: int | None, make: Make) -> tuple[Aim, Made]:
    """The search reckons with what ranks hold before reshards are in their places, so that it may
    have to aim lower. Errors: OverLimit; StrategyError where something else decides."""
    limit = most = aim.memory or math.inf
    over: OverLimit | None = None
    while most >= LEAST * limit:
        try:
            lowered = replace(aim, memory=most)
            made, ctx = make(lowered, devices)
        except OverLimit as error:
            raise over or error from None
        held = sum(made.memory.values())
        if held <= limit:
            return lowered, (made, ctx)
        decided = ctx.preset or PROPAGATION
        over = OverLimit(
            f"{decided} over {made.mesh}: a rank would hold {text_of(held, 'B')}", None
        )
        if decided not in (AUTO, EXHAUSTIVE):
            text = f"{over}, more than --memory-limit {text_of(limit, 'B')}"
            raise StrategyError(f"{text}: raise it, or leave it to --search {AUTO}")
        most -= max(held - limit, SLACK * limit)
    assert over is not None
    raise over


def _enough(aim: Aim, devices: int, make: Make, least: float) -> int | None:
    """The fewest ranks of which a plan keeps to the limit."""

    def fits(count: int) -> bool:
        try:
            _lower(aim, count, make)
        except StrategyError:
            return False
        return True

    share = least / (aim.memory or math.inf)
    first = max(devices + 1, math.ceil(devices * share))
    return enough_devices(fits, first, MORE * devices)
