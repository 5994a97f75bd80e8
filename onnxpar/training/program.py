"""What training asks of the program that a model is: of a global one there is nothing to say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

import onnx_graphsurgeon as gs

from onnxpar.grad.value import Builder, Value
from onnxpar.ir.training_spec import Step

if TYPE_CHECKING:
    from onnxpar.training.backward import Backward, LossOptions


class Program:
    """One program, be it that compiling splits it over ranks."""

    @property
    def count(self) -> int:
        """How many programs make a loss of their own."""
        return 1

    def check(self, options: LossOptions) -> None:
        """Errors: StrategyError for what such a program has no use for."""

    def is_part(self, name: str) -> bool:
        """Whether the program has only a part of a weight."""
        return False

    def part_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of what the program has of a weight."""
        return tuple(shape)

    def over_ranks(self, graph: gs.Graph, back: Backward) -> Backward:
        """Losses, gradients and statistics of all programs, by those of this one."""
        return back

    def builder(self, graph: gs.Graph, prefix: str, parameter: str) -> Builder:
        """One for what becomes of a parameter."""
        return Builder(graph, prefix)

    def total(self, builder: Builder, sums: Mapping[str, Value]) -> Value:
        """The sum of what has been summed up over each parameter, by name."""
        return reduce(add, sums.values())

    def finish(self, graph: gs.Graph, step: Step, shapes: Mapping[str, Sequence[int]]) -> None:
        """Notes in a step how the tensors of its graph are dealt; `shapes` are those of tensors
        that the model had before."""
