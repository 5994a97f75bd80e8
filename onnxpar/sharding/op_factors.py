"""Expresses a node's sharding rule in the atoms of the graph (parts of dimensions that no op
divides further)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import onnx_graphsurgeon as gs

from onnxpar.rules.control_flow import ports
from onnxpar.rules.notation import Spec, expr_vars
from onnxpar.rules.rule import Rule
from onnxpar.sharding.apart import apart_in_op, never_together
from onnxpar.sharding.atoms import Atoms, has_major, unsplit_tree
from onnxpar.sharding.factors import (
    BodyFactors,
    Leaf,
    Links,
    OpFactors,
    OpLeaf,
    Pairs,
    TensorFactors,
)
from onnxpar.sharding.unify import IndexVar, compose, same

_CUT_HERE = "its dimensions do not line up here"
_UNKNOWN = "a data-dependent size"
_FUSED = "onnxruntime fuses this node with a neighbour, which cannot be split this way"

Held = Collection[tuple[str, int]]
"""Leaves of a node that must stay whole, as (factor, atom)."""


class Joined(NamedTuple):
    """A node with its rule, after the rule has been unified with the dimensions of its tensors.

    graph    the graph or body that contains the node
    factors  the index variables of the rule's factors
    bodies   the bodies that are split together with the node
    """

    node: gs.Node
    graph: gs.Graph
    rule: Rule
    factors: dict[str, IndexVar]
    bodies: list[gs.Graph]

    def operands(self) -> Iterator[tuple[gs.Tensor, Spec | None]]:
        """Yields every operand and result of the node and of its bodies, each with the rule's
        expressions of its dimensions; None for a tensor that has no layout."""
        operands, results = ports(self.node, self.bodies)
        for tensors, specs in ((operands, self.rule.inputs), (results, self.rule.outputs)):
            yield from zip(tensors, [*specs, *[None] * (len(tensors) - len(specs))], strict=True)


def op_factors(
    joined: Joined,
    dims: Mapping[str, Sequence[IndexVar] | None],
    tensors: Mapping[str, TensorFactors],
    atoms: Atoms,
    held: Held = (),
) -> OpFactors:
    """Returns the factors of a node in atoms (parts of dimensions), after the dimensions of the
    whole graph are unified.

    dims     the index variables of each tensor's dimensions, by name; None for an unknown rank
    tensors  the factors of each tensor, by name
    held     leaves of the node, as (factor, atom), that must stay whole
    """
    node, bodies = joined.node, joined.bodies
    whole = _whole_factors(joined, dims, held)
    by_factor = {name: list(atoms.leaves(factor)) for name, factor in joined.factors.items()}
    leaves, index = _op_leaves(joined.rule, by_factor, whole, held)
    co_sharded = tuple(
        tuple(i for f in group for i in index[f][:1] if i is not None)
        for group in joined.rule.co_sharded
        if not any(f in whole for f in group)
    )
    links = [_links(tensors.get(t.name), spec, index) for t, spec in joined.operands()]
    at = iter(links)
    inputs = tuple(islice(at, len(node.inputs)))
    body_outputs = [tuple(islice(at, len(b.outputs))) for b in bodies]
    outputs = tuple(islice(at, len(node.outputs)))
    body_inputs = [tuple(islice(at, len(b.inputs))) for b in bodies]
    names = [t.name for t, _ in joined.operands()]
    rings = frozenset(
        (i, j)
        for a, b in joined.rule.rings
        for i in index[a]
        for j in index[b]
        if i is not None and j is not None
    )
    alike = list(zip(names, links, strict=True))
    return OpFactors(
        node=node,
        graph=joined.graph,
        rule=joined.rule,
        leaves=leaves,
        inputs=inputs,
        outputs=outputs,
        whole=whole,
        trees={name: unsplit_tree(factor) for name, factor in joined.factors.items()},
        apart=_apart(joined, alike, tensors, leaves, co_sharded) | rings | _reversed(rings),
        co_sharded=co_sharded,
        rings=rings,
        bodies=tuple(map(BodyFactors, bodies, body_inputs, body_outputs)),
        result=node.outputs[0].name if node.outputs else "",
        atoms={
            name: tuple(leaf.atom for leaf in leaves_of_factor)
            for name, leaves_of_factor in by_factor.items()
        },
    )


def _whole_factors(
    joined: Joined, dims: Mapping[str, Sequence[IndexVar] | None], held: Held
) -> dict[str, str]:
    """Returns the factors of a node that stay whole, each with the reason. The parameters are those
    of `op_factors`."""
    rule, factors = joined.rule, joined.factors
    whole = dict(rule.whole)
    for name, size in rule.sizes.items():
        if size is None:
            whole.setdefault(name, _UNKNOWN)
    for tensor, spec in joined.operands():
        for expr, dim in zip(spec or (), dims.get(tensor.name) or (), strict=False):
            if not same(compose(expr, factors), dim):
                whole.update({v: whole.get(v, _CUT_HERE) for v in expr_vars(expr)})
    for group in rule.co_sharded:
        if any(f in whole or not has_major(factors[f]) for f in group):
            whole.update({f: whole.get(f, _CUT_HERE) for f in group})
        if any(f in group for f, _ in held):
            whole.update({f: whole.get(f, _FUSED) for f in group})
    return whole


def _op_leaves(
    rule: Rule, by_factor: Mapping[str, Sequence[Leaf]], whole: dict[str, str], held: Held
) -> tuple[tuple[OpLeaf, ...], dict[str, list[int | None]]]:
    """Returns the node's splittable leaves (parts of dimensions), and for each factor the indices
    of its leaves; None instead of an index for a leaf that stays whole. A factor of which all
    leaves are in `held` is added to `whole`."""
    co_sharded = {f for group in rule.co_sharded for f in group}
    leaves: list[OpLeaf] = []
    index: dict[str, list[int | None]] = {}
    for name, leaves_of_factor in by_factor.items():
        index[name] = []
        for leaf in leaves_of_factor:
            is_minor = name in co_sharded and bool(index[name])  # its shards are not contiguous
            is_held = is_minor or (name, leaf.atom) in held
            index[name].append(None if name in whole or is_held else len(leaves))
            if index[name][-1] is not None:
                leaves.append(OpLeaf(leaf.atom, leaf.size, name))
    for name in {name for name, _ in held}:
        if all(i is None for i in index[name]):
            whole.setdefault(name, _FUSED)
    return tuple(leaves), index


def _links(
    tensor: TensorFactors | None, spec: Spec | None, index: Mapping[str, Sequence[int | None]]
) -> Links:
    """For each leaf (a part of a dimension) of a tensor, returns the index of the node's leaf with
    the same axes; None if the node needs the leaf whole. `index` has the indices of the node's
    leaves, by factor."""
    if tensor is None or spec is None:
        return (None,) * (len(tensor.leaves) if tensor else 0)
    links: list[int | None] = []
    for i, expr in enumerate(spec):
        count = tensor.dim_of_leaf.count(i)
        indices = [j for v in expr_vars(expr) for j in index[v]]
        links += indices if len(indices) == count else [None] * count
    return tuple(links)


def _reversed(pairs: Pairs) -> Pairs:
    return frozenset((j, i) for i, j in pairs)


def _apart(
    joined: Joined,
    operands: Sequence[tuple[str, Links]],
    tensors: Mapping[str, TensorFactors],
    leaves: Sequence[OpLeaf],
    co_sharded: Sequence[tuple[int, ...]],
) -> Pairs:
    """Returns the pairs of a node's leaves (parts of dimensions) that may be split over the same
    axis: leaves in different segments, co-sharded leaves (which must have the same axes), and
    leaves that no tensor has in common. `operands` has the links of each operand and result."""
    together = {(i, j) for group in co_sharded for i in group for j in group if i != j}
    apart = apart_in_op(operands, tensors) | together
    return apart | never_together(len(leaves), operands) if joined.bodies else apart
