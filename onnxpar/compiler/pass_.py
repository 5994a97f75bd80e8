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
    """Decisions of insert-collectives that depend on sizes; passes repeat them at the other
    bindings of open sizes.

    results, operands  the fields of `PartialSums`; `results` is None until they are decided
    steps              reshards by tensor, and by the shardings from which and to which they lead
    fed                shardings of inputs that no request decides
    bytes              bytes of all-reduces that may be fused, by node
    started            bytes of the collectives that overlap-collectives starts, by node; None
                       before this pass
    fillings           the nodes that overlap-collectives moves to places where a collective is
                       under way
    units              the names of nodes in each unit of fuse-elementwise, for each scope; None
                       before this pass
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
    """The model's graph at another binding of its open sizes, with that binding and the graph's
    factors."""

    number: int
    sizes: Binding
    graph: gs.Graph
    factors: GraphFactors


@dataclass(frozen=True)
class Request:
    """The user's request, and the choices before passes run.

    strategy   the user's entries
    preset     the preset or the kind of search, by name
    annotated  the model's own annotations, if the plan follows them
    manual     the layouts of the model's ports, if the model is a program per rank
    objective  the objective of a search
    solution   the annotations that a search returns; None if there was no search
    proof      a search's proof about other strategies; None if there was no search
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

    per_rank     constants and attributes that depend on the rank
    collectives  the collectives of the plan, in execution order, from localize-ops on
    mixtures     the compacted mixtures
    programs     graphs that ranks run separately, by name, from split-programs on
    row_outputs  outputs for the indices and the new values of changed rows of each table on the
                 host, by the table's input, from place-tables on
    replays      the graph and context at the other bindings of open sizes
    seconds      seconds of compute of each node, by name, if ranks are on several hosts
    streams      number of the streams of collectives that run at once
    hidden       seconds of communication that compute hides, by the cost model
    held         bytes by which moved nodes raise the peak of activations
    localized    true if nodes are rank-local
    ordered      true if collectives are chained
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
    """The state that passes share beside the graph; tables are keyed by tensor or node name.

    request      the user's request, which no pass changes
    sharding     axes per leaf, while they are being decided
    annotations  annotations in rounds of falling priority, from annotate-strategy on
    asked        the annotations that the user or the model itself requests
    layouts      the layout of every tensor, from insert-collectives on
    copies       for each weight that copies another in a second layout, the name of the other
    choices      decisions that depend on sizes, to be repeated at other sizes
    variants     the graph at the other bindings of open sizes, before passes
    lowered      results of lowering
    fused        number of collectives before and after fuse-all-reduces, by kind; None before this
                 pass
    facts        the facts that passes have ensured so far
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
        """A new tensor name that begins with this name."""
        i = self._count.get(name, 0) + 1
        while f"{name}@{i}" in self.layouts or f"{name}@{i}" in self.sharding.factors.tensors:
            i += 1
        self._count[name] = i
        return self.model.names.free(f"{name}@{i}")

    _count: dict[str, int] = field(default_factory=dict)


class Stage(IntEnum):
    """The stage of a pass. Passes run in the order of their stages.

    REWRITE  changes the global graph, before any decision about it
    DECIDE   chooses mesh axes for dimensions; the graph stays as it is
    LOWER    turns the decisions into collectives and rank-local nodes; repeated at other sizes
             where sizes are open
    WRITE    writes files
    """

    REWRITE = 0
    DECIDE = 1
    LOWER = 2
    WRITE = 3


ANNOTATIONS, PROPAGATED = "annotations", "propagated layouts"
LAYOUTS, LOCAL, ORDER = "layouts", "local nodes", "ordered collectives"
FUSED = "fused collectives"
"""Facts that passes require and ensure."""


class Pass(ABC):
    """One step of the compiler, which rewrites the graph of all ranks. Subclasses are frozen
    dataclasses.

    stage        its place in the order; a pass of REWRITE must give each new node a unique name,
                 and each new tensor a dtype and a shape
    requires     facts that earlier passes must have ensured
    ensures      facts that hold after it
    excludes     facts that must not hold yet
    plan_after   true if the plan is made after it: after the first such pass, and after further
                 ones that change anything
    costs_after  true if the plan's times are predicted after it
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
