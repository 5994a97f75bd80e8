"""Rewrites groups of nodes by tables of patterns.

A pattern is an op with patterns of its first operands; behind it, the table has the function that
writes other nodes instead.

Example:

    def halve(at: Match) -> None:
        at.add("Sigmoid", [at.add("Add", [at["x"], at["x"]])])

    half = Known("half", [0.5])
    table = {Op("Add", Op("Mul", Op("Tanh", "x"), half), half): halve}

Before:

    t = Tanh(x)
    m = Mul(t, half)
    y = Add(m, half)

After:

    y::Add2 = Add(x, x)
    y = Sigmoid(y::Add2)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from onnxpar.base.arrays import Array
from onnxpar.base.names import Names
from onnxpar.graph.stored import reads_of, subgraphs_of
from onnxpar.graph.used_names import names_in


@dataclass(frozen=True)
class Known:
    """The pattern of a constant; with `elements`, only of a constant that has exactly these. `name`
    is the name under which a Match has its value."""

    name: str
    elements: Sequence[float] | None = None


class Op:
    """The pattern of a node of this op, or of one of several ops; `name` is the name under which a
    Match has the node.

    Each operand is a pattern: an `Op` for the node that computes it, a `Known` for a constant, or a
    text for any tensor, which a Match has under this name; equal texts must be the same tensor.
    Attributes (keywords) must have this value, or one of the values in a tuple, where None stands
    for an attribute that is left out.
    """

    def __init__(
        self,
        op: str | tuple[str, ...],
        *operands: Op | Known | str,
        domain: str = "",
        name: str = "",
        **attrs: Any,
    ) -> None:
        self.ops = op if isinstance(op, tuple) else (op,)
        self.operands, self.domain, self.name, self.attrs = operands, domain, name, attrs

    def match(self, node: NodeProto, scope: Scope) -> Match | None:
        """Returns the match if the node has this pattern, else None. `scope` is the graph of the
        node."""
        at = Match(node, scope)
        return at if self.fits(node, at) else None

    def fits(self, node: NodeProto, at: Match) -> bool:
        """True if the node has this pattern; records in `at` all that the pattern names."""
        domain = "" if node.domain == "ai.onnx" else node.domain
        if node.op_type not in self.ops or domain != self.domain:
            return False
        attrs = attributes(node) if self.attrs else {}
        for key, wanted in self.attrs.items():
            if attrs.get(key) not in (wanted if isinstance(wanted, tuple) else (wanted,)):
                return False
        at.bound[self.name] = node
        own = [*node.input, *[""] * len(self.operands)]
        return all(map(at.fits, self.operands, own))


class Match:
    """A node that has a pattern, and the nodes that a function of a table writes in its place.
    `at["x"]` is the tensor (its name), node or value that the pattern calls "x".

    bound   all that the pattern names: tensors by name, nodes, and the values of constants
    inside  the nodes that compute operands; they are removed if nothing else reads their results
    nodes   the nodes to write in place of `node`
    main    the index in `nodes` of the node that gets the name and the metadata of `node`; -1: the
            last
    shared  nodes of other matches that `nodes` read
    """

    def __init__(self, node: NodeProto, scope: Scope) -> None:
        self.node, self.scope = node, scope
        self.bound: dict[str, Any] = {}
        self.inside: list[NodeProto] = []
        self.nodes: list[NodeProto] = []
        self.shared: list[NodeProto] = []
        self.main = -1

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]

    def fits(self, pattern: Op | Known | str, tensor: str) -> bool:
        """True if the operand `tensor` has this pattern; an operand that is left out (empty) has
        none."""
        if isinstance(pattern, Op):
            maker = self.scope.maker(tensor)
            self.inside += [] if maker is None else [maker]
            return maker is not None and pattern.fits(maker, self)
        if isinstance(pattern, Known):
            value = self.bound[pattern.name] = self.scope.value(tensor)
            wanted = pattern.elements
            return value is not None and (wanted is None or value.ravel().tolist() == wanted)
        return bool(tensor) and self.bound.setdefault(pattern, tensor) == tensor

    def operand(self, index: int) -> str:
        """Returns the name of an operand of the matched node; empty if it is left out."""
        return self.node.input[index] if index < len(self.node.input) else ""

    def add(
        self, op: str, operands: Iterable[Any], label: str = "", outputs: int = 1, **attrs: Any
    ) -> str:
        """Adds a node to `nodes`; returns the name of its result, or of the first one. The results
        of the last node later get the names of the matched node's results.

        operands  names of tensors; anything else becomes a constant
        label     the end of the result's name; default: the op and a number
        outputs   the number of results
        """
        number = len(self.scope.written) + len(self.nodes)
        name = f"{self._root}::{label or f'{op}{number}'}"
        results = [name] if outputs == 1 else [f"{name}:{i}" for i in range(outputs)]
        names = [x if isinstance(x, str) else self.constant(x) for x in operands]
        while names and not names[-1]:
            names.pop()
        own = f"{self._own}::{op}{number}"
        self.nodes.append(helper.make_node(op, names, results, own, **attrs))
        return results[0]

    def constant(self, value: Any, label: str = "") -> str:
        """Adds a constant with this value to the graph; returns its name. `label` is the end of the
        name."""
        stored = self.scope.graph.initializer
        name = f"{self._root}::{label or f'constant{len(stored)}'}"
        stored.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def take_name(self) -> None:
        """Makes the last added node the one (`main`) that gets the matched node's name and
        metadata."""
        self.main = len(self.nodes) - 1

    def end(self) -> None:
        """Gives the results of the last node the names of the matched node's results, and gives
        `main` its name and metadata; does nothing if one of the nodes has a result of the matched
        node already."""
        if any({*each.output} & {*self.node.output} for each in self.nodes):
            return
        self.nodes[-1].output[:] = self.node.output
        self.nodes[self.main].name = self._own
        self.nodes[self.main].metadata_props.extend(self.node.metadata_props)

    @cached_property
    def _root(self) -> str:
        return self.scope.names.root(self.node.output[0], "::")

    @property
    def _own(self) -> str:
        return self.node.name or f"{self.node.op_type}_{self.node.output[0]}"


Write = Callable[[Match], bool | None]
"""Writes nodes in place of the matched one, by `Match.add`; returns False to leave the matched node
as it is."""
Table = Mapping[Op, Write]


class Scope:
    """A graph that is being rewritten, with what patterns need to know of it.

    outer    the scope of the graph around it; None for the main graph
    written  the nodes that the new graph has so far
    shared   nodes that several matches read, by operand
    """

    def __init__(self, graph: GraphProto, outer: Scope | None = None) -> None:
        self.graph, self.outer = graph, outer
        self.written: list[NodeProto] = []
        self.shared: dict[str, NodeProto] = {}

    @cached_property
    def names(self) -> Names:
        """All names in use in the whole model."""
        return names_in(self.graph) if self.outer is None else self.outer.names

    @cached_property
    def makers(self) -> dict[str, NodeProto]:
        """The node that computes each tensor of the graph, by the tensor's name."""
        return {name: node for node in self.graph.node for name in node.output if name}

    @cached_property
    def stored(self) -> dict[str, TensorProto]:
        """The initializers of the graph and of the graphs around it, by name."""
        outer = {} if self.outer is None else self.outer.stored
        return {**outer, **{tensor.name: tensor for tensor in self.graph.initializer}}

    def maker(self, name: str) -> NodeProto | None:
        """Returns the node that computes a tensor, in this graph or in one around it; None for an
        input or initializer."""
        if name in self.makers or self.outer is None:
            return self.makers.get(name)
        return self.outer.maker(name)

    def value(self, name: str) -> Array | None:
        """Returns the value of a constant that is stored in the model file; None for other tensors,
        also in external files."""
        maker, value = self.maker(name), self.stored.get(name)
        if maker is not None and maker.op_type == "Constant" and maker.attribute:
            value = helper.get_attribute_value(maker.attribute[0])
        if isinstance(value, TensorProto) and value.data_location != TensorProto.EXTERNAL:
            return np.asarray(numpy_helper.to_array(value))
        return np.asarray(value) if isinstance(value, int | float | list) else None


