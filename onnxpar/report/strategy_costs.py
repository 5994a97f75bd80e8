"""Lists all strategies of some nodes with their costs (`plan --costs`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.base.shown import Shown, text_of
from onnxpar.compiler.pass_ import ANNOTATIONS, LAYOUTS, Pass, PassContext
from onnxpar.graph.typical import sizes_text
from onnxpar.layout.layout import Layout, split_count
from onnxpar.layout.mesh import Mesh
from onnxpar.load.load import Model
from onnxpar.planner import sharder
from onnxpar.planner.observer import Observer
from onnxpar.planner.options import Options
from onnxpar.report.plan_text import WIDTH, size_text
from onnxpar.search.node_costs import NodeCosts, StrategyCost
from onnxpar.search.problem import MOST_STRATEGIES
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.state import FactorSharding, ShardingState
from onnxpar.strategy.manual import MANUAL
from onnxpar.strategy.named_ops import NamedOps

_PARTS = ("inside", "result", "gradients")
_ZERO = "0.000"
LAYOUTS_WIDTH = 40
"""The column of layouts has at least this width, even if lines become longer than WIDTH."""
_HEADS = ("compute", *_PARTS, "total", "weights", "activations")


@dataclass(frozen=True)
class StrategyRow:
    """One way to split a node.

    cost     the predicted times and memory
    inputs   the layout in which the node reads each input; empty for an input without a layout
    outputs  the layout in which the node produces each result
    shards   the number of shards of each dimension, by input: MindSpore's notation of a strategy
    chosen   True for the one that the plan uses
    """

    cost: StrategyCost
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shards: tuple[tuple[int, ...] | None, ...]
    chosen: bool = False

    @property
    def layouts(self) -> str:
        """The layouts in one line: `[dp, -], [-, tp] -> [dp, tp]`."""
        return " -> ".join(", ".join(each or "?" for each in some) for some in self._both)

    @property
    def _both(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self.inputs, self.outputs

    def to_json(self) -> dict[str, Any]:
        """Returns an entry of `plan --costs --json`, with times in seconds and sizes in bytes."""
        cost = self.cost
        return {
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "shards": [None if each is None else list(each) for each in self.shards],
            "chosen": self.chosen,
            "compute": cost.compute,
            "communication": {
                "total": cost.communication,
                **{name: asdict(getattr(cost, name)) for name in ("inside", "result", "gradients")},
            },
            "total": cost.seconds,
            "weights": cost.weights,
            "activations": cost.activations,
        }


@dataclass(frozen=True)
class NodeStrategies:
    """A node, and all ways to split it, the fastest first.

    rule      its sharding rule
    whole     the reason for each factor that cannot be split
    complete  False if there are too many strategies: then only strategies that the search compares
              are listed
    """

    node: str
    op: str
    rule: str
    whole: dict[str, str]
    strategies: tuple[StrategyRow, ...]
    complete: bool = True

    def to_json(self) -> dict[str, Any]:
        """Returns the node with its strategies as JSON value."""
        rows = [row.to_json() for row in self.strategies]
        return {
            **{"node": self.node, "op": self.op, "rule": self.rule, "whole": self.whole},
            "complete": self.complete,
            "strategies": rows,
        }


@dataclass(frozen=True)
class StrategyCosts(Shown):
    """Nodes of a plan with all their strategies over the plan's mesh, as `onnxpar plan --costs`
    prints them. `sizes` are the open sizes for which costs are predicted; empty if all sizes are
    known."""

    model: str
    mesh: Mesh
    nodes: tuple[NodeStrategies, ...]
    sizes: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the output of `plan --costs --json`."""
        return {
            "model": self.model,
            "mesh": [list(axis) for axis in self.mesh.shape],
            "nodes": [node.to_json() for node in self.nodes],
        }


def strategy_costs(path: Path, pattern: str, options: Options) -> StrategyCosts:
    """Plans a model, and returns every strategy of the nodes that match `pattern`, which is written
    like a key of `shard` in a strategy file. Errors: OnnxparError; StrategyError if no node
    matches, and for a manual program."""
    if options.preset == MANUAL:
        raise StrategyError(
            "--costs: the nodes of a manual program are split by hand and have no strategies; "
            "leave --preset manual out"
        )
    collector = _Collector(pattern)
    made, _ = sharder.plan(path, options, collector)
    sizes = sizes_text(made.typical) if made.typical else ""
    return StrategyCosts(made.model, made.mesh, tuple(collector.nodes), sizes)


