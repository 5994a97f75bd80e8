"""The factors of a whole graph: what each dimension of each tensor is made of.

Rules relate the dimensions of one node; unifying them over the graph refines every dimension down
to *atoms*, the index variables that no op cuts further: the 192 columns of a fused QKV weight
become `h d + h d + h d`, because a Reshape far behind it separates heads. Layouts are then an
assignment of mesh axes to atoms, so that granularity needs no further thought: what is split is
never cut inside an atom that some op treats as one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import NamedTuple

import onnx_graphsurgeon as gs

from onnxpar.collapse.fused_units import fused_tensors
from onnxpar.ir.subgraphs import bodies, is_random
from onnxpar.ir.tensors import Whole, tensor_shape
from onnxpar.layout.layout import Concat, Dim, Factor, Product, SizedFactor
from onnxpar.layout.layout import leaves as leaves_of
from onnxpar.layout.mesh import Axes
from onnxpar.rules.control_flow import ports
from onnxpar.rules.notation import Spec, expr_vars
from onnxpar.rules.rule import Rule, rule_of, whole_rule
from onnxpar.sharding.bonds import edges_of, groups, not_alike
from onnxpar.sharding.narrow import narrowed
from onnxpar.sharding.unify import IndexVar, compose, flat, same, unify

_CUT_HERE = "its dimensions do not line up here"
_UNKNOWN = "a size that only a run can tell"
_RANDOM = "it draws random values, which one rank does for all"
_FUSED = "onnxruntime makes one node of it and of a node beside it, which cannot be split so"
_OPEN = "while sizes are open, every rank computes its bodies whole"


@dataclass(frozen=True)
class Leaf:
    """An occurrence of an atom in a tensor: only leaves of two elements or more can be split."""

    atom: int
    size: int


Pairs = frozenset[tuple[int, int]]
"""Pairs of leaves (both orders) that stand in different segments, and so may use the same axis."""


@dataclass(frozen=True)
class TensorFactors:
    """Dimensions of a tensor as unsplit trees, and their splittable leaves in order; `open` are
    those of dimensions whose size only a run can tell. `priced` are the dimensions at the sizes
    that costs are computed at, with weights of which the sum is 1; none: at these sizes."""

    dims: tuple[Dim, ...]
    leaves: tuple[Leaf, ...]
    dim_of_leaf: tuple[int, ...]
    apart: Pairs = frozenset()
    open: frozenset[int] = frozenset()
    priced: tuple[tuple[float, tuple[Dim, ...]], ...] = ()

    @property
    def costed(self) -> tuple[tuple[float, tuple[Dim, ...]], ...]:
        """The dimensions at each of the sizes that costs are computed at, with weights."""
        return self.priced or ((1.0, self.dims),)


@dataclass(frozen=True)
class OpLeaf:
    """A splittable index variable of a node: a piece of one of its rule's factors."""

    atom: int
    size: int
    factor: str


Links = tuple[int | None, ...]


@dataclass(frozen=True, eq=False)
class BodyFactors:
    """A subgraph whose nodes are split like those around it, with the links of what it is handed
    and hands back."""

    graph: gs.Graph
    inputs: tuple[Links, ...]
    outputs: tuple[Links, ...]


