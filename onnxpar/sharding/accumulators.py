"""Sums that a loop carries: each turn adds a term, and nothing else reads them before the end. A
pending sum may be carried so, as it may pass an Add."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.ir.collectives import DOMAIN
from onnxpar.ir.subgraphs import bodies
from onnxpar.ir.tensors import is_float


@dataclass(frozen=True)
class Accumulator:
    """A carried sum: operand and result of the loop by number, what its body is handed and hands
    back, and the Add between these, with the number of the term among its operands."""

    operand: int
    result: int
    given: gs.Tensor
    back: gs.Tensor
    add: gs.Node
    term: int

    def tensors(self, node: gs.Node) -> list[gs.Tensor]:
        """Where the sum stands: before the loop, in its body, behind it."""
        return [node.inputs[self.operand], self.given, self.back, node.outputs[self.result]]


def accumulators(node: gs.Node) -> Iterator[Accumulator]:
    """The carried sums of a Scan or a Loop; of any other node there are none."""
    if node.op not in ("Scan", "Loop"):
        return
    inner = bodies(node)
    if not inner:
        return
    (body,) = inner
    before, behind = (2, 1) if node.op == "Loop" else (0, 0)  # a counter and a condition
    carried = len(body.inputs) - before - node.attrs.get("num_scan_inputs", 0)
    results = {t.name for t in body.outputs}
    for i in range(carried):
        given, back = body.inputs[before + i], body.outputs[behind + i]
        made = source(back)
        add = made.inputs[0] if made.inputs else None
        if add is None or add.op != "Add" or back.outputs or given.name in results:
            continue
        at = [k for k, t in enumerate(add.inputs) if source(t) is given]
        if len(given.outputs) == 1 and len(at) == 1 and is_float(given):
            yield Accumulator(before + i, i, given, back, add, 1 - at[0])


def source(tensor: gs.Tensor) -> gs.Tensor:
    """The tensor that another one is a reshard of."""
    while tensor.inputs and tensor.inputs[0].domain == DOMAIN:
        tensor = tensor.inputs[0].inputs[0]
    return tensor
