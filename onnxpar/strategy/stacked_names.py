"""Finds the weights that the loader stacked (one weight per expert becomes one tensor with the
experts as its first dimension) by their names in the model file, and combines their entries of a
strategy into the entry of the stack."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.graph.lazy_values import stacked_parts
from onnxpar.sharding.graph_factors import GraphFactors


@dataclass(frozen=True)
class Stacks:
    """The names of weights that the loader stacked.

    parts    the names of the weights in each stack, in the order of the experts
    of       the stack of each of these names
    source   the file of the strategy
    entries  the entries of a strategy for these weights so far, by stack and name
    """

    parts: Mapping[str, Sequence[str]]
    of: Mapping[str, str]
    source: str
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)

    @staticmethod
    def in_graph(factors: GraphFactors, source: str) -> Stacks:
        """Returns the stacks that the nodes of a graph read; `source` is the file of the strategy,
        for errors."""
        tensors = (t for op in factors.ops for t in op.node.inputs if isinstance(t, gs.Constant))
        parts = {
            t.name: [p.name for p in stack_parts]
            for t in tensors
            if (stack_parts := stacked_parts(t))
        }
        of = {name: stack for stack, names in parts.items() for name in names}
        return Stacks(parts, {n: s for n, s in of.items() if n not in factors.tensors}, source)

    def names(self, pattern: str, known: Collection[str]) -> list[str]:
        """Returns the names of stacked weights that an entry with this pattern may mean. If the
        pattern matches the name of a stack itself, and this name is in `known`, it means the stack,
        so the names of its weights are left out."""
        named_stacks = {
            s for s in self.parts if s in known and (s == pattern or fnmatchcase(s, pattern))
        }
        return [name for name, stack in self.of.items() if stack not in named_stacks]

    def add(self, name: str, entry: Any, rank: int) -> Any:
        """Notes the entry of a stacked weight. Once all weights of the stack have equal entries,
        returns the entry of the stack, which has `rank` dimensions; before that, None."""
        stack = self.of[name]
        if not isinstance(entry, Sequence) or isinstance(entry, str):
            return [entry]
        items = list(entry)
        while len(items) >= rank and items[0] in (None, 1, "-"):
            del items[0]  # a vector that the file stores as a matrix with one row
        entries = self.entries.setdefault(stack, {})
        entries[name] = items
        if len(entries) < len(self.parts[stack]):
            return None
        other = next((n for n, e in entries.items() if e != items), None)
        if other is None:
            return [None, *items]
        self.entries[stack] = {n: e for n, e in entries.items() if e == items}
        return None

    def check(self) -> None:
        """Checks that each stack has an entry for all of its weights, or for none. Errors:
        StrategyError if entries name only some weights of a stack, or differ."""
        for stack, entries in self.entries.items():
            self.check_all(stack, entries)

    def check_all(self, stack: str, names: Collection[str]) -> None:
        """Checks that these names have all weights of a stack. Errors: StrategyError."""
        parts = self.parts[stack]
        missing = [name for name in parts if name not in names]
        if missing:
            raise StrategyError(
                f"{self.source}: {sorted(names)[0]!r} is one of {len(parts)} weights that are "
                f"stacked as {stack!r}, and all are split alike, but {missing[0]!r} is not; "
                f"write {common_pattern(parts)!r}, or the name of the stack, which has the experts "
                "as its first dimension"
            )


def common_pattern(names: Sequence[str]) -> str:
    """Returns a pattern that matches all these names.

    >>> common_pattern(["experts.0.w1", "experts.10.w1"])
    'experts.*.w1'
    """
    shortest = min(map(len, names))
    start = next((i for i in range(shortest) if len({n[i] for n in names}) > 1), shortest)
    room = shortest - start
    end = next((i for i in range(room) if len({n[-1 - i] for n in names}) > 1), room)
    first = names[0]
    return f"{first[:start]}*{first[len(first) - end :]}"