@dataclass(eq=False)
class OpFactors:
    """A node's rule over atoms. `inputs[i][j]` is the op leaf behind leaf j of operand i, or None
    where that leaf must be whole; likewise `outputs`. `trees` are the rule's factors, unsplit,
    and `atoms` what their leaves are; `co_sharded` are leaves that are split over the same axes or
    not at all. `graph` is the scope of the node; `bodies` are those that are split with it.
    `result` is the name of its first result, also when it has been replaced. `priced` is the same
    at the sizes that costs are computed at, as of tensors."""

    node: gs.Node
    graph: gs.Graph
    rule: Rule
    leaves: tuple[OpLeaf, ...]
    inputs: tuple[Links, ...]
    outputs: tuple[Links, ...]
    whole: dict[str, str] = field(default_factory=dict)
    trees: dict[str, Dim] = field(default_factory=dict)
    apart: Pairs = frozenset()
    co_sharded: tuple[tuple[int, ...], ...] = ()
    bodies: tuple[BodyFactors, ...] = ()
    result: str = ""
    atoms: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    priced: tuple[tuple[float, OpFactors], ...] = ()

    @property
    def costed(self) -> tuple[tuple[float, OpFactors], ...]:
        """The node at each of the sizes that costs are computed at, with weights."""
        return self.priced or ((1.0, self),)

    def operands(self) -> Iterator[tuple[gs.Tensor, Links]]:
        """Every operand and result with its links, then those of the bodies."""
        yield from zip(self.node.inputs, self.inputs, strict=True)
        yield from zip(self.node.outputs, self.outputs, strict=True)
        for body in self.bodies:
            yield from zip(body.graph.outputs, body.outputs, strict=True)
            yield from zip(body.graph.inputs, body.inputs, strict=True)

    def extent(self, leaf: int) -> int:
        """Elements of a leaf in its tree: at the sizes that the node is taken at."""
        own = self.leaves[leaf]
        found = (f.size for f in leaves_of(self.trees[own.factor]) if f.is_leaf)
        return dict(zip(self.atoms[own.factor], found, strict=True))[own.atom]

    def reduction(self, leaf: int) -> str | None:
        """The reduction that results need where this leaf is split, if any."""
        return self.rule.reduce.get(self.leaves[leaf].factor)


@dataclass(eq=False)
class GraphFactors:
    """The factors of all tensors (by name) and all nodes (in graph order, those of bodies before
    the node that they belong to); the size of `open_atoms` only a run can tell. The `fused` tensors
    are never resharded."""

    tensors: dict[str, TensorFactors]
    ops: list[OpFactors]
    open_atoms: frozenset[int] = frozenset()
    fused: frozenset[str] = frozenset()

    def op(self, name: str) -> OpFactors:
        """The factors of the node of that name."""
        return self._by_name[name]

    def find(self, name: str) -> OpFactors | None:
        """The same, None where there is no such node."""
        return self._by_name.get(name)

    def __post_init__(self) -> None:
        self._by_name = {op.node.name: op for op in self.ops}
        self._bonded: dict[tuple[str, int], list[tuple[OpFactors, int]]] = {}
        for group in groups(self.ops, edges_of(self.ops, self.fused)):
            members = [(self.ops[n], leaf) for n, leaf in sorted(group)]
            self._bonded |= {(op.node.name, leaf): members for op, leaf in members}

    def bonded(self, op: OpFactors, leaf: int) -> Sequence[tuple[OpFactors, int]]:
        """The leaves of nodes, this one among them, that are split over the same axes as this
        one."""
        return self._bonded.get((op.node.name, leaf)) or [(op, leaf)]

    def opened(self, other: GraphFactors) -> GraphFactors:
        """The same, told what is open by the same graph at other sizes."""
        sizes = {leaf.atom: leaf.size for op in other.ops for leaf in op.leaves}
        leaves = [leaf for op in self.ops for leaf in op.leaves]
        atoms = frozenset(x.atom for x in leaves if sizes.get(x.atom, x.size) != x.size)
        tensors = {name: replace(t, open=_open(t, atoms)) for name, t in self.tensors.items()}
        return GraphFactors(tensors, self.ops, atoms, self.fused)


def _open(tensor: TensorFactors, atoms: frozenset[int]) -> frozenset[int]:
    """The leaves of dimensions in which an open atom stands."""
    each = list(zip(tensor.leaves, tensor.dim_of_leaf, strict=True))
    dims = {dim for leaf, dim in each if leaf.atom in atoms}
    return frozenset(i for i, (_, dim) in enumerate(each) if dim in dims)


