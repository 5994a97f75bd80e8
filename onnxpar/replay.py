"""Repeats the passes at other bindings of a model's open sizes, with the same decisions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from onnxpar.errors import OpenSizesError
from onnxpar.factors import GraphFactors, analyse
from onnxpar.fits import ENOUGH
from onnxpar.model import Model
from onnxpar.narrow import Whole, delicate
from onnxpar.passes.pass_ import Pass, PassContext
from onnxpar.sharding import Sharding


def replay(model: Model, ctx: PassContext, passes: Sequence[Pass]) -> None:
    """Runs passes behind propagation again at every other binding, as `ctx.replays`.

    `ctx` is the context in which they ran. Bindings at which sizes coincide, so that dimensions
    consist of other factors there, are dropped from the model's. Errors: OpenSizesError where
    too few are left: the structure of the model depends on its sizes.
    """
    if model.sizes is None:
        return
    kept, odd = [0], ""
    nodes: dict[str, frozenset[str]] = {}
    for i in range(1, len(model.sizes.bindings)):
        graph = model.sizes.graph(i)
        factors = analyse(graph, model.states, in_bodies=False, whole=model.whole)
        difference = _difference(ctx.sharding.factors, factors)
        if difference:
            odd = difference
            for name, changed in _changed(ctx.sharding.factors, factors).items():
                nodes[name] = nodes.get(name, frozenset()) | changed
            continue
        kept.append(i)
        other = PassContext(model, _sharding(factors, ctx.sharding), choices=ctx.choices)
        for step in passes:
            step.run(graph, other)
        ctx.replays.append((graph, other))
    if len(kept) < ENOUGH:
        flags = model.sizes.flags
        raise OpenSizesError(f"{odd} depends on sizes that are open; give {flags}", nodes)
    model.sizes = replace(model.sizes, bindings=[model.sizes.bindings[i] for i in kept])


def opened(model: Model, factors: GraphFactors) -> GraphFactors:
    """The factors, told which sizes are open by those at another binding."""
    for i in range(1, len(model.sizes.bindings) if model.sizes is not None else 0):
        assert model.sizes is not None
        other = analyse(model.sizes.graph(i), model.states, in_bodies=False, whole=model.whole)
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


def _changed(have: GraphFactors, other: GraphFactors) -> dict[str, frozenset[str]]:
    """The nodes whose own rules differ, and the factors that may be why."""
    pairs = zip(have.ops, other.ops, strict=True)
    return {
        a.node.name: delicate(a.rule, a.rule.sizes) | delicate(b.rule, b.rule.sizes)
        for a, b in pairs
        if a.rule.text() != b.rule.text()
    }


def stay_whole(nodes: Mapping[str, frozenset[str]], ctx: PassContext, already: Whole) -> Whole:
    """What these nodes must not split any more, which they may have split until now: these factors,
    or those of open sizes, of which those first whose parts are exchanged between ranks; empty
    where nothing is left."""
    factors = ctx.sharding.factors
    found: dict[str, Collection[str] | None] = {}
    for name, given in nodes.items():
        op = factors.find(name)
        if op is None or (op.result in already and already[op.result] is None):
            continue
        open_ = {leaf.factor for leaf in op.leaves if leaf.atom in factors.open_atoms}
        before = frozenset(already.get(op.result) or ())
        narrow = (given or delicate(op.rule, open_)) - before
        found[op.result] = narrow | before if narrow else None
    return found


def _sharding(factors: GraphFactors, decided: Sharding) -> Sharding:
    """What was decided, for the sizes of another graph."""
    return Sharding(
        decided.mesh,
        replace(factors, open_atoms=decided.factors.open_atoms),
        decided.costs,
        {name: list(axes) for name, axes in decided.tensors.items()},
        {name: list(axes) for name, axes in decided.ops.items()},
        set(decided.pinned),
        dict(decided.parts),
    )
