"""Repeats the passes at other bindings of a model's open sizes, with the same decisions."""

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
from onnxpar.sharding.factors import GraphFactors, OpFactors
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
    """Runs the passes that follow propagation at every other binding, and adds the results to
    `ctx.lowered.replays`; `ctx` is the context in which they ran first."""
    if model.sizes is None:
        return
    for variant in ctx.variants or variants(model)[1]:
        other = _context(ctx, variant.factors)
        run_again(passes, variant.graph, other, _text(variant.sizes))
        ctx.lowered.replays.append((variant.graph, other))


def replay_typical(
    model: Model, ctx: PassContext, passes: Sequence[Pass], profiles: Sequence[Profile]
) -> Iterator[tuple[float, gs.Graph, PassContext]]:
    """Yields, for each profile, its weight, and the graph and context that these passes make at its
    sizes."""
    found = _samples(model, ctx.sharding.factors, ctx.variants)
    for wanted, weight in profiles:
        variant = _analysed(model, ctx.variants[0].number)
        own = _with_leaves(ctx.sharding.factors, variant.factors)
        assert own is not None  # as at this binding before
        factors = at_sizes(own, atom_sizes(found, wanted))
        other = _context(ctx, factors)
        run_again(passes, variant.graph, other, _text(wanted))
        yield weight, variant.graph, other


def variants(model: Model) -> tuple[GraphFactors, list[Variant]]:
    """The factors of the model's graph, and the graph at the other bindings of open sizes.

    What rules split must not depend on sizes, such as whether a slice keeps everything: factors
    that differ between bindings are added to `model.whole`. A binding at which the sizes of factors
    are not known is removed from the model's.
    """
    count = 0 if model.sizes is None else len(model.sizes.bindings)
    each = [_analysed(model, i) for i in range(1, count)]
    while True:
        factors = _factors(model, model.graph)
        more: dict[str, frozenset[str]] = {}
        for other in each:
            for a, b in zip(factors.ops, other.factors.ops, strict=True):
                if is_hidden(a.rule, b):
                    continue
                if not is_alike(a.rule, b.rule):
                    raise _lacks_elements(model, a.node)
                found = _odd_factors(a.rule, b.rule)
                if found:
                    more[a.result] = more.get(a.result, frozenset()) | found
        whole = {**model.whole}
        for result, found in more.items():
            before = whole.get(result, ())
            whole[result] = None if before is None or found <= {*before} else found | {*before}
        growing = model.growing | _growing(model, [factors, *(v.factors for v in each)])
        if whole == model.whole and growing == model.growing:
            return factors, _aligned(model, factors, each)
        model.whole, model.growing = whole, growing
        each = [replace(v, factors=_factors(model, v.graph)) for v in each]


def _lacks_elements(model: Model, node: gs.Node) -> OpenSizesError:
    """An error for a node whose rule at the sizes at which the model is planned differs from those
    at others, in most cases because it has no elements there."""
    assert model.sizes is not None
    return OpenSizesError(
        f"{node.op} '{node.name}' can be planned at {_first_sizes(model)} or at other sizes, but "
        f"not for both; fix sizes with {model.sizes.flags}"
    )


def _first_sizes(model: Model) -> str:
    """The sizes at which the model is planned."""
    assert model.sizes is not None
    return _text(model.sizes.bindings[0])


def _text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _growing(model: Model, each: Sequence[GraphFactors]) -> set[tuple[str, int]]:
    """The dimensions of states, by input and axis, that have the same size before and after a run
    only at some bindings."""
    found = set()
    for source, result in model.states:
        for factors in each:
            both = (factors.tensors.get(source), factors.tensors.get(result))
            dims = [tensor.dims if tensor else () for tensor in both]
            sizes = zip(*dims, strict=False)
            found |= {(source, i) for i, (a, b) in enumerate(sizes) if a.size != b.size}
    return found


def _aligned(model: Model, factors: GraphFactors, each: Sequence[Variant]) -> list[Variant]:
    """The variants with the same leaves as `factors`. Errors: OpenSizesError if none has."""
    found = []
    for variant in each:
        own = _with_leaves(factors, variant.factors)
        if own is not None:
            found.append(replace(variant, factors=own))
    if model.sizes is not None and each and not found:
        raise OpenSizesError(
            f"how the model is split is known only at {_first_sizes(model)}; fix sizes with "
            f"{model.sizes.flags}"
        )
    if model.sizes is not None and len(found) < len(each):
        model.sizes = model.sizes.at([0, *(variant.number for variant in found)])
        found = [replace(variant, number=i) for i, variant in enumerate(found, 1)]
    return found


def _with_leaves(base: GraphFactors, other: GraphFactors) -> GraphFactors | None:
    """The factors of `other` with the leaves of `base`; None if their sizes are not known."""
    return aligned(base, other) if _is_different(base, other) else other