def analyse(
    graph: gs.Graph,
    pairs: Iterable[tuple[str, str]] = (),
    in_bodies: bool = True,
    whole: Whole | None = None,
) -> GraphFactors:
    """Refines every dimension of the graph, and of the bodies of control flow if it shall, to
    atoms.

    `pairs` are tensors whose dimensions correspond though no op joins them (state pairs); where
    their sizes differ (a cache that grows), those dimensions stay apart. `whole` are factors that
    nodes must not split.
    """
    return _Analysis(graph, pairs, in_bodies, whole or {}).run()


class _Joined(NamedTuple):
    """A node with its rule, whose factors are being refined, and the bodies that take part."""

    node: gs.Node
    graph: gs.Graph
    rule: Rule
    factors: dict[str, IndexVar]
    bodies: list[gs.Graph]


class _Analysis:
    def __init__(
        self, graph: gs.Graph, pairs: Iterable[tuple[str, str]], in_bodies: bool, whole: Whole
    ) -> None:
        self.whole = whole
        self.graph = graph
        self.pairs = list(pairs)
        self.in_bodies = in_bodies
        self.dims: dict[str, list[IndexVar] | None] = {}
        self.joined: list[_Joined] = []
        self.atoms: dict[int, int] = {}

    def run(self) -> GraphFactors:
        self._join_all(self.graph)
        for a, b in self.pairs:
            for x, y in zip(self.dims.get(a) or (), self.dims.get(b) or (), strict=False):
                unify(x, y)
        tensors = {}
        for name, dims in self.dims.items():
            if dims is not None:
                tensors[name] = self._tensor(dims)
        for tensor in [*self.graph.inputs, *self.graph.outputs]:
            if tensor.name not in tensors and tensor_shape(tensor) is not None:
                tensors[tensor.name] = self._tensor(self._dims(tensor) or [])
        fused = fused_tensors(self.graph)
        return GraphFactors(tensors, self._ops(tensors, fused), fused=fused)

    def _ops(self, tensors: Mapping[str, TensorFactors], fused: frozenset[str]) -> list[OpFactors]:
        """The nodes; what cannot be split alike on both sides of a fused tensor is whole. Pending
        sums do not pass nodes that read one, as these may round their other operands."""
        for n, joined in enumerate(self.joined):
            if not fused.isdisjoint(t.name for t in joined.node.inputs):
                rule = replace(joined.rule, linear=(), monotone=frozenset())
                self.joined[n] = joined._replace(rule=rule)
        ops = [self._op(joined, tensors) for joined in self.joined]
        edges = edges_of(ops, fused)
        held: dict[int, set[tuple[str, int]]] = defaultdict(set)
        while unlike := not_alike(ops, edges):
            for n, leaves in unlike.items():
                held[n] |= {(ops[n].leaves[i].factor, ops[n].leaves[i].atom) for i in leaves}
                ops[n] = self._op(self.joined[n], tensors, held[n])
        return ops

    def _dims(self, tensor: gs.Tensor) -> list[IndexVar] | None:
        if tensor.name not in self.dims:
            shape = tensor_shape(tensor)
            self.dims[tensor.name] = (
                None if shape is None else [IndexVar(-1 if s is None else s) for s in shape]
            )
        return self.dims[tensor.name]

    def _join_all(self, graph: gs.Graph) -> None:
        for node in graph.nodes:
            inner = bodies(node)
            opened: list[gs.Graph] = []
            if inner and not self.in_bodies:
                rule = whole_rule(node, _OPEN)
            elif inner and is_random(node):
                rule = whole_rule(node, _RANDOM)
            else:
                for body in inner:
                    self._join_all(body)
                rule = rule_of(node)
                opened = inner
            name = node.outputs[0].name if node.outputs else ""
            if name in self.whole and not inner:
                rule = narrowed(node, rule, self.whole[name])
            factors = {f: IndexVar(-1 if s is None else s) for f, s in rule.sizes.items()}
            self._join(_Joined(node, graph, rule, factors, opened))

    def _join(self, joined: _Joined) -> None:
        node, rule, factors = joined.node, joined.rule, joined.factors
        for tensor, spec in _operands(joined):
            dims = self._dims(tensor) if tensor.name else None
            if spec is None or dims is None:
                continue
            assert len(spec) == len(dims), f"{node.op} '{node.name}': {rule.text()}"
            for expr, dim in zip(spec, dims, strict=True):
                unify(dim, compose(expr, factors))
        self.joined.append(joined)

    def _tree(self, node: IndexVar) -> Dim:
        """The resolved tree of a piece, unsplit."""
        node = node.root()
        if not node.kind or node.size <= 1:
            return Factor(node.size)
        kind = Product if node.kind == "product" else Concat
        children = tuple(self._tree(c) for c in flat(node, node.kind))
        return children[0] if len(children) == 1 else kind(children)

    def _leaves(self, node: IndexVar) -> Iterator[Leaf]:
        node = node.root()
        if node.kind:
            for child in flat(node, node.kind):
                yield from self._leaves(child)
        elif node.size > 1:
            yield Leaf(self.atoms.setdefault(id(node), len(self.atoms)), node.size)

    def _has_major(self, node: IndexVar) -> bool:
        """Whether the first piece can be split so that parts are consecutive."""
        node = node.root()
        return node.size > 1 and node.kind != "concat"

    def _tensor(self, dims: list[IndexVar]) -> TensorFactors:
        per_dim = [list(self._leaves(d)) for d in dims]
        trees = tuple(self._tree(d) for d in dims)
        apart: set[tuple[int, int]] = set()
        at = 0
        for tree, found in zip(trees, per_dim, strict=True):
            apart |= _apart(tree, at)
            at += len(found)
        return TensorFactors(
            trees,
            tuple(leaf for found in per_dim for leaf in found),
            tuple(i for i, found in enumerate(per_dim) for _ in found),
            frozenset(apart),
        )

    def _op(
        self,
        joined: _Joined,
        tensors: Mapping[str, TensorFactors],
        held: Collection[tuple[str, int]] = (),
    ) -> OpFactors:
        """A node over atoms, of which those that are `held`, by factor, are whole."""
        node, rule, factors = joined.node, joined.rule, joined.factors
        whole = dict(rule.whole)
        for name, size in rule.sizes.items():
            if size is None:
                whole.setdefault(name, _UNKNOWN)
        for tensor, spec in _operands(joined):
            for expr, dim in zip(spec or (), self.dims.get(tensor.name) or (), strict=False):
                if not same(compose(expr, factors), dim):
                    whole.update({v: whole.get(v, _CUT_HERE) for v in expr_vars(expr)})
        for group in rule.co_sharded:
            if any(f in whole or not self._has_major(factors[f]) for f in group):
                whole.update({f: whole.get(f, _CUT_HERE) for f in group})
            if any(f in group for f, _ in held):
                whole.update({f: whole.get(f, _FUSED) for f in group})
        tied = {f for group in rule.co_sharded for f in group}
        leaves: list[OpLeaf] = []
        index: dict[str, list[int | None]] = {}
        found_in = {name: list(self._leaves(factor)) for name, factor in factors.items()}
        for name, of_factor in found_in.items():
            index[name] = []
            for leaf in of_factor:
                is_minor = name in tied and bool(index[name])  # a part of it is no run
                is_held = is_minor or (name, leaf.atom) in held
                index[name].append(None if name in whole or is_held else len(leaves))
                if index[name][-1] is not None:
                    leaves.append(OpLeaf(leaf.atom, leaf.size, name))
        for name in {name for name, _ in held}:
            if all(i is None for i in index[name]):
                whole.setdefault(name, _FUSED)

        def links(tensor: gs.Tensor, spec: Spec | None) -> Links:
            have = tensors.get(tensor.name)
            if have is None or spec is None:
                return (None,) * (len(have.leaves) if have else 0)
            out: list[int | None] = []
            for i, expr in enumerate(spec):
                count = have.dim_of_leaf.count(i)
                found = [j for v in expr_vars(expr) for j in index[v]]
                out += found if len(found) == count else [None] * count
            return tuple(out)

        co_sharded = tuple(
            tuple(i for f in group for i in index[f][:1] if i is not None)
            for group in rule.co_sharded
            if not any(f in whole for f in group)
        )
        found = [(t, links(t, s)) for t, s in _operands(joined)]
        trees = {name: self._tree(factor) for name, factor in factors.items()}
        operands = [(t.name, links) for t, links in found]
        apart = _op_apart(operands, tensors) | {
            (i, j) for t in co_sharded for i in t for j in t if i != j
        }
        if joined.bodies:
            apart |= _strangers(len(leaves), operands)
        at = iter([links for _, links in found])
        inputs = tuple(islice(at, len(node.inputs)))
        backs = [tuple(islice(at, len(b.outputs))) for b in joined.bodies]
        outputs = tuple(islice(at, len(node.outputs)))
        givens = [tuple(islice(at, len(b.inputs))) for b in joined.bodies]
        return OpFactors(
            node,
            joined.graph,
            rule,
            tuple(leaves),
            inputs,
            outputs,
            whole,
            trees,
            apart,
            co_sharded,
            tuple(map(BodyFactors, joined.bodies, givens, backs)),
            node.outputs[0].name if node.outputs else "",
            {name: tuple(x.atom for x in of_factor) for name, of_factor in found_in.items()},
        )


