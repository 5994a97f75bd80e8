"""The files of all ranks, read together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from onnxpar.base.arrays import Array
from onnxpar.equivalence.program import Node, Program, Shape, default

PLUGIN = "onnxpar"
"""The domain of collectives."""


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


class Ranks:
    """The graphs of all ranks."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = programs
        self.size = len(programs)
        self._constant: dict[str, bool] = {}
        tables: list[Mapping[str, Node]] = [
            {node.key: node for node in program.nodes} for program in programs
        ]
        self.nodes: list[RankNode] = []
        for key in tables[0]:
            if all(key in table for table in tables):
                found = tuple(table[key] for table in tables)
                self.nodes.append(RankNode(found, len(self.nodes)))
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

    def is_constant(self, name: str) -> bool:
        """True for a tensor that is a constant on all ranks. Ask once constants are folded."""
        if name not in self._constant:
            self._constant[name] = all(name in program.constants for program in self.programs)
        return self._constant[name]

    def constant_shapes(self, name: str) -> list[Shape]:
        """The shape of a constant on each rank."""
        return [program.constants.shape(name) for program in self.programs]