def _odd_factors(one: Rule, other: Rule) -> frozenset[str]:
    """The factors of the dimensions that two rules of a node make up differently, or of which one
    part has more than one element only for the other rule."""
    pairs = zip((*one.inputs, *one.outputs), (*other.inputs, *other.outputs), strict=True)
    exprs = [pair for a, b in pairs for pair in zip(a or (), b or (), strict=True)]
    odd = {v for pair in exprs if pair[0] != pair[1] for expr in pair for v in expr_vars(expr)}
    for group in joint(one):
        sizes = [(one.sizes[f], other.sizes.get(f)) for f in group]
        if any(a is not None and a <= 1 and a != b for a, b in sizes):
            odd |= set(group)
    notes = {f for f in {*one.sizes, *other.sizes} if _notes(one, f) != _notes(other, f)}
    return frozenset(odd | notes)


def _notes(rule: Rule, factor: str) -> tuple[object, ...]:
    """What a rule says of a factor."""
    return (
        rule.reduce.get(factor),
        factor in rule.whole,
        factor in rule.communicating,
        factor in rule.contiguous,
        [group for group in rule.co_sharded if factor in group],
    )


def opened(model: Model, factors: GraphFactors, others: Sequence[Variant]) -> GraphFactors:
    """Returns the factors with marks for those whose sizes are open, found by comparison with the
    other bindings, and with the typical sizes for costs."""
    if not others or model.sizes is None:
        return factors
    found = _samples(model, factors, others)
    each = [(atom_sizes(found, sizes), weight) for sizes, weight in model.sizes.typical]
    return priced(factors.opened(others[0].factors), each)


def _samples(model: Model, factors: GraphFactors, others: Sequence[Variant]) -> list[Sample]:
    """Pairs the factors at each binding with the values of the symbols and atoms there."""
    assert model.sizes is not None
    pairs = [(model.sizes.bindings[0], factors), *((v.sizes, v.factors) for v in others)]
    atoms = model.sizes.atoms
    values: list[dict[Variable, int]] = [dict(at.items()) for at, _ in pairs]
    for each, (at, _) in zip(values, pairs, strict=True):
        each.update({atom: atom.at(at) for atom in atoms})
    return [(each, found) for each, (_, found) in zip(values, pairs, strict=True)]


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
    """Returns a context with the same decisions for the same graph at other sizes."""
    return PassContext(ctx.model, _sharding(factors, ctx.sharding), choices=ctx.choices)


def _is_different(have: GraphFactors, other: GraphFactors) -> bool:
    """True if a tensor or a node has other atoms in the two graphs."""
    for name, tensor in other.tensors.items():
        known = have.tensors.get(name)
        if known is None or [x.atom for x in known.leaves] != [x.atom for x in tensor.leaves]:
            return True
    return any(
        [(x.atom, x.factor) for x in a.leaves] != [(x.atom, x.factor) for x in b.leaves]
        for a, b in zip(have.ops, other.ops, strict=True)
    )


def stay_whole(
    nodes: Mapping[str, frozenset[str]], graph: gs.Graph, ctx: PassContext, already: Whole
) -> Whole:
    """The factors that must stay whole from now on, by the result of a node, so that open sizes
    work.

    `nodes` has factors by node of the lowered graph, or by weight, for the nodes that read it; if
    it has none for a node, its factors of open sizes are taken, first those between whose shards
    ranks communicate; of a reshard, the factors that cut the dimension into segments, and if there
    are none, all of the dimension. Empty if there is nothing left to forbid.
    """
    factors = ctx.sharding.factors
    found: dict[str, Collection[str] | None] = {}
    readers = [
        (op.node.name, given)
        for name, given in nodes.items()
        for op in factors.ops
        if name in factors.tensors and any(t.name == name for t in op.node.inputs)
    ]
    for name, given in [*nodes.items(), *readers]:
        op = factors.find(name)
        if op is None:
            dims = list(_resharded(name, graph, factors))
            found.update(_uncut(dims, factors, already) or _unsplit(dims, factors, already))
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


def _unsplit(dims: Sequence[frozenset[int]], factors: GraphFactors, already: Whole) -> Whole:
    """Forbids the factors of one of these dimensions whose sizes are open."""
    atoms = frozenset[int]().union(*dims) & factors.open_atoms

    def split(op: OpFactors) -> set[str]:
        return {factor for factor, own in op.atoms.items() if atoms.intersection(own)}

    return _forbidden(split, factors, already)


def _uncut(dims: Sequence[frozenset[int]], factors: GraphFactors, already: Whole) -> Whole:
    """Forbids the factors by which a node cuts one of these dimensions into segments: a rank holds
    a shard of each segment, and the order of these shards in the whole dimension has no closed
    form."""

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
    """The factors that must stay whole if each node forbids `more`, of the nodes where that is
    new."""
    found = {}
    for op in factors.ops:
        before, own = already.get(op.result, ()), more(op)
        if before is not None and not own <= set(before):
            found[op.result] = own | set(before)
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
