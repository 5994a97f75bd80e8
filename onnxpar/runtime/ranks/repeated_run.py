"""A run of a rank's graph that is repeated without binding anything anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import onnxruntime as ort

from onnxpar.base.arrays import Array
from onnxpar.runtime.ranks.arena import Slot
from onnxpar.runtime.ranks.binding import Binding

Values = Mapping[str, ort.OrtValue]


class Turn(NamedTuple):
    """A prepared binding of inputs and outputs.

    binding  the binding
    states   the states that its run writes, in bound outputs, by input; empty if the run keeps none
    """

    binding: Binding
    states: Values


@dataclass
class RepeatedRun:
    """A run that reads its inputs and writes its outputs in the same memory each time.

    turns        the bindings, which runs use in turn
    inputs       the inputs, whose memory must stay alive
    slots        the outputs
    kept_shapes  the global shapes of the kept states

    Runs that keep states alternate between two turns: each turn reads the states that the other
    wrote. So the states before a run exist until the next run starts.
    """

    turns: Sequence[Turn]
    inputs: Mapping[str, Array]
    slots: dict[str, Slot]
    kept_shapes: dict[str, tuple[int, ...]]

    def run(self, session: ort.InferenceSession, options: ort.RunOptions) -> Values:
        """Runs once; returns the states to keep, by input."""
        turn, *others = self.turns
        session.run_with_iobinding(turn.binding.native, options)
        self.turns = (*others, turn)
        return turn.states


def bound(
    session: ort.InferenceSession,
    inputs: Mapping[str, Array],
    states: Values,
    outputs: Mapping[str, Array | ort.OrtValue | None],
) -> Binding:
    """Returns a new binding to these inputs, states and outputs: an array or value is the memory of
    an output; None stands for new memory of onnxruntime."""
    binding = Binding(session)
    for name, array in inputs.items():
        binding.feed(name, array)
    for name, value in states.items():
        binding.use(name, value)
    for name, memory in outputs.items():
        if isinstance(memory, ort.OrtValue):
            binding.native.bind_ortvalue_output(name, memory)
        else:
            binding.put(name, memory)
    return binding
