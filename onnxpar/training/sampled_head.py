"""The head of a classifier (the nodes from its weight to the scores), and its restriction to some
of the classes.

A node computes each class by itself if its sharding rule keeps the factor of the classes: the node
neither sums over it, nor communicates, nor must keep it whole. From the weight to the output, all
nodes must do so; then the model computes the same scores for a part of the weight's rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.graph.clone import needed
from onnxpar.graph.shape_inference import infer_results
from onnxpar.graph.tensors import tensor_shape
from onnxpar.rules.notation import Spec, Var, expr_vars
from onnxpar.rules.rule import rule_of

_SHAPED = ("Expand", "Reshape")
"""Ops whose operand 1 is the shape of the result."""
_COMBINES = "combines the classes of"


@dataclass(frozen=True)
class Head:
    """The nodes from a weight to the scores of its classes.

    weight  the weight
    axis    its dimension of classes
    nodes   the nodes, in order, each with the dimension of classes of its result; None for a node
            that reads only the type of a tensor of classes
    """

    weight: gs.Tensor
    axis: int
    nodes: Sequence[tuple[gs.Node, int | None]]

    @property
    def classes(self) -> int:
        """The number of classes."""
        return int(self.weight.shape[self.axis])

    def read(self, graph: gs.Graph, rows: gs.Tensor) -> None:
        """Makes the nodes read `rows`, some rows of the weight, instead of the whole weight, and
        changes the shapes of their results."""
        count = int(rows.shape[self.axis])
        for node, axis in self.nodes:
            node.inputs = [rows if t is self.weight else t for t in node.inputs]
            if axis is not None and node.op in _SHAPED:
                sizes = np.array(node.inputs[1].values)
                sizes[axis - len(tensor_shape(node.outputs[0]) or ())] = count
                node.inputs[1] = gs.Constant(f"{node.name}/sampled", sizes)
            shapes = [tensor_shape(t) if t.name else None for t in node.inputs]
            (inferred,) = infer_results(node, shapes, graph.opset)  # type: ignore[arg-type]
            node.outputs[0].shape = inferred[1]


def find_head(graph: gs.Graph, output: gs.Tensor, weights: Sequence[gs.Tensor]) -> Head:
    """Returns the head whose scores are the last dimension of an output. `weights` are those that
    may be its weight. Errors: StrategyError if no weight, or more than one, has a row for each
    class, or if a node combines classes."""
    nodes = needed(graph, [output.name])
    classes = int(output.shape[-1])
    heads: list[Head] = []
    stops: list[str] = []
    for weight in weights:
        for axis in (i for i, size in enumerate(weight.shape) if size == classes):
            head = _follow(nodes, weight, axis)
            if isinstance(head, str):
                stops.append(head)
            elif head.nodes and head.nodes[-1] == (nodes[-1], len(output.shape) - 1):
                heads.append(head)
    if len(heads) == 1:
        return heads[0]
    if heads:
        names = ", ".join(repr(str(h.weight.name)) for h in heads)
        raise StrategyError(
            f"--sample-rate: the classes of output {output.name!r} are in several weights "
            f"({names}); a head to sample from has one weight, without a bias"
        )
    raise StrategyError(
        f"--sample-rate: {stops[0]}; classes can only be sampled where each is computed by itself"
        if stops
        else f"--sample-rate: no trained weight has a row for each of the {classes} classes of "
        f"output {output.name!r}; name the output of the head with --loss-of"
    )


def _follow(nodes: Sequence[gs.Node], weight: gs.Tensor, axis: int) -> Head | str:
    """Follows the dimension `axis` of a weight, which numbers classes, through the nodes. Returns
    the head, or the reason why the nodes are none."""
    axes: dict[int, int] = {id(weight): axis}
    path: list[tuple[gs.Node, int | None]] = []
    for node in nodes:
        operands = {i: axes[id(t)] for i, t in enumerate(node.inputs) if id(t) in axes}
        if not operands:
            continue
        if node.op == "CastLike" and 0 not in operands:
            path.append((node, None))
            continue
        at = _kept_axis(node, operands)
        if isinstance(at, str):
            return f"{node.op} '{node.name}' {at} {weight.name!r}"
        axes[id(node.outputs[0])] = at
        path.append((node, at))
    return Head(weight, axis, path)


def _kept_axis(node: gs.Node, given: Mapping[int, int]) -> int | str:
    """Returns the dimension of a node's result that numbers classes; or the reason why the node
    does not compute each class from one row of the weight. `given` has the dimension of classes of
    each operand that has one."""
    rule = rule_of(node)
    specs = rule.inputs
    factors = {_factor(specs[i], axis) for i, axis in given.items() if i < len(specs)}
    factor = next(iter(factors))
    if len(factors) != 1 or factor is None or len(node.outputs) != 1:
        return _COMBINES
    if factor in {*rule.whole, *rule.reduce, *rule.communicating}:
        return _COMBINES
    for i, spec in enumerate(specs):
        has = any(factor in expr_vars(expr) for expr in spec or ())
        if has != (i in given):
            return f"reads {node.inputs[i].name!r} by class, too, besides"
    if 1 in rule.ranks.local and (
        node.op not in _SHAPED or not isinstance(node.inputs[1], gs.Constant)
    ):
        return _COMBINES
    result = rule.outputs[0] or ()
    return next((i for i, e in enumerate(result) if e == Var(factor)), _COMBINES)


def _factor(spec: Spec | None, axis: int) -> str | None:
    """Returns the factor of which a dimension consists; None if it does not consist of one
    factor."""
    expr = spec[axis] if spec is not None and axis < len(spec) else None
    return expr.name if isinstance(expr, Var) else None
