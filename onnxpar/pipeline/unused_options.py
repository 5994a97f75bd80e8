"""Refuses options that would have no effect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxpar.errors import StrategyError
from onnxpar.lowering.compression import NONE
from onnxpar.search.objective import LATENCY
from onnxpar.search.search import AUTO, EXHAUSTIVE

if TYPE_CHECKING:
    from onnxpar.pipeline.options import Options


def refuse_for_manual(options: Options) -> None:
    """Errors: StrategyError for an option that has no effect on a manual program, which has layouts
    and collectives of its own."""
    given = {
        "compression": options.compression not in (None, NONE),
        "fusion": options.fusion is not None,
        "bucket-mb": options.bucket_bytes is not None,
        "search": options.search is not None,
        "objective": options.objective.goal != LATENCY,
        "memory-limit": options.objective.memory is not None,
        "untied": options.objective.untied,
        "topology": options.topology is not None,
        "configuration": options.configuration is not None,
        "strict": options.strict,
    }
    for name, is_given in given.items():
        if is_given:
            instead = _INSTEAD if name in ("fusion", "bucket-mb") else "leave it out"
            raise StrategyError(
                f"--{name}: a manual program's layouts and collectives stay as they are written; "
                f"{instead}"
            )


_INSTEAD = (
    "to fuse collectives, Concat their inputs and Split the output of the one that is left, or "
    "give `onnxpar shard` the unsplit model with a preset such as zero1, which fuses them"
)


def refuse_groups(options: Options) -> None:
    """Errors: StrategyError if the strategy names groups, which only manual programs have."""
    if options.strategy is not None and options.strategy.groups:
        raise StrategyError(
            f"{options.strategy.source}: groups are for --preset manual; leave them out, and split "
            "tensors over mesh axes"
        )


def refuse_without_search(options: Options, is_annotated: bool = False) -> None:
    """Errors: StrategyError for an option of the search if there is no search."""
    is_open = options.preset is None and options.strategy is None and not is_annotated
    if options.search in (AUTO, EXHAUSTIVE) or (options.search is None and is_open):
        return
    names = {
        "objective": options.objective.goal != LATENCY,
        "untied": options.objective.untied,
    }
    for name, is_given in names.items():
        if is_given:
            instead = "add"
            if options.preset is not None or options.search is not None:
                named = "preset" if options.preset is not None else "search"
                instead = f"leave it out, or replace --{named} {getattr(options, named)} by"
            raise StrategyError(
                f"--{name} applies to the search, which does not run here: {instead} "
                f"--search {AUTO}"
            )
