"""Explains a plan as a list of steps: each node and reshard with its layouts, time, bytes and
memory."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.compiler.pass_ import PassContext
from onnxpar.compiler.plan import Plan, open_shape
from onnxpar.compiler.summarize_plan import activations
from onnxpar.graph.clone import nodes_of_run
from onnxpar.graph.collectives import LOCAL_STEPS
from onnxpar.graph.reshards import is_reshard, operands_of
from onnxpar.graph.subgraphs import subgraphs
from onnxpar.layout.layout import Layout
from onnxpar.planner import sharder
from onnxpar.planner.loader import Loader
from onnxpar.planner.observer import Observer
from onnxpar.planner.options import Options
from onnxpar.search.predict import Prediction, predict_nodes
from onnxpar.search.repeats import runs
from onnxpar.strategy.manual import MANUAL

UPDATE = "update"
"""The block of the optimizer's nodes, whose names start with this word."""
NODE, COLLECTIVE, CUT = "node", "collective", "cut"
T = TypeVar("T")
_NUMBERED = re.compile(r"(.*?(?:^|[./])\d+)[./]")


@dataclass(frozen=True)
class Operand:
    """An operand or result of a node: its name, and its global shape and layout as text."""

    name: str
    shape: str
    layout: str


@dataclass(frozen=True)
class Step:
    """One step of a rank: a node of the global graph, or a reshard.

    kind       NODE; for a reshard: COLLECTIVE, or CUT if it does not communicate
    block      the layer: the name of a weight, or else of the node, up to a number
               (`encoder.layer.3`); without such a name, the block of the step before
    depth      nesting depth of subgraphs, 0 in the main graph
    predicted  time that the cost model predicts, 0 if unknown
    alive      bytes of activations that a rank holds during the step
    sent       bytes that a rank sends
    """

    name: str
    op: str
    kind: str
    block: str
    depth: int
    operands: tuple[Operand, ...]
    results: tuple[Operand, ...]
    predicted: Prediction
    alive: int
    sent: int = 0


@dataclass(frozen=True)
class Block:
    """Steps that occur `times` times in a row, with other names, such as equal layers; `name` and
    `last` are the names of the first and the last occurrence, `steps` are the steps of the first.
    """

    name: str
    last: str
    times: int
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Explained:
    """A plan, and its steps (nodes and reshards) in the order in which a rank runs them."""

    plan: Plan
    steps: tuple[Step, ...]

    @property
    def predicted(self) -> Prediction:
        """The predicted time of a run, without communication that runs beside compute."""
        every = [step.predicted for step in self.steps]
        communication = sum(p.communication for p in every) - self.plan.hidden
        return Prediction(sum(p.compute for p in every), communication)

    def blocks(self) -> Iterator[Block]:
        """Yields the steps by block. A block that equals the one before, except for names, only
        adds to that one's count."""
        blocks: list[Block] = []
        for name, group in groupby(self.steps, key=lambda step: step.block):
            steps = tuple(group)
            last = blocks[-1] if blocks else None
            if last is not None and _alike(last.steps, steps):
                blocks[-1] = replace(last, last=name, times=last.times + 1)
            elif name in ("", UPDATE):
                parts = repeated(steps, _sign)
                blocks += (Block(name, name, times, tuple(part)) for part, times in parts)
            else:
                blocks.append(Block(name, name, 1, steps))
        yield from blocks


class Explainer(Observer):
    """An observer that collects the steps of a plan, at each of its typical sizes; `explained` then
    returns them."""

    def __init__(self) -> None:
        self._found: list[tuple[float, list[Step]]] = []

    def priced(self, weight: float, graph: gs.Graph, ctx: PassContext) -> None:
        self._found = [*self._found, (weight, list(_steps(graph, ctx)))]

    def explained(self, plan: Plan) -> Explained:
        """Returns the plan with the collected steps."""
        sent: dict[str, int] = defaultdict(int)
        for entry in plan.collectives:
            sent[entry.name.split("::")[0]] += entry.bytes
            sent[entry.name] += entry.bytes if "::" in entry.name else 0
        means = (_mean(steps) for steps in zip(*_weighted(self._found), strict=True))
        return Explained(plan, tuple(replace(s, sent=sent.get(s.name, 0)) for s in means))


def explain(path: str | Path, options: Options, loader: Loader | None = None) -> Explained:
    """Plans a model like the command `plan`, and returns the plan with its predicted steps.
    `loader` may have read the model before. Errors: OnnxparError; StrategyError for a manual
    program."""
    refuse_manual(options)
    explainer = Explainer()
    plan, _ = sharder.plan(path, options, explainer, loader)
    return explainer.explained(plan)


def refuse_manual(options: Options) -> None:
    """Raises StrategyError for a manual program, whose time is not predicted."""
    if options.preset == MANUAL:
        raise StrategyError("the time of a manual program cannot be predicted; use `run --profile`")


def _weighted(each: Iterable[tuple[float, Iterable[Step]]]) -> Iterator[list[tuple[float, Step]]]:
    for weight, steps in each:
        yield [(weight, step) for step in steps]


