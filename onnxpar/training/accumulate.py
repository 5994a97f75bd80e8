"""Gradient accumulation: the forward and backward passes become the body of a Scan, which has one
iteration per micro-batch and sums up the gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_graphsurgeon as gs
from onnx import numpy_helper

from onnxpar.base.errors import StrategyError
from onnxpar.graph.clone import clone_nodes, needed
from onnxpar.graph.subgraphs import read_by
from onnxpar.graph.training_spec import SAMPLES, SEED
from onnxpar.training.gradients.value import Builder, Value
from onnxpar.training.step_state import StepState


def accumulate(to: StepState) -> None:
    """Makes the graph process `request.accumulate` micro-batches per step: the batch dimensions of
    inputs grow by this factor, the loss and the gradients become sums over the micro-batches, and
    each micro-batch in turn updates the running statistics. Random numbers differ between
    micro-batches.

    Each micro-batch has the model's batch size. All micro-batches read the same value of an input
    that has no batch. Errors: StrategyError.
    """
    count = to.step.turns = to.request.accumulate
    if to.batch is None:
        raise StrategyError(
            f"--accumulate {count}: no input has a batch dimension; leave --accumulate out, or "
            "give --batch-dim NAME=K"
        )
    iterations = _Iterations(to)
    own, summed = [*to.counts.values()], to.request.program.summed
    counts = [summed(to.graph, total) for total in iterations.scan("count", own, [])]
    instead = [(a.tensor, b.tensor) for a, b in zip(own, counts, strict=True)]
    sums = [to.loss, *to.gradients.values()]
    results = iterations.scan("accumulate", sums, to.running, instead)
    evaluated = iterations.scan("evaluate", list(to.evaluated.values()), [], instead)
    iterations.finish()
    to.weights_of = {name: counts[own.index(value)] for name, value in to.weights_of.items()}
    to.loss, after = results[0], results[len(sums) :]
    to.gradients = dict(zip(to.gradients, results[1:], strict=False))
    to.evaluated = dict(zip(to.evaluated, evaluated, strict=True))
    to.running = [
        (before, value.tensor) for (before, _), value in zip(to.running, after, strict=True)
    ]


class _Iterations:
    """Builds Scans whose bodies are copies of a graph's nodes, with one iteration per micro-batch.

    dims   the dimension that numbers samples, by name of an input
    split  the inputs that have a batch
    long   by name of such an input, the input for all micro-batches of a step
    """

    def __init__(self, to: StepState) -> None:
        assert to.batch is not None
        graph, count = to.graph, to.step.turns
        by_name = {t.name: t for t in graph.inputs}
        self.graph = graph
        self.dims = to.batch_dims
        self.split = [by_name[name] for name in self.dims]
        self.seed = by_name.get(SEED)
        self.samples = to.targets.made.get(SAMPLES)
        self.batch = to.batch.size
        self.count = count
        self.nodes = list(graph.nodes)
        self.added: list[gs.Node] = []
        self.long: dict[str, gs.Variable] = {}
        for tensor in self.split:
            shape = list(tensor.shape)
            shape[self.dims[tensor.name]] *= count
            self.long[tensor.name] = gs.Variable(tensor.name, tensor.dtype, shape)

    def scan(
        self,
        name: str,
        sums: Sequence[Value],
        running: Sequence[tuple[gs.Variable, gs.Variable]],
        known: Sequence[tuple[gs.Tensor, gs.Tensor]] = (),
    ) -> list[Value]:
        """Adds a Scan over the micro-batches. Returns the totals of `sums`, then the last values of
        `running`. Adds nothing, and returns [], if there are no sums.

        sums     values of the graph that the Scan sums up
        running  pairs (running statistic, its next value), carried from one iteration to the next
        known    pairs (tensor, tensor that the body reads in its place)
        """
        if not sums:
            return []
        self.graph.nodes = list(self.nodes)
        targets = [v.tensor.name for v in sums] + [after.name for _, after in running]
        body = gs.Graph(name=name, opset=self.graph.opset)
        inside, outside = Builder(body, f"{name}/body"), Builder(self.graph, name)
        old = needed(self.graph, targets, {t.name for t, _ in known})
        read = {t.name for node in old for t in read_by(node)}
        split = [t for t in self.split if t.name in read]
        self.graph.nodes = []
        totals = [outside.zeros(v.shape, v.dtype) for v in sums]
        initial = [*totals, *(outside.value(before) for before, _ in running)]
        sequences = [self._micro_batches(outside, tensor) for tensor in split]
        sequences.append(outside.constant(np.arange(self.count, dtype=np.int64)))
        shapes = [*(v.shape for v in initial), *(v.shape[1:] for v in sequences)]
        for value, shape in zip((*initial, *sequences), shapes, strict=True):
            body.inputs.append(gs.Variable(inside.fresh("given"), value.dtype, list(shape)))
        states, elements = body.inputs[: len(initial)], body.inputs[len(initial) :]
        instead: dict[int, gs.Tensor] = {id(tensor): other for tensor, other in known}
        instead |= {id(tensor): element for tensor, element in zip(split, elements, strict=False)}
        instead |= {
            id(before): state
            for (before, _), state in zip(running, states[len(sums) :], strict=True)
        }
        iteration = inside.value(elements[-1])
        if self.seed is not None:
            instead[id(self.seed)] = (inside.value(self.seed) * self.count + iteration).tensor
        if self.samples is not None:  # the samples after those of earlier micro-batches
            before = iteration.cast(np.float32) * float(self.batch)
            instead[id(self.samples)] = (inside.value(self.samples) - before).tensor
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
        operands = [v.tensor for v in (*initial, *sequences)]
        attrs = {"body": body, "num_scan_inputs": len(sequences)}
        self.graph.nodes.append(gs.Node("Scan", name, attrs, operands, results))
        self.added += self.graph.nodes
        return [outside.value(t) for t in results]

    def _micro_batches(self, outside: Builder, tensor: gs.Variable) -> Value:
        """Returns an input of the graph for several micro-batches as a sequence [micro-batch, ...]
        for the Scan; `outside` adds the Reshape and Transpose."""
        at, shape = self.dims[tensor.name], list(tensor.shape)
        apart = outside.value(self.long[tensor.name]).reshape(
            [*shape[:at], self.count, *shape[at:]]
        )
        others = [axis for axis in range(apart.rank) if axis != at]
        return apart.transpose([at, *others])

    def _read_inside(
        self, inside: Builder, nodes: Sequence[gs.Node], known: Mapping[int, gs.Tensor]
    ) -> dict[int, gs.Tensor]:
        """Adds an Identity to the body for each parameter that nodes read, and returns the
        Identities' results by id of the parameter. With them, a sharded parameter can be gathered
        in each iteration, instead of once before the loop."""
        weights = {id(t): t for t in self.graph.inputs if getattr(t, "onnx_default", None)}
        read = {id(t): t for n in nodes for t in n.inputs if id(t) in weights.keys() - known.keys()}
        return {key: inside.value(tensor).op("Identity").tensor for key, tensor in read.items()}

    def finish(self) -> None:
        """Replaces the graph's nodes by the Scans, and its inputs by the longer inputs for all
        micro-batches."""
        for node in self.nodes:
            node.inputs.clear()
            node.outputs.clear()
        self.graph.nodes = self.added
        self.graph.inputs = [self.long.get(t.name, t) for t in self.graph.inputs]
        if self.samples is not None:
            whole = np.array(self.batch * self.count, np.float32)
            self.samples.onnx_default = numpy_helper.from_array(whole, self.samples.name)
