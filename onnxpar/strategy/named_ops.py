"""Finds the nodes and tensors of a graph that the patterns of a strategy name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from onnxpar.base.errors import StrategyError
from onnxpar.base.near_names import there_are
from onnxpar.graph.metadata import node_names
from onnxpar.sharding.factors import GraphFactors, OpFactors
from onnxpar.strategy.stacked_names import Stacks


@dataclass(frozen=True)
class NamedOps:
    """The nodes of a graph by name, also by that of their module, which may have several; the
    readers of each weight and each input by its name, and the weights that are stacked."""

    ops: Mapping[str, list[OpFactors]]
    readers: Mapping[str, list[OpFactors]]
    stacks: Stacks

    @staticmethod
    def of(factors: GraphFactors, source: str) -> NamedOps:
        """The nodes of a graph; `source` is the place of the strategy."""
        by_name = {op.node.name: [op] for op in factors.ops}
        own = {*by_name}
        for op in factors.ops:
            for name in dict.fromkeys((*_modules(op), *node_names(op.node))):
                if name not in own:
                    by_name.setdefault(name, []).append(op)
        return NamedOps(by_name, readers_of_sources(factors), Stacks.found(factors, source))

    def matching(self, pattern: str, source: str) -> list[OpFactors]:
        """The nodes that a pattern of names matches; if none, those that read a weight or input
        that it matches. Errors: StrategyError if there is none, as in the function `matching`."""
        names = [*self.ops]
        if not _matches(pattern, self.ops):
            names += [*self.readers, *self.stacks.names(pattern, self.readers)]
        found: dict[str, OpFactors] = {}
        stacked: dict[str, list[str]] = {}
        for name in matching(pattern, names, "node", source):
            own = name
            if name not in self.ops and name not in self.readers:
                own = self.stacks.of[name]
                stacked.setdefault(own, []).append(name)
            some = self.ops[own] if own in self.ops else self.readers[own]
            found.update((op.node.name, op) for op in some)
        for stack, some_names in stacked.items():
            self.stacks.check_all(stack, some_names)
        return list(found.values())


_WEIGHT = {"MatMul": 1, "Gemm": 1, "Conv": 1, "ConvTranspose": 1, "Gather": 0}
"""The operand that is the weight of a layer, by op."""


def _modules(op: OpFactors) -> list[str]:
    """The name of a layer in torch, for the node that reads its weight: `/mlp/fc1`."""
    path, _, _ = op.node.name.rpartition("/")
    at = _WEIGHT.get(op.node.op)
    return [path] if path and at is not None and not op.node.inputs[at].inputs else []


def readers_of_sources(factors: GraphFactors) -> dict[str, list[OpFactors]]:
    """The nodes that read each weight and each input of the graph, by its name, and by that in the
    file."""
    readers: dict[str, list[OpFactors]] = {}
    for op in factors.ops:
        for tensor in op.node.inputs:
            if tensor.name in factors.tensors and not tensor.inputs:
                readers.setdefault(tensor.name, []).append(op)
    file_names = factors.file_names
    return readers | {old: readers[new] for old, new in file_names.items() if new in readers}


def _matches(pattern: str, names: Iterable[str]) -> bool:
    return any(name == pattern or fnmatchcase(name, pattern) for name in names)


def matching(pattern: str, names: Iterable[str], what: str, source: str) -> list[str]:
    """The names that a pattern matches. If a name equals the pattern, only that one. Errors:
    StrategyError if there is none, with `source` (where the pattern is) and `what` (the kind of
    names)."""
    names = list(names)
    found = [n for n in names if n == pattern] or [n for n in names if fnmatchcase(n, pattern)]
    if not found:
        raise StrategyError(f"{source}: {pattern!r} matches no {what}{there_are(pattern, names)}")
    return found
