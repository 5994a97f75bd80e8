"""The parts of a training step that differ for one global program (here) and for a manual program
(`training/manual.py`), which its author wrote for one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import onnx_graphsurgeon as gs

from onnxpar.training.gradients.value import Builder, Value

if TYPE_CHECKING:
    from onnxpar.training.step_state import StepRequest, StepState


class Program:
    """The parts of a training step that differ between one global program, which `onnxpar shard`
    may split over ranks, and a program for one rank. This class is for the global program."""

    @property
    def count(self) -> int:
        """The number of ranks of which each computes a loss."""
        return 1

    def check(self, options: StepRequest) -> None:
        """Checks the options of the step. Errors: StrategyError for options that such a program
        cannot have."""

    def is_part(self, name: str) -> bool:
        """True if each rank has a shard of this weight; False here."""
        return False

    def part_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape that a weight of this shape has in the program."""
        return tuple(shape)

    def summed(self, graph: gs.Graph, value: Value) -> Value:
        """Returns the sum of a number over the ranks of which each computes a loss; here, the
        number."""
        return value

    def over_ranks(self, to: StepState) -> None:
        """Turns one rank's loss, gradients and statistics into those of all ranks. Nothing to do
        here."""

    def builder(self, graph: gs.Graph, prefix: str, parameter: str) -> Builder:
        """Returns a builder for the update of a parameter."""
        return Builder(graph, prefix)

    def totals(self, builder: Builder, sums: Mapping[str, Value]) -> tuple[list[str], Value]:
        """Returns the names of the parameters in order, and a vector with the sum over each whole
        parameter; `sums` has the sums over the graph's part of each parameter, by name."""
        return list(sums), builder.add("Concat", *(v.reshape([1]) for v in sums.values()), axis=0)

    def finish(self, to: StepState) -> None:
        """Records in the step how the tensors of its graph are sharded. Nothing to do here."""
