"""Finds the factors of a whole graph by unification.

The sharding rule of a node relates the dimensions of its operands and results: MatMul is
`m k, k n -> m n`. Unifying these dimensions over all nodes divides each dimension into atoms, the
parts that no op divides further.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from onnxpar.graph.attribute_weights import attribute_weights
from onnxpar.graph.subgraphs import bodies, is_random
from onnxpar.graph.tensors import Whole, tensor_shape
from onnxpar.load.fused_units import fused_tensors
from onnxpar.rules.rule import rule_of, whole_rule
from onnxpar.sharding.apart import apart_in_dims
from onnxpar.sharding.atoms import Atoms, unsplit_tree
from onnxpar.sharding.bonds import edges_of, not_alike
from onnxpar.sharding.factors import Chosen, OpFactors, TensorFactors
from onnxpar.sharding.graph_factors import GraphFactors
from onnxpar.sharding.mixtures import Mixture, find_mixtures
from onnxpar.sharding.narrow import narrowed
from onnxpar.sharding.op_factors import Joined, op_factors
from onnxpar.sharding.unify import IndexVar, compose, unify

_RANDOM = "one rank draws its random values for all ranks"
_OPEN = "the model has open sizes, so every rank runs its bodies whole; fix them with --dim NAME=N"


def analyse(
    graph: gs.Graph,
    pairs: Iterable[tuple[str, str]] = (),
    in_bodies: bool = True,
    whole: Whole | None = None,
    on_host: Collection[str] = (),
    growing: Collection[tuple[str, int]] = (),
    in_file: Mapping[str, str] | None = None,
) -> GraphFactors:
    """Returns the atoms (parts of dimensions) of every dimension of the graph; with `in_bodies`,
    also of dimensions in the bodies of If, Loop and Scan.

    pairs             state pairs (an input, and the output that is its next value): their
                      dimensions correspond without an op between them; dimensions of different
                      sizes (a cache that grows) stay separate
    growing           (input, axis) of more dimensions of state pairs that stay separate, because
                      their sizes differ at other values of the open sizes (known only at run time)
    whole             by name of a node's first result, the factors that the node must not split;
                      None instead of factors: all of them
    on_host, in_file  fields of the returned `GraphFactors`
    """
    factors = _Analysis(graph, pairs, in_bodies, whole or {}, growing).run()
    return replace(factors, on_host=frozenset(on_host), in_file=in_file or {})


class _Analysis:
    """The unification of one graph's dimensions. Its fields are the parameters of `analyse`, and:

    dims    the index variables of each tensor's dimensions, by name; None for an unknown rank
    joined  the nodes whose rules have been applied, in graph order
    atoms   gives numbers to atoms (parts of dimensions)
    """

    def __init__(
        self,
        graph: gs.Graph,
        pairs: Iterable[tuple[str, str]],
        in_bodies: bool,
        whole: Whole,
        growing: Collection[tuple[str, int]],
    ) -> None:
        self.growing = growing
        self.whole = whole
        self.graph = graph
        self.pairs = list(pairs)
        self.in_bodies = in_bodies
        self.dims: dict[str, list[IndexVar] | None] = {}
        self.joined: list[Joined] = []
        self.atoms = Atoms()

    def run(self) -> GraphFactors:
        """Applies the rules of all nodes, then returns the factors of all tensors and nodes."""
        self._join_all(self.graph)
        for a, b in self.pairs:
            both = zip(self.dims.get(a) or (), self.dims.get(b) or (), strict=False)
            for axis, (x, y) in enumerate(both):
                if (a, axis) not in self.growing:
                    unify(x, y)
        tensors = {}
        for name, dims in self.dims.items():
            if dims is not None:
                tensors[name] = self._tensor(dims)
        for tensor in [*self.graph.inputs, *self.graph.outputs]:
            if tensor.name not in tensors and tensor_shape(tensor) is not None:
                tensors[tensor.name] = self._tensor(self._dims(tensor) or [])
        fused = fused_tensors(self.graph) | attribute_weights(self.graph)
        mixtures = tuple(find_mixtures(self.graph))
        ops = _with_chosen(mixtures, self._ops(tensors, fused), tensors)
        return GraphFactors(tensors, ops, fused=fused, mixtures=mixtures)

    def _ops(self, tensors: Mapping[str, TensorFactors], fused: frozenset[str]) -> list[OpFactors]:
        """Returns the factors of all nodes, in graph order.

        A fused tensor lies between two nodes that onnxruntime fuses, so it is never resharded. A
        leaf (a part of a dimension) stays whole if the producer and a reader of a fused tensor
        cannot both split it. Partial sums do not pass a node that reads a fused tensor, because the
        node may round its other operands.
        """
        for n, joined in enumerate(self.joined):
            if not fused.isdisjoint(t.name for t in joined.node.inputs):
                rule = replace(joined.rule, linear=(), monotone=frozenset())
                self.joined[n] = joined._replace(rule=rule)
        ops = [op_factors(joined, self.dims, tensors, self.atoms) for joined in self.joined]
        edges = edges_of(ops, fused)
        held: dict[int, set[tuple[str, int]]] = defaultdict(set)
        while unlike := not_alike(ops, edges):
            for n, leaves in unlike.items():
                held[n] |= {(ops[n].leaves[i].factor, ops[n].leaves[i].atom) for i in leaves}
                ops[n] = op_factors(self.joined[n], self.dims, tensors, self.atoms, held[n])
        return ops

    def _dims(self, tensor: gs.Tensor) -> list[IndexVar] | None:
        """Returns a tensor's index variables, one per dimension, new at the first call; None if the
        tensor's rank is unknown."""
        if tensor.name not in self.dims:
            shape = tensor_shape(tensor)
            self.dims[tensor.name] = (
                None if shape is None else [IndexVar(-1 if s is None else s) for s in shape]
            )
        return self.dims[tensor.name]

    def _join_all(self, graph: gs.Graph) -> None:
        """Applies the rules of all nodes of a graph. Nodes of a body come before the node with the
        body."""
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
            self._join(Joined(node, graph, rule, factors, opened))

    def _join(self, joined: Joined) -> None:
        """Unifies the dimensions of a node's operands and results with the factors of the node's
        rule."""
        for tensor, spec in joined.operands():
            dims = self._dims(tensor) if tensor.name else None
            if spec is None or dims is None:
                continue
            node = joined.node
            assert len(spec) == len(dims), f"{node.op} '{node.name}': {joined.rule.text()}"
            for expr, dim in zip(spec, dims, strict=True):
                unify(dim, compose(expr, joined.factors))
        self.joined.append(joined)

    def _tensor(self, dims: list[IndexVar]) -> TensorFactors:
        """Returns the factors of a tensor from the index variables of its dimensions, after all
        rules are applied."""
        per_dim = [list(self.atoms.leaves(d)) for d in dims]
        trees = tuple(unsplit_tree(d) for d in dims)
        return TensorFactors(
            trees,
            tuple(leaf for leaves in per_dim for leaf in leaves),
            tuple(i for i, leaves in enumerate(per_dim) for _ in leaves),
            apart_in_dims(trees, list(map(len, per_dim))),
        )


def _with_chosen(
    mixtures: Iterable[Mixture], ops: Sequence[OpFactors], tensors: Mapping[str, TensorFactors]
) -> list[OpFactors]:
    """Returns the factors `ops` of the nodes, in order. A node of a mixture of experts gets
    `chosen`: the share of rows that the mixture's router chooses."""
    chosen: dict[int, Chosen] = {}
    for mixture in mixtures:
        mask = mixture.rows.chosen.name
        leaves = tensors[mask].leaves if mask in tensors else ()
        if leaves and mixture.share is not None:
            is_trained = mixture.rows.leave is None
            rows = frozenset(leaf.atom for leaf in leaves[1:] if is_trained)
            choice = Chosen(mixture.share, leaves[0].atom, rows)
            chosen.update((id(node), choice) for node in mixture.rows.computing)
    return [replace(op, chosen=chosen[id(op.node)]) if id(op.node) in chosen else op for op in ops]
