"""The files of all ranks, read together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from onnxpar.base.arrays import Array
from onnxpar.equivalence.program import Body, Node, Program, Shape, default

PLUGIN = "onnxpar"
"""The domain of collectives."""
TOKEN = "onnxpar.token"
"""The constant that is the first token of a rank."""


@dataclass(frozen=True, eq=False)
class RankNode:
    """The nodes of all ranks whose first result has one name; `nodes` has one for each rank."""

    nodes: tuple[Node, ...]
    number: int

    @property
    def first(self) -> Node:
        """The node of rank 0."""
        return self.nodes[0]

    @cached_property
    def is_alike(self) -> bool:
        """True if all ranks have the same op, operands and results."""
        kinds = {(n.kind, n.inputs, n.outputs) for n in self.nodes}
        return len(kinds) == 1

    def attrs(self, name: str, programs: Sequence[Program]) -> list[Any]:
        """An attribute on each rank, or its default."""
        return [
            default(node, name, program.opsets)
            for node, program in zip(self.nodes, programs, strict=True)
        ]


def align(nodes: Sequence[Sequence[Node]]) -> list[RankNode]:
    """The nodes that all ranks have, from the nodes of each rank."""
    tables: list[Mapping[str, Node]] = [{node.key: node for node in own} for own in nodes]
    found: list[RankNode] = []
    for key in tables[0]:
        if all(key in table for table in tables):
            found.append(RankNode(tuple(table[key] for table in tables), len(found)))
    return found


def communicates(node: Node) -> bool:
    """True for a collective, and for an If, a Loop or a Scan with one inside."""
    if node.domain == PLUGIN:
        return True
    return any(communicates(inner) for body in node.bodies.values() for inner in body.nodes)


def tokens_of(nodes: Sequence[Node], given: Collection[str] = ()) -> set[str]:
    """The tensors that only order collectives: those of `nodes`, which are in order, from the
    tokens that are given."""
    found = {*given, TOKEN}
    for node in nodes:
        if node.domain == PLUGIN:
            found |= {*node.outputs[1:]}
        elif communicates(node):
            for body in node.bodies.values():
                inner = tokens_of(body.nodes, found | _carried(node, body, found))
                results = body.outputs[1:] if node.op == "Loop" else body.outputs
                found |= {o for o, own in zip(node.outputs, results, strict=False) if own in inner}
        elif node.op == "Identity" and node.inputs[0] in found:
            found |= {*node.outputs}
    return found


def _carried(node: Node, body: Body, tokens: Collection[str]) -> set[str]:
    """The inputs of a body that are tokens."""
    pairs = zip(body.inputs, node.inputs, strict=False)
    return {formal for formal, name in pairs if name in tokens}


class Ranks:
    """The graphs of all ranks, or their bodies of one node; `given` are tokens from outside."""

    def __init__(self, programs: Sequence[Program], given: Collection[str] = ()) -> None:
        self.programs = programs
        self.size = len(programs)
        self._constant: dict[str, bool] = {}
        self.nodes = align([program.nodes for program in programs])
        self.tokens = tokens_of(programs[0].nodes, given)
        self.readers: dict[str, list[RankNode]] = defaultdict(list)
        self.makers: dict[str, RankNode] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.first.inputs):
                self.readers[name].append(node)
            for name in node.first.outputs:
                self.makers[name] = node

    def constants(self, name: str) -> list[Array] | None:
        """The value of a constant on each rank; None if the tensor is none."""
        if not self.is_constant(name):
            return None
        return [program.constants[name] for program in self.programs]

    @cached_property
    def has_origins(self) -> bool:
        """Whether nodes tell where they come from in the model; those of other tools do not."""
        return any(node.first.origin != node.first.name for node in self.nodes)

    @cached_property
    def all_constants(self) -> list[str]:
        """The names of constants of rank 0 that nodes read."""
        constants = self.programs[0].constants
        return [name for name in self.readers if name in constants]

    def is_constant(self, name: str) -> bool:
        """True for a tensor that is a constant on all ranks. Ask once constants are folded."""
        if name not in self._constant:
            self._constant[name] = all(name in program.constants for program in self.programs)
        return self._constant[name]

    def forget(self) -> None:
        """Forgets which tensors are constants: more of them are computed."""
        self._constant.clear()

    def constant_shapes(self, name: str) -> list[Shape]:
        """The shape of a constant on each rank."""
        return [program.constants.shape(name) for program in self.programs]
