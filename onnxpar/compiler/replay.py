"""Repeats the passes at other bindings of a model's open sizes, with the same decisions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from onnxpar.compiler.pass_ import Pass, PassContext, Variant
from onnxpar.errors import OpenSizesError
from onnxpar.ir.origin import origin_of
from onnxpar.ir.tensors import Whole
from onnxpar.load.load import Model
from onnxpar.open_sizes.typical import Profile
from onnxpar.sharding.analysis import analyse
from onnxpar.sharding.factors import GraphFactors, OpFactors
from onnxpar.sharding.narrow import delicate, joint
from onnxpar.sharding.sized_factors import Sample, at_sizes, atom_sizes, priced
from onnxpar.sharding.state import ShardingState
from onnxpar.symbols.fits import ENOUGH
from onnxpar.symbols.symbols import Variable


def replay(model: Model, ctx: PassContext, passes: Sequence[Pass]) -> None:
    """Runs the passes that follow propagation at every other binding, and adds the results to
    `ctx.lowered.replays`.

    `ctx` is the context in which they ran first. A binding at which the graph has other factors,
    since sizes coincide there, is removed from the model's bindings. Errors: OpenSizesError if too
    few remain: then the structure of the model depends on its sizes.
    """
    sizes = model.sizes
    if sizes is None:
        return
    kept, odd = [0], ""
    nodes: dict[str, frozenset[str]] = {}
    known = {variant.number: variant for variant in ctx.variants}
    for i in range(1, len(sizes.bindings)):
        variant = known.get(i) or _analysed(model, i)
        difference = "" if i in known else _difference(ctx.sharding.factors, variant.factors)
        if difference:
            odd = difference
            for name, changed in _changed(ctx.sharding.factors, variant.factors).items():
                nodes[name] = nodes.get(name, frozenset()) | changed
            continue
        kept.append(i)
        other = _context(ctx, variant.factors)
        for step in passes:
            step.run(variant.graph, other)
        ctx.lowered.replays.append((variant.graph, other))
    if len(kept) < ENOUGH:
        raise OpenSizesError(f"{odd} depends on open sizes; fix them with {sizes.flags}", nodes)
    model.sizes = replace(sizes, bindings=[sizes.bindings[i] for i in kept])


def replay_typical(
    model: Model, ctx: PassContext, passes: Sequence[Pass], profiles: Sequence[Profile]
) -> Iterator[tuple[float, gs.Graph, PassContext]]:
    """Yields, for each profile, its weight, and the graph and context that these passes make at its
    sizes."""
    found = _samples(model, ctx.sharding.factors, ctx.variants)
    for wanted, weight in profiles:
        variant = _analysed(model, ctx.variants[0].number)
        factors = at_sizes(variant.factors, atom_sizes(found, wanted))
        other = _context(ctx, factors)
        for step in passes:
            step.run(variant.graph, other)
        yield weight, variant.graph, other


def variants(model: Model, factors: GraphFactors) -> list[Variant]:
    """The graph at the other bindings of open sizes; bindings at which sizes coincide are left
    out."""
    count = 0 if model.sizes is None else len(model.sizes.bindings)
    each = (_analysed(model, i) for i in range(1, count))
    return [variant for variant in each if not _difference(factors, variant.factors)]


def opened(model: Model, factors: GraphFactors, others: Sequence[Variant]) -> GraphFactors:
    """Returns the factors with marks for those whose sizes are open, found by comparison with the
    other bindings, and with the typical sizes for costs."""
    if not others or model.sizes is None:
        return factors
    found = _samples(model, factors, others)
    each = [(atom_sizes(found, sizes), weight) for sizes, weight in model.sizes.typical]
    return priced(factors.opened(others[0].factors), each)


def _samples(model: Model, factors: GraphFactors, others: Sequence[Variant]) -> list[Sample]:
    """Pairs the factors at each binding with the values of the symbols and quotients there."""
    assert model.sizes is not None
    pairs = [(model.sizes.bindings[0], factors), *((v.sizes, v.factors) for v in others)]
    quotients = model.sizes.quotients
    values: list[dict[Variable, int]] = [dict(at.items()) for at, _ in pairs]
    for each, (at, _) in zip(values, pairs, strict=True):
        each.update({q: q.at(at) for q in quotients})
    return [(each, found) for each, (_, found) in zip(values, pairs, strict=True)]


def _analysed(model: Model, number: int) -> Variant:
    assert model.sizes is not None
    graph = model.sizes.graph(number)
    factors = analyse(graph, model.states, False, model.whole, model.on_host)
    return Variant(number, model.sizes.bindings[number], graph, factors)


def _context(ctx: PassContext, factors: GraphFactors) -> PassContext:
    """Returns a context with the same decisions for the same graph at other sizes."""
    return PassContext(ctx.model, _sharding(factors, ctx.sharding), choices=ctx.choices)


def _difference(have: GraphFactors, other: GraphFactors) -> str:
    """Describes the first tensor or node that has other atoms in the two graphs; empty if there is
    none."""
    for name, tensor in other.tensors.items():
        known = have.tensors.get(name)
        if known is None or [x.atom for x in known.leaves] != [x.atom for x in tensor.leaves]:
            return f"how the dimensions of '{name}' are made up"
    for a, b in zip(have.ops, other.ops, strict=True):
        if [(x.atom, x.factor) for x in a.leaves] != [(x.atom, x.factor) for x in b.leaves]:
            return f"how {a.node.op} '{a.node.name}' can be split"
    return ""


def _changed(have: GraphFactors, other: GraphFactors) -> dict[str, frozenset[str]]:
    """The nodes whose rules differ between two bindings, each with the factors that may be the
    reason."""
    pairs = zip(have.ops, other.ops, strict=True)
    return {
        a.node.name: delicate(a.rule, a.rule.sizes) | delicate(b.rule, b.rule.sizes)
        for a, b in pairs
        if a.rule.text() != b.rule.text()
    }


def stay_whole(
    nodes: Mapping[str, frozenset[str]], graph: gs.Graph, ctx: PassContext, already: Whole
) -> Whole:
    """The factors that must stay whole from now on, by the result of a node, so that open sizes
    work.

    `nodes` has factors by node of the lowered graph; if it has none for a node, its factors of open
    sizes are taken, first those between whose shards ranks communicate. Empty if there is nothing
    left to forbid.
    """
    factors = ctx.sharding.factors
    found: dict[str, Collection[str] | None] = {}
    for name, given in nodes.items():
        op = factors.find(name)
        if op is None:
            found.update(_uncut(_resharded(name, graph, factors), factors, already))
            continue
        if op.result in already and already[op.result] is None:
            continue
        before = frozenset(already.get(op.result) or ())
        narrow = (given or delicate(op.rule, _open_factors(op, factors))) - before
        found[op.result] = narrow | before if narrow else None
    return found


def _open_factors(op: OpFactors, factors: GraphFactors) -> frozenset[str]:
    return frozenset(leaf.factor for leaf in op.leaves if leaf.atom in factors.open_atoms)


def _resharded(name: str, graph: gs.Graph, factors: GraphFactors) -> Iterator[frozenset[int]]:
    """The atoms of each open dimension of the tensors that a reshard of this name makes."""
    for node in graph.nodes:
        source = vars(node).get("onnx_source")
        if source is None or origin_of(source) != name:
            continue
        for tensor in [factors.tensors[t.name] for t in node.outputs if t.name in factors.tensors]:
            for axis, _ in enumerate(tensor.dims):
                pairs = zip(tensor.leaves, tensor.dim_of_leaf, strict=True)
                atoms = frozenset(leaf.atom for leaf, dim in pairs if dim == axis)
                if atoms & factors.open_atoms:
                    yield atoms


def _uncut(dims: Iterable[frozenset[int]], factors: GraphFactors, already: Whole) -> Whole:
    """Forbids the factors by which a node cuts one of these dimensions into segments: a rank holds
    a shard of each segment, and the order of these shards in the whole dimension has no closed
    form."""
    wanted = list(dims)
    found = {}
    for op in factors.ops:
        before = already.get(op.result, ())
        cut = {
            factor
            for group in joint(op.rule)
            for factor in group
            for dim in wanted
            if {*op.atoms[factor]} & dim and {a for f in group for a in op.atoms[f]} <= dim
        }
        if before is not None and not cut <= set(before):
            found[op.result] = cut | set(before)
    return found


def _sharding(factors: GraphFactors, decided: ShardingState) -> ShardingState:
    """Returns a sharding state with the same decisions for the same graph at other sizes."""
    return ShardingState(
        decided.mesh,
        replace(factors, open_atoms=decided.factors.open_atoms),
        decided.costs,
        {name: list(axes) for name, axes in decided.tensors.items()},
        {name: list(axes) for name, axes in decided.ops.items()},
        set(decided.pinned),
        dict(decided.parts),
    )
