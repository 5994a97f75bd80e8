"""Gradients of a large batch, a part at a time: the forward and the backward pass become the body
of a Scan, which carries the sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.errors import StrategyError
from onnxpar.grad.value import Builder, Value
from onnxpar.ir.clone import clone_nodes, needed
from onnxpar.ir.training_spec import SEED
from onnxpar.training.backward import Backward

MOST = 1 << 20
"""Batches in a step: sizes of the inputs that are as many times as long must stay int64."""


def accumulate(graph: gs.Graph, back: Backward, data: Sequence[str], parts: int) -> Backward:
    """Makes the inputs `data` of a graph with gradients `parts` times as long: loss and gradients
    become the means over as many batches of the length that they were, statistics run through them,
    and what is random differs between them.

    Inputs without a first dimension of the batch's length are the same for all parts. Errors:
    StrategyError.
    """
    if not 2 <= parts <= MOST:
        raise StrategyError(f"accumulate {parts}: from 2 to {MOST} parts")
    by_name = {t.name: t for t in graph.inputs}
    first = by_name[data[0]]
    if not first.shape:
        raise StrategyError(f"accumulate: input {first.name!r} has no batch")
    batch = int(first.shape[0])
    split = [by_name[n] for n in data if by_name[n].shape and by_name[n].shape[0] == batch]
    iterations = _Iterations(graph, split, by_name.get(SEED), parts)
    names = list(back.gradients)
    sums = [back.loss, *back.gradients.values()]
    results = iterations.scan("accumulate", sums, back.running)
    running = [
        (before, value.tensor)
        for (before, _), value in zip(back.running, results[len(sums) :], strict=True)
    ]
    evaluated = iterations.scan("evaluate", list(back.evaluated.values()), [])
    iterations.finish()
    means = [value * (1 / parts) for value in results[: len(sums)]]
    return replace(
        back,
        loss=means[0],
        gradients=dict(zip(names, means[1:], strict=True)),
        evaluated={
            name: value * (1 / parts) for name, value in zip(back.evaluated, evaluated, strict=True)
        },
        running=running,
    )


class _Iterations:
    """Scans whose bodies are made of the nodes of a graph."""

    def __init__(
        self,
        graph: gs.Graph,
        split: Sequence[gs.Variable],
        seed: gs.Variable | None,
        parts: int,
    ) -> None:
        self.graph = graph
        self.split = split
        self.seed = seed
        self.parts = parts
        self.nodes = list(graph.nodes)
        self.added: list[gs.Node] = []
        self.long: dict[str, gs.Variable] = {}
        for tensor in split:
            shape = [parts * int(tensor.shape[0]), *tensor.shape[1:]]
            self.long[tensor.name] = gs.Variable(tensor.name, tensor.dtype, shape)

    def scan(
        self,
        name: str,
        sums: Sequence[Value],
        running: Sequence[tuple[gs.Variable, gs.Variable]],
    ) -> list[Value]:
        """Adds a Scan that sums up values of the graph, and hands on what runs."""
        self.graph.nodes = list(self.nodes)
        targets = [v.tensor.name for v in sums] + [after.name for _, after in running]
        body = gs.Graph(name=name, opset=self.graph.opset)
        inside, outside = Builder(body, f"{name}/body"), Builder(self.graph, name)
        old = needed(self.graph, targets)
        self.graph.nodes = []
        totals = [outside.zeros(v.shape, v.dtype) for v in sums]
        given = [*totals, *(outside.value(before) for before, _ in running)]
        sequences = [
            outside.value(long).reshape([self.parts, *tensor.shape])
            for tensor, long in zip(self.split, self.long.values(), strict=True)
        ]
        sequences.append(outside.constant(np.arange(self.parts, dtype=np.int64)))
        shapes = [*(v.shape for v in given), *(v.shape[1:] for v in sequences)]
        for value, shape in zip((*given, *sequences), shapes, strict=True):
            body.inputs.append(gs.Variable(inside.fresh("given"), value.dtype, list(shape)))
        states, elements = body.inputs[: len(given)], body.inputs[len(given) :]
        instead: dict[int, gs.Tensor] = {
            id(tensor): element for tensor, element in zip(self.split, elements, strict=False)
        }
        instead |= {
            id(before): state
            for (before, _), state in zip(running, states[len(sums) :], strict=True)
        }
        if self.seed is not None:
            iteration = inside.value(self.seed) * self.parts + inside.value(elements[-1])
            instead[id(self.seed)] = iteration.tensor
        instead |= self._read_inside(inside, old, instead)
        copies, tensors = clone_nodes(old, f"{name}/", instead)
        body.nodes.extend(copies)
        ends = [
            inside.value(state) + inside.value(tensors.get(id(v.tensor), v.tensor))
            for state, v in zip(states, sums, strict=False)
        ]
        ends += [inside.value(tensors[id(after)]).op("Identity") for _, after in running]
        body.outputs = [value.tensor for value in ends]
        results = [
            gs.Variable(f"{name}:{i}", value.dtype, list(value.shape))
            for i, value in enumerate(ends)
        ]
        operands = [v.tensor for v in (*given, *sequences)]
        attrs = {"body": body, "num_scan_inputs": len(sequences)}
        self.graph.nodes.append(gs.Node("Scan", name, attrs, operands, results))
        self.added += self.graph.nodes
        return [outside.value(t) for t in results]

    def _read_inside(
        self, inside: Builder, nodes: Sequence[gs.Node], known: Mapping[int, gs.Tensor]
    ) -> dict[int, gs.Tensor]:
        """Parameters that nodes read, through an Identity of the body: what ranks hold in parts may
        be gathered there, rather than once for all turns."""
        weights = {id(t): t for t in self.graph.inputs if getattr(t, "onnx_default", None)}
        read = {id(t): t for n in nodes for t in n.inputs if id(t) in weights.keys() - known.keys()}
        return {key: inside.value(tensor).op("Identity").tensor for key, tensor in read.items()}

    def finish(self) -> None:
        """Leaves the graph with the Scans in place of what they are made of."""
        for node in self.nodes:
            node.inputs.clear()
            node.outputs.clear()
        self.graph.nodes = self.added
        self.graph.inputs = [self.long.get(t.name, t) for t in self.graph.inputs]