def _mean(steps: Sequence[tuple[float, Step]]) -> Step:
    """Returns one step for (weight, the step) at several sizes: with the weighted mean of the
    times, and the largest memory."""
    predicted = Prediction(
        sum(weight * step.predicted.compute for weight, step in steps),
        sum(weight * step.predicted.communication for weight, step in steps),
    )
    return replace(steps[0][1], predicted=predicted, alive=max(step.alive for _, step in steps))


def _steps(graph: gs.Graph, ctx: PassContext) -> Iterator[Step]:
    """Yields the steps of a graph after insert-collectives, without nodes that only an evaluation
    needs."""
    apart = ctx.model.step.evaluation if ctx.model.step is not None else ()
    within = list(_within(graph, nodes_of_run(graph, apart), ctx))
    predicted = predict_nodes((node for node, _, _ in within), ctx.sharding)
    blocks = _Blocks()
    for node, depth, alive in within:
        yield Step(
            node.name,
            node.op,
            _kind(node),
            blocks.now if is_reshard(node) else blocks.of(node),
            depth,
            tuple(_operands(node, ctx)),
            tuple(_operand(t, ctx) for t in node.outputs if t.name),
            predicted.get(node.name, Prediction(0.0, 0.0)),
            alive,
        )


def _within(
    graph: gs.Graph,
    nodes: Sequence[gs.Node],
    ctx: PassContext,
    depth: int = 0,
    around: int = 0,
) -> Iterator[tuple[gs.Node, int, int]]:
    """Yields (node, depth, bytes of live activations) for the nodes of a graph, each followed by
    the nodes of its subgraphs. `around` are bytes that are live outside of the graph."""
    for node, alive in zip(nodes, activations(graph, nodes, ctx), strict=True):
        yield node, depth, around + alive
        for body in subgraphs(node):
            yield from _within(body, body.nodes, ctx, depth + 1, around + alive)


def _kind(node: gs.Node) -> str:
    if not is_reshard(node):
        return NODE
    return CUT if node.op in LOCAL_STEPS else COLLECTIVE


class _Blocks:
    """Assigns a block (layer) to each node, in order: by the names of its weights, or else by its
    own name. Only weights can lead back to an earlier block. A node without such names stays in the
    current block."""

    def __init__(self) -> None:
        self.now = ""
        self.left: set[str] = set()

    def of(self, node: gs.Node) -> str:
        """Returns the block of the next node of the graph."""
        stored = [t.name for t in node.inputs if not t.inputs]
        weights = [name for name in stored if "." in name and "/" not in name]
        own = [node.name] if node.name.startswith("/") else []
        scoped = [name.strip("/").replace("/", ".") for name in weights + own]
        blocks = [match[1] for name in scoped if (match := _NUMBERED.match(name))]
        block = blocks[0] if blocks else "" if scoped else self.now
        if node.name.startswith(UPDATE + "/"):
            block, weights = UPDATE, []
        if block != self.now and (weights or block not in self.left):
            self.left.add(self.now)
            self.now = block
        return self.now


def _operands(node: gs.Node, ctx: PassContext) -> Iterator[Operand]:
    if is_reshard(node):
        for tensor, before, _ in operands_of(node):
            yield Operand(tensor.name, _shape(tensor, before), before.text(ctx.sharding.mesh))
        return
    yield from (_operand(t, ctx) for t in node.inputs if t.name)


def _operand(tensor: gs.Tensor, ctx: PassContext) -> Operand:
    layout = ctx.layouts.get(tensor.name)
    text = "" if layout is None else layout.text(ctx.sharding.mesh)
    return Operand(tensor.name, _shape(tensor, layout), text)


def _shape(tensor: gs.Tensor, layout: Layout | None) -> str:
    """Returns the global shape as text, `8x16`; with a layout, at the sizes for which costs are
    predicted."""
    shape = tensor.shape if layout is None else open_shape(layout.shape)
    if shape is None:
        return "?"
    return "x".join("?" if size is None else str(size) for size in shape) or "scalar"


def _alike(some: Iterable[Step], others: Iterable[Step]) -> bool:
    """True if the steps of two blocks are equal except for names."""
    return [_sign(step) for step in some] == [_sign(step) for step in others]


def repeated(
    steps: Sequence[T], sign: Callable[[T], Hashable]
) -> Iterator[tuple[Sequence[T], int]]:
    """Divides steps into parts that occur several times in a row: yields (part, times). With signs
    a b a b c: ([a, b], 2), ([c], 1).

    sign  returns a key that is equal for steps that count as equal
    """
    numbers: dict[Hashable, int] = {}
    signs = [numbers.setdefault(sign(step), len(numbers)) for step in steps]
    done = 0
    for start, end, period in sorted(runs(np.array(signs), 0)):
        if start > done:
            yield steps[done:start], 1
        times = (end - start) // period
        yield steps[start : start + period], times
        done = start + times * period
    if done < len(steps):
        yield steps[done:], 1


def _sign(step: Step) -> Hashable:
    ports = tuple((o.shape, o.layout) for o in (*step.operands, *step.results))
    return step.op, step.depth, len(step.operands), ports, step.predicted, step.sent
