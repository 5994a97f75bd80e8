"""Finds sums that a loop carries: each iteration adds a term, and no other node reads the sum
before the loop ends. A loop may carry such a sum as a partial sum, because Add is linear: one
all-reduce after the loop then replaces an all-reduce in each iteration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.graph.reshards import is_reshard
from onnxpar.graph.subgraphs import bodies
from onnxpar.graph.tensors import is_float


@dataclass(frozen=True)
class Accumulator:
    """A sum that a Scan or a Loop carries from each iteration to the next.

    operand, result  indices of the sum among the loop's operands and results
    given, back      the sum as input and as output of the loop's body
    add              the Add in the body that computes `back` from `given`
    term             index of the Add's other operand: the term that an iteration adds to the sum
    """

    operand: int
    result: int
    given: gs.Tensor
    back: gs.Tensor
    add: gs.Node
    term: int

    def tensors(self, node: gs.Node) -> list[gs.Tensor]:
        """Returns the four tensors that have the sum's value: the operand of the loop `node`, the
        input and the output of the body, and the result of the loop."""
        return [node.inputs[self.operand], self.given, self.back, node.outputs[self.result]]


def accumulators(node: gs.Node) -> Iterator[Accumulator]:
    """Yields the sums that a Scan or a Loop carries. Any other node has none."""
    if node.op not in ("Scan", "Loop"):
        return
    inner = bodies(node)
    if not inner:
        return
    (body,) = inner
    # A Loop's body first takes a counter and a condition, and first returns a condition.
    first_input, first_output = (2, 1) if node.op == "Loop" else (0, 0)
    carried = len(body.inputs) - first_input - node.attrs.get("num_scan_inputs", 0)
    results = {t.name for t in body.outputs}
    for i in range(carried):
        given, back = body.inputs[first_input + i], body.outputs[first_output + i]
        total = source(back)
        add = total.inputs[0] if total.inputs else None
        if add is None or add.op != "Add" or back.outputs or given.name in results:
            continue
        at = [k for k, t in enumerate(add.inputs) if source(t) is given]
        if len(given.outputs) == 1 and len(at) == 1 and is_float(given):
            yield Accumulator(first_input + i, i, given, back, add, 1 - at[0])


def source(tensor: gs.Tensor) -> gs.Tensor:
    """Returns the tensor from which a chain of reshard nodes (changes of layout) computes `tensor`;
    `tensor` itself if no reshard node computes it."""
    while tensor.inputs and is_reshard(tensor.inputs[0]):
        tensor = tensor.inputs[0].inputs[0]
    return tensor
