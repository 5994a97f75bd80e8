"""The steps in which training one global program (here) differs from training a manual program
(`training/manual.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import onnx_graphsurgeon as gs

from onnxpar.training.gradients.value import Builder, Value

if TYPE_CHECKING:
    from onnxpar.training.step_state import StepRequest, StepState


class Program:
    """The parts of a training step that differ for one global program, which `onnxpar shard` may
    split over ranks, and for a program per rank."""

    @property
    def count(self) -> int:
        """The number of ranks that each compute a loss."""
        return 1

    def check(self, options: StepRequest) -> None:
        """Errors: StrategyError for options that a program of this kind cannot have."""

    def is_part(self, name: str) -> bool:
        """True if each rank has a shard of this weight."""
        return False

    def part_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of a weight in this program."""
        return tuple(shape)

    def summed(self, graph: gs.Graph, value: Value) -> Value:
        """Returns the sum of a number over the ranks that each compute a loss."""
        return value

    def over_ranks(self, to: StepState) -> None:
        """Makes loss, gradients and statistics those over all ranks."""

    def builder(self, graph: gs.Graph, prefix: str, parameter: str) -> Builder:
        """Returns a builder for the update of a parameter."""
        return Builder(graph, prefix)

    def totals(self, builder: Builder, sums: Mapping[str, Value]) -> tuple[list[str], Value]:
        """Returns the parameters in order, and a vector with the sum over each whole parameter,
        from the sums over the graph's part of it."""
        return list(sums), builder.add("Concat", *(v.reshape([1]) for v in sums.values()), axis=0)

    def finish(self, to: StepState) -> None:
        """Records in the step how the tensors of its graph are sharded."""
