"""Repeats passes at the other bindings of a model's open sizes, with the decisions made at the
first one, so that closed forms can be fitted to the results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from onnxpar.base.errors import OpenSizesError
from onnxpar.compiler.pass_ import Pass, PassContext, Variant
from onnxpar.compiler.run_pass import run_again
from onnxpar.graph.origin import origin_of
from onnxpar.graph.tensors import Whole
from onnxpar.graph.typical import Profile
from onnxpar.layout.symbols import Variable
from onnxpar.load.load import Model
from onnxpar.rules.notation import expr_vars
from onnxpar.rules.rule import Rule
from onnxpar.sharding.analysis import analyse
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.graph_factors import GraphFactors
from onnxpar.sharding.narrow import delicate, joint
from onnxpar.sharding.sized_factors import (
    Sample,
    aligned,
    at_sizes,
    atom_sizes,
    is_alike,
    is_hidden,
    priced,
)
from onnxpar.sharding.state import ShardingState


def replay(model: Model, ctx: PassContext, passes: Sequence[Pass]) -> None:
    """Runs the passes after propagation once more at each further binding (sample sizes) of open
    dimensions, and adds the results (graph, context) to `ctx.lowered.replays`. `ctx` is the context
    of their run at the first binding."""
    if model.sizes is None:
        return
    for variant in ctx.variants or variants(model)[1]:
        other = _context(ctx, variant.factors)
        run_again(passes, variant.graph, other, _text(variant.sizes))
        ctx.lowered.replays.append((variant.graph, other))


def replay_typical(
    model: Model, ctx: PassContext, passes: Sequence[Pass], profiles: Sequence[Profile]
) -> Iterator[tuple[float, gs.Graph, PassContext]]:
    """Runs these passes at the sizes of each profile (typical sizes and their share of runs);
    yields the share, the resulting graph and its context."""
    samples = _samples(model, ctx.sharding.factors, ctx.variants)
    for sizes, weight in profiles:
        variant = _analysed(model, ctx.variants[0].number)
        with_leaves = _with_leaves(ctx.sharding.factors, variant.factors)
        assert with_leaves is not None  # these leaves existed at this binding before
        factors = at_sizes(with_leaves, atom_sizes(samples, sizes))
        other = _context(ctx, factors)
        run_again(passes, variant.graph, other, _text(sizes))
        yield weight, variant.graph, other


def variants(model: Model) -> tuple[GraphFactors, list[Variant]]:
    """Returns the factors of the model's graph, and the graph at each further binding (sample sizes
    of all symbols).

    Which factors a rule can split must not depend on sizes (a slice that keeps all elements only at
    one size): factors that differ between bindings are added to `model.whole`, so that they stay
    whole. A binding at which the sizes of factors are unknown is removed from the model's bindings.
    """
    count = 0 if model.sizes is None else len(model.sizes.bindings)
    others = [_analysed(model, i) for i in range(1, count)]
    while True:
        factors = _factors(model, model.graph)
        more: dict[str, frozenset[str]] = {}
        for other in others:
            for a, b in zip(factors.ops, other.factors.ops, strict=True):
                if is_hidden(a.rule, b):
                    continue
                if not is_alike(a.rule, b.rule):
                    raise _lacks_elements(model, a.node)
                odd = _odd_factors(a.rule, b.rule)
                if odd:
                    more[a.result] = more.get(a.result, frozenset()) | odd
        whole = {**model.whole}
        for result, new in more.items():
            before = whole.get(result, ())
            whole[result] = None if before is None or new <= {*before} else new | {*before}
        growing = model.growing | _growing(model, [factors, *(v.factors for v in others)])
        if whole == model.whole and growing == model.growing:
            return factors, _aligned(model, factors, others)
        model.whole, model.growing = whole, growing
        others = [replace(v, factors=_factors(model, v.graph)) for v in others]


def _lacks_elements(model: Model, node: gs.Node) -> OpenSizesError:
    """Returns the error for a node whose rule is different at the plan's sizes than at other sizes;
    mostly because a tensor is empty there."""
    assert model.sizes is not None
    return OpenSizesError(
        f"{node.op} '{node.name}' can be planned at {_first_sizes(model)} or at other sizes, but "
        f"not for both; fix sizes with {model.sizes.flags}"
    )


def _first_sizes(model: Model) -> str:
    """The first sample sizes, at which the model is planned, as text: `batch=13, seq=17`."""
    assert model.sizes is not None
    return _text(model.sizes.bindings[0])


def _text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _growing(model: Model, all_factors: Sequence[GraphFactors]) -> set[tuple[str, int]]:
    """Returns the dimensions (input, axis) of states whose size changes in a run at some sample
    sizes: a cache that grows."""
    axes = set()
    for source, result in model.states:
        for factors in all_factors:
            both = (factors.tensors.get(source), factors.tensors.get(result))
            dims = [tensor.dims if tensor else () for tensor in both]
            sizes = zip(*dims, strict=False)
            axes |= {(source, i) for i, (a, b) in enumerate(sizes) if a.size != b.size}
    return axes


def _aligned(model: Model, factors: GraphFactors, others: Sequence[Variant]) -> list[Variant]:
    """Returns the variants (the graph at other sample sizes) that can be split like `factors`:
    their tensors consist of the same factors, by position. Others are dropped, also from the
    model's sample sizes. Errors: OpenSizesError if none is left."""
    fitting = []
    for variant in others:
        with_leaves = _with_leaves(factors, variant.factors)
        if with_leaves is not None:
            fitting.append(replace(variant, factors=with_leaves))
    if model.sizes is not None and others and not fitting:
        raise OpenSizesError(
            f"how the model is split is known only at {_first_sizes(model)}; fix sizes with "
            f"{model.sizes.flags}"
        )
    if model.sizes is not None and len(fitting) < len(others):
        model.sizes = model.sizes.at([0, *(variant.number for variant in fitting)])
        fitting = [replace(variant, number=i) for i, variant in enumerate(fitting, 1)]
    return fitting


