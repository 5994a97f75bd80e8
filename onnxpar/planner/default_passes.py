"""The default passes, their order and their options."""

from __future__ import annotations

from onnxpar.base.errors import StrategyError
from onnxpar.compiler.pass_ import Pass
from onnxpar.load.load import Model
from onnxpar.lowering.buckets import BUCKET_BYTES, PART_BYTES
from onnxpar.lowering.compression import NONE
from onnxpar.passes.decide.annotate_strategy import AnnotateStrategy
from onnxpar.passes.decide.propagate_layouts import PropagateLayouts
from onnxpar.passes.lower.compact_experts import CompactExperts
from onnxpar.passes.lower.compress_collectives import CompressCollectives
from onnxpar.passes.lower.fuse_all_reduces import FUSIONS, INDEX, FuseAllReduces, indices_of
from onnxpar.passes.lower.fuse_elementwise import FuseElementwise
from onnxpar.passes.lower.gate_recomputation import GateRecomputation
from onnxpar.passes.lower.insert_collectives import InsertCollectives
from onnxpar.passes.lower.keep_collectives import KeepCollectives
from onnxpar.passes.lower.localize_ops import LocalizeOps
from onnxpar.passes.lower.order_collectives import OrderCollectives
from onnxpar.passes.lower.overlap_collectives import OVERLAPS, OverlapCollectives
from onnxpar.passes.lower.place_tables import PlaceTables
from onnxpar.passes.lower.split_programs import SplitPrograms
from onnxpar.passes.rewrite.fuse_attention import FuseAttention
from onnxpar.planner.options import Options
from onnxpar.planner.placed_passes import Placed, insert
from onnxpar.rules.cached_attention import can_split_cache
from onnxpar.strategy.context_parallel import CONTEXT, RING
from onnxpar.strategy.manual import MANUAL

DEFAULT_PASSES: tuple[type[Pass], ...] = (
    AnnotateStrategy,
    PropagateLayouts,
    InsertCollectives,
    CompressCollectives,
    FuseAllReduces,
    LocalizeOps,
    CompactExperts,
    SplitPrograms,
    PlaceTables,
    OverlapCollectives,
    OrderCollectives,
    GateRecomputation,
    FuseElementwise,
)
"""The passes of a plan between loading and split-ranks, in order."""
MANUAL_PASSES: tuple[type[Pass], ...] = (
    KeepCollectives,
    SplitPrograms,
    OrderCollectives,
    GateRecomputation,
)
"""The same for a manual program, which already is the program of one rank."""


def passes_of(options: Options, model: Model) -> list[Pass]:
    """Returns the passes to run between loading and split-ranks: the default passes, and passes
    that the user added in their places."""
    return insert(_own_passes(options, model), options.passes)


def _own_passes(options: Options, model: Model) -> list[Pass]:
    if options.preset == MANUAL:
        return [KeepCollectives(options.replicas), *(p() for p in MANUAL_PASSES[1:])]
    fusion = _fusion(options, model)
    together = 0 if fusion.by == "none" else fusion.bucket_bytes
    compression = CompressCollectives(options.compression or NONE, bucket_bytes=together)
    with_options: dict[type[Pass], Pass] = {
        type(p): p for p in (fusion, compression, _overlap(options))
    }
    added = {type(p.step if isinstance(p, Placed) else p) for p in options.passes}
    own_fusion = fusion.by == "none" and FuseAllReduces in added  # --add-pass has it, with options
    kinds = [p for p in DEFAULT_PASSES if not (own_fusion and p is FuseAllReduces)]
    rings = [FuseAttention()] if options.preset == RING else []
    states = set(model.states)
    if options.preset == CONTEXT and any(can_split_cache(n, states) for n in model.graph.nodes):
        rings = [FuseAttention(only_caches=True)]
    return [*rings, *(with_options.get(p) or p() for p in kinds)]


def _overlap(options: Options) -> OverlapCollectives:
    """Returns the pass that starts collectives early. Errors: StrategyError."""
    when = options.overlap or "auto"
    if when not in OVERLAPS:
        raise StrategyError(f"--overlap {when!r}: give one of {', '.join(OVERLAPS)}")
    return OverlapCollectives(when)


def may_overlap(options: Options) -> bool:
    """True if the options and the topology let ranks communicate while they compute."""
    crosses = options.topology is not None and len(options.topology.levels) > 1
    return options.overlap == "on" or (options.overlap != "off" and crosses)


def _fusion(options: Options, model: Model) -> FuseAllReduces:
    """Returns the pass that fuses collectives. By default, it fuses sums of gradients, and
    exchanges of tables whose rows are dealt out to ranks; fused activations would wait for each
    other. Errors: StrategyError."""
    by = options.fusion or ("none" if model.step is None else "cost")
    if by not in FUSIONS and not by.startswith(INDEX):
        raise StrategyError(
            f"--fusion {by!r}: give one of {', '.join(FUSIONS)}, or {INDEX}20,35 with indices of "
            "gradients"
        )
    if by.startswith(INDEX) and model.step is None:
        raise StrategyError(f"--fusion {by}: only a training step has gradients; leave it out")
    indices_of(by)
    if options.bucket_bytes is not None and options.bucket_bytes < 1:
        raise StrategyError(
            f"--bucket-mb: a bucket of {options.bucket_bytes:,} bytes is too small; give at least "
            "1 byte"
        )
    if options.bucket_bytes is not None and by not in ("size", "cost"):
        raise StrategyError(
            "--bucket-mb applies to --fusion size and cost only: give one of these, or leave "
            "--bucket-mb out"
        )
    if by == "cost" and not may_overlap(options):
        by = "size"
    given = options.bucket_bytes
    exchanges = options.fusion != "none"
    return FuseAllReduces(by, given or BUCKET_BYTES, given or PART_BYTES, exchanges=exchanges)
