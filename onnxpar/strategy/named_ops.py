"""Finds the nodes and tensors of a graph whose names match the patterns of a strategy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from onnxpar.base.errors import StrategyError
from onnxpar.base.near_names import there_are
from onnxpar.graph.metadata import node_names
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.graph_factors import GraphFactors
from onnxpar.strategy.stacked_names import Stacks


@dataclass(frozen=True)
class NamedOps:
    """The nodes of a graph, by the names that a strategy may use.

    ops      nodes by their own name, or by the name of their module, which may have several nodes
    readers  the nodes that read each weight and each input, by the name of the weight or input
    stacks   the names of weights that the loader stacked
    """

    ops: Mapping[str, list[OpFactors]]
    readers: Mapping[str, list[OpFactors]]
    stacks: Stacks

    @staticmethod
    def of(factors: GraphFactors, source: str) -> NamedOps:
        """Returns the nodes of a graph by name; `source` is the file of the strategy, for
        errors."""
        by_name = {op.node.name: [op] for op in factors.ops}
        known_names = {*by_name}
        for op in factors.ops:
            for name in dict.fromkeys((*_modules(op), *node_names(op.node))):
                if name not in known_names:
                    by_name.setdefault(name, []).append(op)
        return NamedOps(by_name, readers_of_sources(factors), Stacks.in_graph(factors, source))

    def matching(self, pattern: str, source: str) -> list[OpFactors]:
        """Returns the nodes whose names match a pattern; if there are none, the nodes that read a
        weight or input whose name matches. Errors: StrategyError if nothing matches; `source` is
        the file of the strategy."""
        names = [*self.ops]
        if not _matches(pattern, self.ops):
            names += [*self.readers, *self.stacks.names(pattern, self.readers)]
        nodes: dict[str, OpFactors] = {}
        stacked: dict[str, list[str]] = {}
        for name in matching(pattern, names, "node", source):
            known = name
            if name not in self.ops and name not in self.readers:
                known = self.stacks.of[name]
                stacked.setdefault(known, []).append(name)
            ops = self.ops[known] if known in self.ops else self.readers[known]
            nodes.update((op.node.name, op) for op in ops)
        for stack, some_names in stacked.items():
            self.stacks.check_all(stack, some_names)
        return list(nodes.values())


_WEIGHT = {"MatMul": 1, "Gemm": 1, "Conv": 1, "ConvTranspose": 1, "Gather": 0}
"""The index of the operand that is the weight of a layer, by op."""


def _modules(op: OpFactors) -> list[str]:
    """Returns the name of a layer in torch, such as `/mlp/fc1` for `/mlp/fc1/MatMul`, if the node
    reads the layer's weight; else an empty list."""
    path, _, _ = op.node.name.rpartition("/")
    at = _WEIGHT.get(op.node.op)
    return [path] if path and at is not None and not op.node.inputs[at].inputs else []


def readers_of_sources(factors: GraphFactors) -> dict[str, list[OpFactors]]:
    """Returns the nodes that read each weight and each input of the graph, by the tensor's name in
    the graph and by its name in the file."""
    readers: dict[str, list[OpFactors]] = {}
    for op in factors.ops:
        for tensor in op.node.inputs:
            if tensor.name in factors.tensors and not tensor.inputs:
                readers.setdefault(tensor.name, []).append(op)
    file_names = factors.file_names
    return readers | {old: readers[new] for old, new in file_names.items() if new in readers}


def _matches(pattern: str, names: Iterable[str]) -> bool:
    """True if one of the names equals a pattern or, as a glob, matches it."""
    return any(name == pattern or fnmatchcase(name, pattern) for name in names)


def matching(pattern: str, names: Iterable[str], what: str, source: str) -> list[str]:
    """Returns the names that match a pattern; if one name equals the pattern, only this name.
    Errors: StrategyError if no name matches, with `source` (the place of the pattern) and `what`
    (the kind of names)."""
    names = list(names)
    matches = [n for n in names if n == pattern] or [n for n in names if fnmatchcase(n, pattern)]
    if not matches:
        raise StrategyError(f"{source}: {pattern!r} matches no {what}{there_are(pattern, names)}")
    return matches