def _with_leaves(base: GraphFactors, other: GraphFactors) -> GraphFactors | None:
    """Returns the factors of `other`, the graph at other sample sizes, with each tensor divided
    into as many factors as in `base`, so that decisions carry over by position; None if the sizes
    of these factors are unknown."""
    return aligned(base, other) if _is_different(base, other) else other


def _odd_factors(rule: Rule, other: Rule) -> frozenset[str]:
    """Returns the factors about which two rules of one node, at different sample sizes, disagree:
    they make up a dimension differently, have different properties, or have more than one element
    only in `other`."""
    pairs = zip((*rule.inputs, *rule.outputs), (*other.inputs, *other.outputs), strict=True)
    exprs = [pair for a, b in pairs for pair in zip(a or (), b or (), strict=True)]
    odd = {v for pair in exprs if pair[0] != pair[1] for expr in pair for v in expr_vars(expr)}
    for group in joint(rule):
        sizes = [(rule.sizes[f], other.sizes.get(f)) for f in group]
        if any(a is not None and a <= 1 and a != b for a, b in sizes):
            odd |= set(group)
    notes = {f for f in {*rule.sizes, *other.sizes} if _notes(rule, f) != _notes(other, f)}
    return frozenset(odd | notes)


def _notes(rule: Rule, factor: str) -> tuple[object, ...]:
    """Returns all properties of a factor in a rule that decide how it may be split, for
    comparison."""
    return (
        rule.reduce.get(factor),
        factor in rule.whole,
        factor in rule.communicating,
        factor in rule.contiguous,
        [group for group in rule.co_sharded if factor in group],
    )


def mark_open_sizes(model: Model, factors: GraphFactors, others: Sequence[Variant]) -> GraphFactors:
    """Returns `factors` with marks on each factor whose size is open (differs at `others`, the
    graph at other sample sizes), and with typical sizes for costs."""
    if not others or model.sizes is None:
        return factors
    samples = _samples(model, factors, others)
    profiles = [(atom_sizes(samples, sizes), weight) for sizes, weight in model.sizes.typical]
    return priced(factors.opened(others[0].factors), profiles)


def _samples(model: Model, factors: GraphFactors, others: Sequence[Variant]) -> list[Sample]:
    """Returns, for each of the sample sizes, the values of all symbols, quotients and minima, and
    the graph's factors there."""
    assert model.sizes is not None
    pairs = [(model.sizes.bindings[0], factors), *((v.sizes, v.factors) for v in others)]
    atoms = model.sizes.atoms
    values: list[dict[Variable, int]] = [dict(at.items()) for at, _ in pairs]
    for at_binding, (at, _) in zip(values, pairs, strict=True):
        at_binding.update({atom: atom.at(at) for atom in atoms})
    return [
        (at_binding, their_factors)
        for at_binding, (_, their_factors) in zip(values, pairs, strict=True)
    ]


def _factors(model: Model, graph: gs.Graph) -> GraphFactors:
    in_bodies = model.sizes is None
    known = (model.whole, model.on_host, model.growing, model.called.in_file)
    return analyse(graph, model.states, in_bodies, *known)


def _analysed(model: Model, number: int) -> Variant:
    assert model.sizes is not None
    graph = model.sizes.graph(number)
    factors = _factors(model, graph)
    return Variant(number, model.sizes.bindings[number], graph, factors)


