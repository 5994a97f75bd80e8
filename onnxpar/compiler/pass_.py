"""The pass API: a pass is a frozen dataclass whose fields are its options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

import onnx_graphsurgeon as gs

from onnxpar.graph.annotations import Configuration
from onnxpar.graph.per_rank import PerRank
from onnxpar.layout.layout import Layout, ReduceOp
from onnxpar.layout.mesh import Axes
from onnxpar.layout.symbols import Binding
from onnxpar.load.load import Model
from onnxpar.search.objective import Objective
from onnxpar.search.proof import Proof
from onnxpar.sharding.graph_factors import GraphFactors
from onnxpar.sharding.mixtures import CompactedMixture
from onnxpar.sharding.reshard_steps import ReshardStep
from onnxpar.sharding.state import FactorSharding, ShardingState
from onnxpar.strategy.manual import Manual
from onnxpar.strategy.strategy import Annotation, Strategy

if TYPE_CHECKING:
    from onnxpar.lowering.fill_windows import Filling
    from onnxpar.sharding.planned_collectives import Collective


@dataclass
class Choices:
    """Decisions of passes that depend on sizes. Where sizes are open, they are made at the first of
    several sample sizes (bindings); at the others, passes repeat them instead of deciding anew.

    results    for each tensor that a node leaves partial: the axes, and the reduction; None until
               insert-collectives has decided
    operands   the same for operands (node, position) that a node takes while they are partial
    steps      the collectives of each reshard, by tensor and by the shardings before and after
    fed        shardings of graph inputs that nobody requested
    bytes      bytes of all-reduces that may be fused, by node
    started    bytes of the collectives that overlap-collectives starts early, by node; None before
               it
    fillings   the nodes that overlap-collectives moves to where a collective is under way
    units      for each scope (the graph or a body), the groups of nodes that fuse-elementwise
               fuses, as names; None before that pass
    """

    results: dict[str, tuple[Axes, ReduceOp]] | None = None
    operands: dict[tuple[str, int], tuple[Axes, ReduceOp]] = field(default_factory=dict)
    steps: dict[tuple[str, tuple[FactorSharding, ...]], list[ReshardStep]] = field(
        default_factory=dict
    )
    fed: dict[str, FactorSharding] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    started: dict[str, int] | None = None
    fillings: list[Filling] = field(default_factory=list)
    units: list[list[list[str]]] | None = None


@dataclass
class Variant:
    """The model's graph at other sample sizes than the first: at the binding number `number`, which
    gives each symbol the size in `sizes`; and the factors of its dimensions there."""

    number: int
    sizes: Binding
    graph: gs.Graph
    factors: GraphFactors


@dataclass(frozen=True)
class Request:
    """The user's request, and the choices that are made before passes run.

    strategy   the user's entries
    preset     the preset, or the kind of search, by name
    annotated  the model's own annotations, if the plan follows them
    manual     the layouts of the model's inputs and outputs, if the model is already the program of
               one rank
    objective  what a search minimizes
    solution   the annotations that a search returned; None if there was no search
    proof      how far from the optimum the search's strategy can be at most; None if there was no
               search
    """

    strategy: Strategy | None = None
    preset: str | None = None
    annotated: Configuration | None = None
    manual: Manual | None = None
    objective: Objective = field(default_factory=Objective)
    solution: list[Annotation] | None = None
    proof: Proof | None = None


@dataclass
class LoweredState:
    """Results of the passes of the stage LOWER; empty before.

    per_rank     constants and attributes that differ between ranks
    collectives  the collectives of the plan, in execution order, from localize-ops on
    mixtures     mixtures of experts whose ranks compute only the rows that chose their experts
    programs     further graphs that ranks run separately, by name, from split-programs on
    row_outputs  for each table that stays in files on the host, by its input: the outputs with the
                 indices and the new values of rows that changed; from place-tables on
    replays      (graph, context) at each of the other sample sizes of open dimensions
    seconds      seconds of compute of each node, by name, if ranks are on several hosts
    streams      number of streams: collectives of different streams run at once
    hidden       seconds of communication that run beside compute, by the cost model
    held         bytes by which nodes that were moved raise the peak of activations
    localized    true if the graph is that of one rank, with the shapes of shards
    ordered      true if tokens fix the order of collectives
    """

    per_rank: PerRank = field(default_factory=PerRank)
    collectives: list[Collective] = field(default_factory=list)
    mixtures: list[CompactedMixture] = field(default_factory=list)
    programs: dict[str, gs.Graph] = field(default_factory=dict)
    row_outputs: dict[str, tuple[str, str]] = field(default_factory=dict)
    replays: list[tuple[gs.Graph, PassContext]] = field(default_factory=list)
    seconds: Mapping[str, float] = field(default_factory=dict)
    streams: int = 1
    hidden: float = 0.0
    held: int = 0
    localized: bool = False
    ordered: bool = False


@dataclass
class PassContext:
    """The state that passes share, besides the graph. Tables are keyed by the name of a tensor or
    node.

    request      the user's request, which no pass changes
    sharding     which axes split the dimensions so far, while that is being decided
    annotations  requested splits in rounds of falling priority, from annotate-strategy on
    asked        the annotations that come from the user or from the model itself
    layouts      the layout of every tensor, from insert-collectives on
    copies       for each weight that duplicates another in a second layout, the name of the
                 original
    choices      decisions that depend on sizes, to be repeated at other sizes
    variants     the graph at the other sample sizes of open dimensions, before passes
    lowered      results of lowering
    fused        (number before, number after) fuse-all-reduces of collectives, by kind; None before
                 it
    facts        what passes have ensured so far, such as "layouts"
    """

    model: Model
    sharding: ShardingState
    request: Request = field(default_factory=Request)
    annotations: list[list[Annotation]] = field(default_factory=list)
    asked: list[Annotation] = field(default_factory=list)
    layouts: dict[str, Layout] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    choices: Choices = field(default_factory=Choices)
    variants: list[Variant] = field(default_factory=list)
    lowered: LoweredState = field(default_factory=LoweredState)
    fused: dict[str, tuple[int, int]] | None = None
    facts: set[str] = field(default_factory=set)

    def fresh(self, name: str) -> str:
        """Returns a tensor name that is new in the graph and begins with `name`: "x@1"."""
        i = self._count.get(name, 0) + 1
        while f"{name}@{i}" in self.layouts or f"{name}@{i}" in self.sharding.factors.tensors:
            i += 1
        self._count[name] = i
        return self.model.names.free(f"{name}@{i}")

    _count: dict[str, int] = field(default_factory=dict)


class Stage(IntEnum):
    """The stage of a pass. Passes run in the order of their stages.

    REWRITE  changes the global graph, before anything is decided about it
    DECIDE   chooses mesh axes for dimensions; the graph stays as it is
    LOWER    turns the decisions into collectives and the nodes of one rank; where sizes are open,
             these passes are repeated at other sizes
    WRITE    writes files
    """

    REWRITE = 0
    DECIDE = 1
    LOWER = 2
    WRITE = 3


ANNOTATIONS, PROPAGATED = "annotations", "propagated layouts"
LAYOUTS, LOCAL, ORDER = "layouts", "local nodes", "ordered collectives"
FUSED = "fused collectives"
"""Names of facts: states of the graph that a pass can require, ensure, or exclude."""


class Pass(ABC):
    """One step of the compiler, which rewrites the graph that all ranks share. Subclasses are
    frozen dataclasses whose fields are the options of the pass.

    stage        when it runs; a pass of REWRITE must give each new node a unique name, and each new
                 tensor a dtype and a shape
    requires     facts that earlier passes must have ensured
    ensures      facts that hold after it
    excludes     facts that must not hold yet
    plan_after   true if the plan (weights, memory, layouts) is computed from the graph after this
                 pass: after the first such pass, and again after later ones that change anything
    costs_after  true if the plan's times are predicted from the graph after this pass
    """

    name: ClassVar[str]
    stage: ClassVar[Stage] = Stage.REWRITE
    requires: ClassVar[tuple[str, ...]] = ()
    ensures: ClassVar[tuple[str, ...]] = ()
    excludes: ClassVar[tuple[str, ...]] = ()
    plan_after: ClassVar[bool] = False
    costs_after: ClassVar[bool] = False

    @abstractmethod
    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        """Rewrites the graph or the context in place; returns True if anything changed."""
