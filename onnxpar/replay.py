"""Repeats the passes at other bindings of a model's open sizes, with the same decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnxpar.errors import StrategyError
from onnxpar.factors import GraphFactors, analyse
from onnxpar.model import Model
from onnxpar.passes.pass_ import Pass, PassContext
from onnxpar.sharding import Sharding
from onnxpar.symbols import ENOUGH


def replay(model: Model, ctx: PassContext, passes: Sequence[Pass]) -> None:
    """Runs passes behind propagation again at every other binding, as `ctx.replays`.

    `ctx` is the context in which they ran. Bindings at which sizes coincide, so that dimensions
    consist of other factors there, are dropped from the model's. Errors: StrategyError where too
    few are left: the structure of the model depends on its sizes.
    """
    if model.sizes is None:
        return
    kept, odd = [0], ""
    for i in range(1, len(model.sizes.bindings)):
        graph = model.sizes.graph(i)
        factors = analyse(graph, model.states, in_bodies=False)
        difference = _difference(ctx.sharding.factors, factors)
        if difference:
            odd = difference
            continue
        kept.append(i)
        other = PassContext(model, _sharding(factors, ctx.sharding), choices=ctx.choices)
        for step in passes:
            step.run(graph, other)
        ctx.replays.append((graph, other))
    if len(kept) < ENOUGH:
        raise StrategyError(f"{odd} depends on sizes that are open; give {model.sizes.flags}")
    model.sizes = replace(model.sizes, bindings=[model.sizes.bindings[i] for i in kept])


def opened(model: Model, factors: GraphFactors) -> GraphFactors:
    """The factors, told which sizes are open by those at another binding."""
    for i in range(1, len(model.sizes.bindings) if model.sizes is not None else 0):
        assert model.sizes is not None
        other = analyse(model.sizes.graph(i), model.states, in_bodies=False)
        if not _difference(factors, other):
            return factors.opened(other)
    return factors


def _difference(have: GraphFactors, other: GraphFactors) -> str:
    """The first tensor or node whose dimensions consist of other factors; empty where none is."""
    for name, tensor in other.tensors.items():
        known = have.tensors.get(name)
        if known is None or [x.atom for x in known.leaves] != [x.atom for x in tensor.leaves]:
            return f"what '{name}' consists of"
    for a, b in zip(have.ops, other.ops, strict=True):
        if [(x.atom, x.factor) for x in a.leaves] != [(x.atom, x.factor) for x in b.leaves]:
            return f"how {a.node.op} '{a.node.name}' splits"
    return ""


def _sharding(factors: GraphFactors, decided: Sharding) -> Sharding:
    """What was decided, for the sizes of another graph."""
    return Sharding(
        decided.mesh,
        factors,
        decided.costs,
        {name: list(axes) for name, axes in decided.tensors.items()},
        {name: list(axes) for name, axes in decided.ops.items()},
        set(decided.pinned),
        dict(decided.parts),
    )
