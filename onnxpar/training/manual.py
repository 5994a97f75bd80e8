"""Training of a manual program: a model that its author wrote for one rank, with collectives.

Each rank computes a loss; the loss of the step is the mean over the ranks, as JAX's shard_map
defines a replicated result. Replicated tensors stay equal on all ranks: gradients of a replicated
parameter are summed over the ranks, and a replicated statistic becomes the mean over the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.graph.collectives import DOMAIN
from onnxpar.graph.interchange import default_of
from onnxpar.graph.subgraphs import all_nodes, subgraphs
from onnxpar.graph.training_spec import GRADIENT, StepSharding
from onnxpar.layout.mesh import Axes, Mesh, parts_over
from onnxpar.strategy.manual import Manual
from onnxpar.training.gradients.value import Builder, Value
from onnxpar.training.program import Program
from onnxpar.training.rewrite import as_constant
from onnxpar.training.step_state import StepRequest, StepState


@dataclass(frozen=True)
class RankProgram(Program):
    """A manual program: the parts of a training step that differ for it. `manual` says which
    tensors are sharded."""

    manual: Manual

    @property
    def count(self) -> int:
        """The number of ranks, each of which computes a loss."""
        return self.manual.mesh.size

    def check(self, options: StepRequest) -> None:
        """Checks the options of the step. Errors: StrategyError for lazily trained tables and
        sampled classes, or if BatchNormalization is to take statistics over more samples than one
        rank has."""
        if options.lazy:
            raise StrategyError(
                "--lazy: ranks of a manual program look up different rows; leave --lazy out"
            )
        if options.sampling:
            raise StrategyError(
                "--sample-rate: ranks of a manual program have labels of their own; leave "
                "--sample-rate out"
            )
        statistics = options.batch_norm.statistics
        if statistics not in (None, "local"):
            raise StrategyError(
                f"--batch-norm {statistics}: the program of a rank takes statistics over "
                "the samples of that rank; use --batch-norm local --groups 1"
            )

    def is_part(self, name: str) -> bool:
        """True if each rank has a shard of this weight."""
        return self.manual.is_dealt(name)

    def part_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of a rank's shard of a weight. Errors: StrategyError."""
        return self.manual.part_shape(name, shape)

    def summed(self, graph: gs.Graph, value: Value) -> Value:
        """Returns the sum of a number over all ranks."""
        builder = Builder(graph, f"{value.tensor.name}/ranks")
        return _sum(builder, value, self.manual.copies_over(""), self.manual.mesh)

    def over_ranks(self, to: StepState) -> None:
        """Appends AllReduces: losses, metrics and gradients, which are each rank's share of a mean,
        are summed over all ranks; running statistics are averaged."""
        builder, everywhere = Builder(to.graph, "ranks"), self.manual.copies_over("")

        def summed(value: Value, over: Axes) -> Value:
            return _sum(builder, value, over, self.manual.mesh)

        def mean(value: Value, over: Axes) -> Value:
            return summed(value * (1 / parts_over(over)), over)

        def copies(name: str) -> Axes:
            return self.manual.copies_over(name)

        to.loss = summed(to.loss, everywhere)
        to.evaluated = {name: summed(value, everywhere) for name, value in to.evaluated.items()}
        to.gradients = {n: summed(value, copies(n)) for n, value in to.gradients.items()}
        to.running = [
            (before, mean(builder.value(after), copies(before.name)).tensor)
            for before, after in to.running
        ]

    def builder(self, graph: gs.Graph, prefix: str, parameter: str) -> Builder:
        """Returns a builder for the update of a parameter, whose `over_parts` sums over all shards
        of the parameter."""
        return _OfParts(graph, prefix, self.manual.split_over(parameter), self.manual.mesh)

    def totals(self, builder: Builder, sums: Mapping[str, Value]) -> tuple[list[str], Value]:
        """Returns the names of the parameters in order, and a vector with the sum over each whole
        parameter; `sums` has the sums over this rank's shards. Each shard counts once, however many
        ranks have it."""
        apart: dict[Axes, dict[str, Value]] = {}
        for name, value in sums.items():
            apart.setdefault(self.manual.split_over(name), {})[name] = value
        each = [
            _sum(
                builder, super(RankProgram, self).totals(builder, named)[1], over, self.manual.mesh
            )
            for over, named in apart.items()
        ]
        return [name for named in apart.values() for name in named], builder.add(
            "Concat", *each, axis=0
        )

    def finish(self, to: StepState) -> None:
        """Records in the step how the tensors of its graph are sharded, and gives inputs with
        default values the shapes of whole tensors. Errors: StrategyError if an entry of the
        strategy matches no tensor."""
        graph, step = to.graph, to.step
        if step.turns > 1:
            _refuse_inner(graph)
        kept = {*step.gradients, *(slot.input for slot in step.slots)}
        for tensor in list(graph.inputs):
            default = default_of(tensor)
            if default is not None:  # defaults are whole tensors
                tensor.shape = list(default.dims)
                if tensor.name not in kept:
                    as_constant(graph, tensor, default)
        ports = [t.name for t in (*graph.inputs, *graph.outputs)]
        ranks = {t.name: len(t.shape) for t in graph.inputs}
        of = {s.input: s.input for s in step.slots}
        of |= {s.input: s.of for s in step.slots if s.of and ranks[s.input] == ranks[s.of]}
        like = {slot.output: of[slot.input] for slot in step.slots} | of
        like |= {name: name.removesuffix(GRADIENT) for name in ports if name.endswith(GRADIENT)}
        fed = {t.name: t.shape for t in graph.inputs if t.name in step.data}
        tensors = {
            name: list(self.manual.entry(name) or [None] * len(shape))
            for name, shape in {**to.shapes, **fed}.items()
        }
        like = {name: of for name, of in like.items() if name != of and of in tensors}
        groups = {name: [list(g) for g in each] for name, each in self.manual.groups.items()}
        step.deal = StepSharding(list(self.manual.mesh.shape), tensors, like, groups)
        replace(self.manual, deal=step.deal).check_names([])


def _refuse_inner(graph: gs.Graph) -> None:
    """Refuses collectives in the loop over micro-batches. Errors: StrategyError."""
    for node in all_nodes(graph):
        for inner in (n for body in subgraphs(node) for n in body.nodes):
            if inner.domain == DOMAIN and inner.inputs:
                raise StrategyError(
                    f"{inner.op} '{inner.name}' would run in the loop over micro-batches, where "
                    "collectives cannot run; leave --accumulate out"
                )


class _OfParts(Builder):
    """A builder for the update of a parameter that is sharded over the axes `over`."""

    def __init__(self, graph: gs.Graph, prefix: str, over: Axes, mesh: Mesh) -> None:
        super().__init__(graph, prefix)
        self._over = over
        self._mesh = mesh

    def over_parts(self, number: Value) -> Value:
        """Returns the sum of a scalar over all shards of the parameter."""
        return _sum(self, number, self._over, self._mesh)


def _sum(builder: Builder, value: Value, over: Axes, mesh: Mesh) -> Value:
    """Appends an AllReduce over the axes `over`, and returns the sum. Appends nothing for one
    rank."""
    if parts_over(over) == 1:
        return value
    name = builder.fresh("AllReduce")
    result = gs.Variable(name, value.dtype, list(value.shape))
    attrs = {"axes": [mesh.text(axis) for axis in over]}
    node = gs.Node("AllReduce", name, attrs, [value.tensor], [result], domain=DOMAIN)
    builder.graph.nodes.append(node)
    return builder.value(result)
