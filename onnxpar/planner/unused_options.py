"""Refuses options that would have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from onnxpar.base.errors import StrategyError
from onnxpar.layout.mesh import Mesh
from onnxpar.planner.option_entry import DUMP, MANUAL_PROGRAM, table
from onnxpar.planner.option_table import PlanOptions
from onnxpar.planner.options import Options
from onnxpar.search.objective import LATENCY
from onnxpar.search.search import AUTO, EXHAUSTIVE


def refuse_for_manual(options: Options) -> None:
    """Raises StrategyError for an option that has no effect on a manual program, whose layouts and
    collectives are written already."""
    for flag in _without_effect(options, MANUAL_PROGRAM):
        instead = _INSTEAD if flag in ("fusion", "bucket-mb") else "leave it out"
        raise StrategyError(
            f"--{flag}: a manual program's layouts and collectives stay as they are written; "
            f"{instead}"
        )


def _without_effect(options: Options, kind: str) -> Iterator[str]:
    """Yields the flags of options that the user gave, and that have no effect on this kind of
    model."""
    defaults = Options()
    for named in (n for n in table(PlanOptions).values() if kind in n.option.decided):
        value, default = named.value(options), named.value(defaults)
        if value != default and (value or default):
            yield named.flag


_INSTEAD = (
    "to fuse collectives, Concat their inputs and Split the output of the one that is left, or "
    "give `onnxpar shard` the unsplit model with a preset such as zero1, which fuses them"
)


def refuse_groups(options: Options) -> None:
    """Raises StrategyError if the strategy names groups, which only manual programs have."""
    if options.strategy is not None and options.strategy.groups:
        raise StrategyError(
            f"{options.strategy.source}: groups are for --preset manual; leave them out, and split "
            "tensors over mesh axes"
        )


def refuse_for_dump(options: Options, path: Path, mesh: Mesh) -> None:
    """Raises StrategyError for an option that has no effect on a dump, in which sizes, mesh and
    layouts are decided."""
    for flag in _without_effect(options, DUMP):
        if flag in ("mesh", "devices") and getattr(options, flag) in (mesh, mesh.size):
            continue
        raise StrategyError(
            f"--{flag}: {path} was dumped for the mesh {mesh}, and its layouts are decided; "
            f"leave --{flag} out"
        )


def refuse_without_plan(options: Options) -> None:
    """Raises StrategyError for an option that needs a whole plan; `opt` runs passes only."""
    is_searched = options.preset is None and options.strategy is None
    name = _first_of(
        {
            "memory-limit": options.objective.memory is not None and not is_searched,
            "strict": options.strict,
        }
    )
    if name is not None:
        raise StrategyError(
            f"--{name}: opt runs single passes and does not check it; leave it out, or use "
            "`onnxpar plan`"
        )


def refuse_without_search(options: Options, is_annotated: bool = False) -> None:
    """Raises StrategyError for an option of the search if there is no search, because a preset, a
    strategy or the model's annotations (`is_annotated`) decide."""
    is_open = options.preset is None and options.strategy is None and not is_annotated
    if options.search in (AUTO, EXHAUSTIVE) or (options.search is None and is_open):
        return
    name = _first_of(
        {
            "objective": options.objective.goal != LATENCY,
            "untied": options.objective.untied,
        }
    )
    if name is None:
        return
    instead = "add"
    if options.preset is not None or options.search is not None:
        named = "preset" if options.preset is not None else "search"
        instead = f"leave it out, or replace --{named} {getattr(options, named)} by"
    raise StrategyError(
        f"--{name} applies to the search, which does not run here: {instead} --search {AUTO}"
    )


def _first_of(is_set: Mapping[str, bool]) -> str | None:
    """Returns the first name whose value is True; None if there is none."""
    return next((name for name, value in is_set.items() if value), None)