def _apart(dim: Dim, at: int) -> set[tuple[int, int]]:
    """Pairs of leaves, counted from `at`, whose paths part at a concatenation."""
    if isinstance(dim, Factor):
        return set()
    pairs: set[tuple[int, int]] = set()
    spans = []
    for child in dim.children:
        count = sum(leaf.size > 1 for leaf in leaves_of(child))
        pairs |= _apart(child, at)
        spans.append(range(at, at + count))
        at += count
    if isinstance(dim, Concat):
        pairs |= {(i, j) for a in spans for b in spans if a is not b for i in a for j in b}
    return pairs


def _op_apart(
    operands: Iterable[tuple[str, tuple[int | None, ...]]], tensors: Mapping[str, TensorFactors]
) -> Pairs:
    """Op leaves that stand in different segments wherever they meet."""
    operands = list(operands)
    if not any(name in tensors and tensors[name].apart for name, _ in operands):
        return frozenset()
    apart: set[tuple[int, int]] = set()
    together: set[tuple[int, int]] = set()
    for name, links in operands:
        pairs = tensors[name].apart if name in tensors else frozenset[tuple[int, int]]()
        for i, a in enumerate(links):
            for j, b in enumerate(links):
                if i != j and a is not None and b is not None:
                    (apart if (i, j) in pairs else together).add((a, b))
    return frozenset(apart - together)


