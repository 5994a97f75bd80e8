"""What training does otherwise where the model is each rank's own program.

The ranks' programs tell as many losses; what is differentiated and told is their mean, which is
shard_map's meaning of a result that all ranks have alike. What ranks hold alike stays alike: the
gradient of such a parameter is the sum of the ranks', such a statistic becomes the mean of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_graphsurgeon as gs

from onnxpar.errors import StrategyError
from onnxpar.grad.value import Builder, Value
from onnxpar.ir.collectives import DOMAIN
from onnxpar.ir.subgraphs import all_nodes, subgraphs
from onnxpar.ir.training_spec import GRADIENT, Deal, Step
from onnxpar.layout.mesh import Axes, Mesh, parts_over
from onnxpar.manual.manual import Manual
from onnxpar.model.interchange import default_of
from onnxpar.training.backward import Backward, LossOptions
from onnxpar.training.program import Program
from onnxpar.training.rewrite import as_constant


@dataclass(frozen=True)
class RankProgram(Program):
    """The program of each rank; `manual` says what it has parts of."""

    manual: Manual

    @property
    def count(self) -> int:
        """How many programs make a loss of their own."""
        return self.manual.mesh.size

    def check(self, options: LossOptions) -> None:
        """Errors: StrategyError for what such a program has no use for."""
        if options.statistics not in (None, "local"):
            raise StrategyError(
                f"--batch-norm {options.statistics}: the program of a rank takes statistics of "
                "what the rank has; use --batch-norm local --groups 1"
            )

    def is_part(self, name: str) -> bool:
        """Whether the program has only a part of a weight."""
        return self.manual.is_dealt(name)

    def part_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of what the program has of a weight. Errors: StrategyError."""
        return self.manual.part_shape(name, shape)

    def over_ranks(self, graph: gs.Graph, back: Backward) -> Backward:
        """Losses, gradients and statistics of all programs, by those of this one."""
        builder, everywhere = Builder(graph, "ranks"), self.manual.copies_over("")

        def summed(value: Value, over: Axes) -> Value:
            return _sum(builder, value, over, self.manual.mesh)

        def mean(value: Value, over: Axes) -> Value:
            return summed(value * (1 / parts_over(over)), over)

        def copies(name: str) -> Axes:
            return self.manual.copies_over(name)

        return replace(
            back,
            loss=mean(back.loss, everywhere),
            evaluated={n: mean(value, everywhere) for n, value in back.evaluated.items()},
            gradients={n: summed(value, copies(n)) for n, value in back.gradients.items()},
            running=[
                (before, mean(builder.value(after), copies(before.name)).tensor)
                for before, after in back.running
            ],
        )

    def builder(self, graph: gs.Graph, prefix: str, parameter: str) -> Builder:
        """One for what becomes of a parameter."""
        return _OfParts(graph, prefix, self.manual.split_over(parameter), self.manual.mesh)

    def total(self, builder: Builder, sums: Mapping[str, Value]) -> Value:
        """The sum of what has been summed up over each parameter, by name: each part once."""
        found: dict[Axes, Value] = {}
        for name, value in sums.items():
            over = self.manual.split_over(name)
            found[over] = found[over] + value if over in found else value
        mesh = self.manual.mesh
        whole = {str(over): _sum(builder, value, over, mesh) for over, value in found.items()}
        return super().total(builder, whole)

    def finish(self, graph: gs.Graph, step: Step, shapes: Mapping[str, Sequence[int]]) -> None:
        """Notes in a step how the tensors of its graph are dealt; `shapes` are those of tensors
        that the model had before. Errors: StrategyError for an entry that matches none."""
        if step.turns > 1:
            _refuse_inner(graph)
        kept = {*step.gradients, *(slot.input for slot in step.slots)}
        for tensor in list(graph.inputs):
            default = default_of(tensor)
            if default is not None:  # which is stored whole
                tensor.shape = list(default.dims)
                if tensor.name not in kept:
                    as_constant(graph, tensor, default)
        ports = [t.name for t in (*graph.inputs, *graph.outputs)]
        like = {slot.output: slot.of or slot.input for slot in step.slots}
        like |= {slot.input: slot.of for slot in step.slots if slot.of}
        like |= {name: name.removesuffix(GRADIENT) for name in ports if name.endswith(GRADIENT)}
        fed = {t.name: t.shape for t in graph.inputs if t.name in step.data}
        tensors = {
            name: list(self.manual.entry(name) or [None] * len(shape))
            for name, shape in {**shapes, **fed}.items()
        }
        like = {name: of for name, of in like.items() if name != of and of in tensors}
        step.deal = Deal(list(self.manual.mesh.shape), tensors, like)
        replace(self.manual, deal=step.deal).check_names([])


def _refuse_inner(graph: gs.Graph) -> None:
    """Errors: StrategyError where collectives have come to stand in a loop over parts of a
    batch."""
    for node in all_nodes(graph):
        for inner in (n for body in subgraphs(node) for n in body.nodes):
            if inner.domain == DOMAIN and inner.inputs:
                raise StrategyError(
                    f"{inner.op} '{inner.name}' would run for each part of a batch, which no loop "
                    "lets it do: leave --accumulate out"
                )


class _OfParts(Builder):
    """A builder for tensors that are split over axes."""

    def __init__(self, graph: gs.Graph, prefix: str, over: Axes, mesh: Mesh) -> None:
        super().__init__(graph, prefix)
        self._over = over
        self._mesh = mesh

    def over_parts(self, number: Value) -> Value:
        """A sum over a tensor, by those over its parts."""
        return _sum(self, number, self._over, self._mesh)


def _sum(builder: Builder, value: Value, over: Axes, mesh: Mesh) -> Value:
    """The sum over the ranks along some axes, by a collective as a person would write it."""
    if parts_over(over) == 1:
        return value
    name = builder.fresh("AllReduce")
    result = gs.Variable(name, value.dtype, list(value.shape))
    attrs = {"axes": [mesh.text(axis) for axis in over]}
    node = gs.Node("AllReduce", name, attrs, [value.tensor], [result], domain=DOMAIN)
    builder.graph.nodes.append(node)
    return builder.value(result)