def rewrite(graph: GraphProto, table: Table) -> list[Match]:
    """Replaces nodes of a graph and of its subgraphs, in place: at each node, the first pattern of
    the table that matches, and whose function does not return False, has it replaced. Returns the
    matches, those of a subgraph first."""
    ops = {op for pattern in table for op in pattern.ops}
    return _rewrite(Scope(graph), table, ops)


def _rewrite(scope: Scope, table: Table, ops: Collection[str]) -> list[Match]:
    """Rewrites the graph of a scope and its subgraphs, in place; returns the matches. `ops` are the
    op types of the table's patterns."""
    matches: list[Match] = []
    own: list[Match] = []
    for node in scope.graph.node:
        for inner in subgraphs_of(node):
            matches += _rewrite(Scope(inner, scope), table, ops)
        match = _match(node, scope, table) if node.op_type in ops else None
        if match is None:
            scope.written.append(node)
            continue
        own.append(match)
        scope.written += match.nodes
        scope.makers |= {name: each for each in match.nodes for name in each.output}
    if own:
        nodes = _without_unread(scope, {t for at in own for n in at.inside for t in n.output if t})
        del scope.graph.node[:]
        scope.graph.node.extend(nodes)
    return [*matches, *own]


def _match(node: NodeProto, scope: Scope, table: Table) -> Match | None:
    """Returns the match of the first pattern of a node whose function wrote other nodes; None if
    there is none."""
    for pattern, write in table.items():
        at = pattern.match(node, scope)
        if at is not None and write(at) is not False:
            at.end()
            return at
    return None


def _without_unread(scope: Scope, results: set[str]) -> list[NodeProto]:
    """Returns the written nodes, except nodes that compute some of `results` and whose results
    nothing reads."""
    needed = {port.name for port in scope.graph.output}
    kept: list[NodeProto] = []
    for node in reversed(scope.written):
        if needed.isdisjoint(node.output) and not results.isdisjoint(node.output):
            continue
        needed |= reads_of(node) if results else set()
        kept.append(node)
    return kept[::-1]


def attributes(node: NodeProto) -> dict[str, Any]:
    """The values of a node's attributes, by name."""
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}