class _Collector(Observer):
    """An observer that lists the strategies of nodes after the pass that sets annotations, and
    marks the strategies that the plan uses after the pass that decides layouts."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.nodes: list[NodeStrategies] = []
        self._ops: list[OpFactors] = []

    def passed(self, step: Pass, model: Model, ctx: PassContext) -> None:
        if ANNOTATIONS in step.ensures:
            costs = NodeCosts(model.graph, ctx.sharding, model.step, MOST_STRATEGIES)
            self._ops = NamedOps.of(ctx.sharding.factors, "--costs").matching(
                self.pattern, "--costs"
            )
            self.nodes = [_listed(op, costs) for op in self._ops]
        elif LAYOUTS in step.ensures:
            pairs = zip(self._ops, self.nodes, strict=True)
            self.nodes = [_marked(op, node, ctx) for op, node in pairs]


def _listed(op: OpFactors, costs: NodeCosts) -> NodeStrategies:
    """Returns a node with all ways to split it and their costs."""
    rows = tuple(_row(op, cost, costs.sharding) for cost in costs.of(op))
    rule, whole = op.rule.text(), dict(op.whole)
    return NodeStrategies(op.node.name, op.node.op, rule, whole, rows, costs.is_complete(op))


def _row(op: OpFactors, cost: StrategyCost, sharding: ShardingState) -> StrategyRow:
    inputs = [
        _layout(tensor, cost.strategy.operand(op, i), sharding)
        for i, tensor in enumerate(op.node.inputs)
    ]
    outputs = [
        _layout(tensor, cost.strategy.result(op, i), sharding)
        for i, tensor in enumerate(op.node.outputs)
        if tensor.name
    ]
    mesh = sharding.mesh
    return StrategyRow(
        cost,
        tuple("" if each is None else each.text(mesh) for each in inputs),
        tuple("" if each is None else each.text(mesh) for each in outputs),
        tuple(None if each is None else tuple(map(split_count, each.dims)) for each in inputs),
    )


def _layout(
    tensor: gs.Tensor, factor_sharding: FactorSharding, sharding: ShardingState
) -> Layout | None:
    known = tensor.name in sharding.factors.tensors
    return sharding.layout(tensor, factor_sharding) if known else None


def _marked(op: OpFactors, node: NodeStrategies, ctx: PassContext) -> NodeStrategies:
    """Returns the node with `chosen` set for the strategy that the plan uses."""
    axes = tuple(ctx.sharding.op_axes(op))
    partial = ctx.choices.operands or {}
    passed = {a for (name, _), (over, _) in partial.items() if name == node.node for a in over}
    if ctx.sharding.own_partial(op)[0]:
        passed = set()
    rows = (
        replace(
            row, chosen=row.cost.strategy.axes == axes and set(row.cost.strategy.passed) == passed
        )
        for row in node.strategies
    )
    return replace(node, strategies=tuple(rows))


def strategy_lines(found: StrategyCosts) -> Iterator[str]:
    """Yields the lines that `plan --costs` prints: a table for each node."""
    mesh = ",".join(f"{name}={size}" for name, size in found.mesh.shape)
    yield f"{found.model} over {found.mesh.size} ranks (mesh {mesh})"
    times = "milliseconds of a run on the slowest rank, and bytes of the largest shards"
    yield f"{times}; * is the plan's"
    for node in found.nodes:
        count = len(node.strategies)
        yield ""
        yield f"{node.op} {node.node!r}, {node.rule}"
        for factor, reason in node.whole.items():
            yield f"  {factor} is not split: {reason}"
        of = "" if node.complete else ", of too many to list all (the search compares these)"
        yield f"{count} {'strategy' if count == 1 else f'strategies, the fastest first{of}'}:"
        yield from _table([_cells(row) for row in node.strategies])
    if found.sizes:
        yield ""
        yield f"sizes are open: costs are for {found.sizes}"


def _cells(row: StrategyRow) -> tuple[str, ...]:
    cost = row.cost
    parts = (cost.inside, cost.result, cost.gradients)
    return (
        "*" if row.chosen else "",
        *(f"{s * 1e3:.3f}" for s in (cost.compute, *(p.seconds for p in parts), cost.seconds)),
        size_text(cost.weights),
        size_text(cost.activations),
        row.layouts,
    )


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yields the lines of a table: columns of numbers, then the layouts, wrapped if they are long.
    Parts of communication that are zero in every row are left out."""
    columns = list(zip(("", *_HEADS, "layouts"), *rows, strict=True))
    shown = [column for column in columns if column[0] not in _PARTS or {*column[1:]} != {_ZERO}]
    *numbers, layouts = shown
    cells = [[cell.rjust(max(map(len, column))) for cell in column] for column in numbers]
    for line, text in zip(zip(*cells, strict=True), layouts, strict=True):
        start = "  ".join((*line, ""))
        yield from wrap(
            start + text,
            max(WIDTH, len(start) + LAYOUTS_WIDTH),
            subsequent_indent=" " * len(start),
            drop_whitespace=True,
            break_long_words=False,
            break_on_hyphens=False,
        )


@text_of.register
def _(found: StrategyCosts) -> str:
    return "\n".join(strategy_lines(found))