def _context(ctx: PassContext, factors: GraphFactors) -> PassContext:
    """Returns a context for the graph at other sizes, with the decisions of `ctx`."""
    return PassContext(ctx.model, _sharding(factors, ctx.sharding), choices=ctx.choices)


def _is_different(base: GraphFactors, other: GraphFactors) -> bool:
    """True if some tensor or node consists of other factors in `other` than in `base`."""
    for name, tensor in other.tensors.items():
        known = base.tensors.get(name)
        if known is None or [x.atom for x in known.leaves] != [x.atom for x in tensor.leaves]:
            return True
    return any(
        [(x.atom, x.factor) for x in a.leaves] != [(x.atom, x.factor) for x in b.leaves]
        for a, b in zip(base.ops, other.ops, strict=True)
    )


def stay_whole(
    nodes: Mapping[str, frozenset[str]], graph: gs.Graph, ctx: PassContext, already: Whole
) -> Whole:
    """Returns factors that must stay whole from now on, by the node's result, so that open sizes
    work; empty if there is nothing left to forbid.

    nodes    the factors to forbid, by name of a node of the lowered graph, or of a weight, for the
             nodes that read it. If empty for a node, its factors of open sizes are forbidden, first
             the factors between whose shards ranks communicate. For a reshard, these are the
             factors that cut its dimension into segments; if there are none, all factors of the
             dimension
    already  the factors that stay whole so far
    """
    factors = ctx.sharding.factors
    whole: dict[str, Collection[str] | None] = {}
    readers = [
        (op.node.name, forbidden)
        for name, forbidden in nodes.items()
        for op in factors.ops
        if name in factors.tensors and any(t.name == name for t in op.node.inputs)
    ]
    for name, forbidden in [*nodes.items(), *readers]:
        op = factors.find(name)
        if op is None:
            dims = list(_resharded(name, graph, factors))
            whole.update(_uncut(dims, factors, already) or _unsplit(dims, factors, already))
            continue
        if op.result in already and already[op.result] is None:
            continue
        before = frozenset(already.get(op.result) or ())
        narrow = (forbidden or delicate(op.rule, _open_factors(op, factors))) - before
        whole[op.result] = narrow | before if narrow else None
    return whole


def _open_factors(op: OpFactors, factors: GraphFactors) -> frozenset[str]:
    return frozenset(leaf.factor for leaf in op.leaves if leaf.atom in factors.open_atoms)


def _resharded(name: str, graph: gs.Graph, factors: GraphFactors) -> Iterator[frozenset[int]]:
    """Yields, for each open dimension of the tensors that the reshard `name` produces, the ids of
    the factors in it (atoms)."""
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


def _unsplit(dims: Sequence[frozenset[int]], factors: GraphFactors, already: Whole) -> Whole:
    """Returns the factors that must stay whole so that no part of these dimensions with an open
    size is split. `dims` has the ids of the factors of each dimension."""
    atoms = frozenset[int]().union(*dims) & factors.open_atoms

    def split(op: OpFactors) -> set[str]:
        return {
            factor
            for factor, atoms_of_factor in op.atoms.items()
            if atoms.intersection(atoms_of_factor)
        }

    return _forbidden(split, factors, already)


def _uncut(dims: Sequence[frozenset[int]], factors: GraphFactors, already: Whole) -> Whole:
    """Returns the factors to keep whole so that no node cuts these dimensions into segments (q + k
    + v). With a shard of each segment on a rank, the order of elements in the dimension has no
    closed form."""

    def cut(op: OpFactors) -> set[str]:
        return {
            factor
            for group in joint(op.rule)
            for factor in group
            for dim in dims
            if {*op.atoms[factor]} & dim and {a for f in group for a in op.atoms[f]} <= dim
        }

    return _forbidden(cut, factors, already)


def _forbidden(
    more: Callable[[OpFactors], set[str]], factors: GraphFactors, already: Whole
) -> Whole:
    """Returns the factors that stay whole if each node also forbids `more(node)`, by the node's
    result; only nodes for which that is new."""
    whole = {}
    for op in factors.ops:
        before, new = already.get(op.result, ()), more(op)
        if before is not None and not new <= set(before):
            whole[op.result] = new | set(before)
    return whole


def _sharding(factors: GraphFactors, decided: ShardingState) -> ShardingState:
    """Returns the sharding state for the graph at other sizes, with the decisions of `decided`."""
    return ShardingState(
        decided.mesh,
        replace(factors, open_atoms=decided.factors.open_atoms),
        decided.costs,
        {name: list(axes) for name, axes in decided.tensors.items()},
        {name: list(axes) for name, axes in decided.ops.items()},
        set(decided.pinned),
        dict(decided.parts),
    )