def _strangers(count: int, operands: Iterable[tuple[str, Links]]) -> Pairs:
    """Op leaves that stand in no tensor together: values on different paths through a body."""
    pairs = {(i, j) for i in range(count) for j in range(count) if i != j}
    return frozenset(pairs.difference(*(product(links, links) for _, links in operands)))


def _operands(joined: _Joined) -> Iterator[tuple[gs.Tensor, Spec | None]]:
    operands, results = ports(joined.node, joined.bodies)
    for tensors, specs in ((operands, joined.rule.inputs), (results, joined.rule.outputs)):
        yield from zip(tensors, [*specs, *[None] * (len(tensors) - len(specs))], strict=True)


def with_axes(dim: Dim, axes: Iterator[tuple[Axes, tuple[int, ...] | None]]) -> Dim:
    """The tree with its splittable leaves given, in order, (axes, parts) from the iterator; those
    that it does not reach are whole."""
    if isinstance(dim, Factor):
        if not dim.is_leaf:
            return dim
        over, parts = next(axes, ((), None))
        if isinstance(dim, SizedFactor):  # sizes by hand are those of another size
            parts = parts if parts and sum(parts) == dim.size else None
        return type(dim)(dim.size, over, parts)
    return type(dim)(tuple(with_axes(c, axes) for c in dim.children))
