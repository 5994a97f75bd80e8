"""Writes the folder of a sharded model: of all ranks, or of the ranks that one host needs.

The digests of all files are in plan.json, which is the same on every host: a host also computes the
digests of files that it does not write.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from onnxpar.base.bundle_names import ENCODER_PART, PLAN, REWRITTEN
from onnxpar.base.digests import Digests, digests_of
from onnxpar.base.errors import StrategyError
from onnxpar.base.new_folder import new_folder
from onnxpar.base.pass_times import WRITE, PassTimes
from onnxpar.base.write_digested import DigestedFolder
from onnxpar.compiler.length_buckets import join_plans
from onnxpar.compiler.pass_ import PassContext
from onnxpar.compiler.plan import Plan, foreign_part, write_plan
from onnxpar.passes.write.split_ranks import SplitRanks

PlanAndContext = tuple[Plan, PassContext]
Ranks = Collection[int] | None
"""The ranks whose files to write; None: all ranks."""


def write_bundle(
    place: Path,
    plan: Plan,
    ctx: PassContext,
    encoder: PlanAndContext | None,
    shorter: Mapping[Path, PlanAndContext],
    carried: Mapping[str, Path],
    times: PassTimes,
    progress: Callable[[int], None] | None = None,
    ranks: Ranks = None,
    prove: Callable[[Path], None] | None = None,
) -> None:
    """Writes a folder, which gets the name `place` once it is complete, in place of an older one.
    With `ranks`, the files of these ranks are added to a folder with the same plan.

    encoder  the plan of the encoder, which goes into a folder inside; None: there is none
    shorter  the plans of the same step for shorter samples, by file
    carried  files to copy, by their names in the folder
    times    collects wall times
    prove    called with the complete folder before it gets its name; an error leaves nothing

    Errors: OSError; those of `prove`.
    """
    extra: dict[str, Any] = {"progress": progress} if progress else {}
    plans, paths = [plan, *(plan for plan, _ in shorter.values())], [Path(plan.model), *shorter]
    data, names = join_plans(plans, paths) if shorter else (plan.to_json(), [""])
    joins = None if ranks is None else _have_same_plan
    with new_folder(place, foreign_part, joins) as folder:
        files = DigestedFolder(folder, ranks)
        with times.of(SplitRanks.name):
            first = SplitRanks(files, **extra)
            first.run(ctx.model.graph, ctx)
            for name, (_, other) in zip(names[1:], shorter.values(), strict=True):
                SplitRanks(files, program=name, names=first.names).run(other.model.graph, other)
        with times.of(WRITE):
            for name, file in carried.items():
                files.copy(name, file)
            _put_rewritten(files, ctx)
            if encoder is not None:
                files.add(f"{ENCODER_PART}/{PLAN}", _write_encoder(folder, *encoder, ranks))
            write_plan(folder, data, files.digests())
        if prove is not None:
            prove(folder)


def _write_encoder(folder: Path, plan: Plan, ctx: PassContext, ranks: Ranks) -> Digests:
    """Writes a sharded encoder into the folder of its decoder; returns the digests of its
    plan.json."""
    part = folder / ENCODER_PART
    part.mkdir()
    files = DigestedFolder(part, ranks)
    SplitRanks(files).run(ctx.model.graph, ctx)
    _put_rewritten(files, ctx)
    write_plan(part, plan.to_json(), files.digests())
    return digests_of([part / PLAN])[PLAN]


def _put_rewritten(files: DigestedFolder, ctx: PassContext) -> None:
    """Writes the graph that ranks compute in place of the file's, if they do."""
    if ctx.model.rewritten is not None:
        files.put(REWRITTEN, ctx.model.rewritten)


def _have_same_plan(first: Path, second: Path) -> bool:
    """True if two folders hold (maybe different) ranks of one sharded model."""
    files = first / PLAN, second / PLAN
    return all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes()


def check_chosen_ranks(ranks: Collection[int], size: int | None) -> None:
    """Checks the ranks that are to be written, out of `size` (None: unknown). Errors: StrategyError
    for a rank that does not exist."""
    if not ranks:
        raise StrategyError("--ranks names no rank; leave it out to write all of them")
    for rank in sorted(ranks):
        if rank < 0 or (size is not None and rank >= size):
            known = "ranks are numbered from 0" + (f" to {size - 1}" if size is not None else "")
            raise StrategyError(f"--ranks {rank}: there is no such rank; {known}")
