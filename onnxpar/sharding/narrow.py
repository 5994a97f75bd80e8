"""Restricts sharding rules in models with open sizes: a split stays allowed only if the size of
each shard has a closed form in the open sizes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import Size, tensor_shape
from onnxpar.rules.notation import Expr, Spec, Var, expr_vars
from onnxpar.rules.rule import Rule, whole_rule

OPEN = "its shards are unknown, because the model has open sizes; fix them with --dim NAME=N"


def narrowed(node: gs.Node, rule: Rule, factors: Collection[str] | None) -> Rule:
    """Returns the rule with these factors whole. Each dimension that contains one of `factors`
    becomes a factor of its own, which is whole. With `factors` None, every factor stays whole."""
    if factors is None:
        return whole_rule(node, OPEN)
    sizes: dict[str, Size] = dict(rule.sizes)
    alone: dict[str, str] = {}

    def spec(tensor: gs.Tensor, dims: Spec | None, prefix: str) -> Spec | None:
        if dims is None:
            return None
        exprs: list[Expr] = []
        for i, (expr, size) in enumerate(zip(dims, tensor_shape(tensor) or (), strict=False)):
            if set(expr_vars(expr)).isdisjoint(factors):
                exprs.append(expr)
                continue
            name = f"{prefix}_{i}"
            sizes[name], alone[name] = size, OPEN
            exprs.append(Var(name))
        return tuple(exprs)

    inputs = [spec(t, s, f"open_i{i}") for i, (t, s) in _pairs(node.inputs, rule.inputs)]
    outputs = [spec(t, s, f"open_o{i}") for i, (t, s) in _pairs(node.outputs, rule.outputs)]
    gone = frozenset(factors)
    return replace(
        rule,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        sizes=sizes,
        whole={**rule.whole, **dict.fromkeys(gone & rule.sizes.keys(), OPEN), **alone},
        reduce={f: op for f, op in rule.reduce.items() if f not in gone},
        communicating=rule.communicating - gone,
        contiguous=rule.contiguous - gone,
        co_sharded=tuple(group for group in rule.co_sharded if gone.isdisjoint(group)),
        ranks=replace(rule.ranks, lowered=rule.ranks.lowered - gone),
    )


def _pairs(
    tensors: list[gs.Tensor], specs: tuple[Spec | None, ...]
) -> enumerate[tuple[gs.Tensor, Spec | None]]:
    """Yields (index, (tensor, the rule's expressions of its dimensions))."""
    return enumerate(zip(tensors, specs, strict=False))


def delicate(rule: Rule, factors: Collection[str]) -> frozenset[str]:
    """Returns the factors whose shards depend on more than the factor's size: ranks exchange
    elements of the factor, or a dimension combines it with other factors. Considers `factors`, and
    the factors co-sharded with them (always split over the same axes)."""
    exchanged = {
        *rule.ranks.lowered,
        *rule.communicating,
        *rule.contiguous,
        *(f for g in rule.co_sharded for f in g),
    }
    tied = {f for group in rule.co_sharded if not set(group).isdisjoint(factors) for f in group}
    return frozenset((set(factors) | tied) & exchanged.union(*joint(rule)))


def joint(rule: Rule) -> list[tuple[str, ...]]:
    """Returns the factors of each dimension that combines several factors: ("h", "d") for `h d`."""
    specs = [expr for spec in (*rule.inputs, *rule.outputs) for expr in spec or ()]
    return [tuple(expr_vars(expr)) for expr in specs if not isinstance(expr, Var)]
