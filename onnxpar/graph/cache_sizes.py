"""Relations between open sizes that the kernel of GroupQueryAttention demands. It gets the length
of its keys as the value of an operand; other relations follow from shapes (`equal_sizes.py`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import NodeProto

from onnxpar.graph.lockstep import Lockstep
from onnxpar.layout.symbols import Binding, Polynomial

Remedies = list[tuple[Polynomial, int]]
"""Alternative ways to resolve one contradiction; each is a size and the value that it must get."""

_MICROSOFT = "com.microsoft"
_OP = "GroupQueryAttention"


@dataclass(frozen=True)
class CacheSizes:
    """The sizes of one GroupQueryAttention, in closed form; None where there is none.

    batch      number of sequences
    own        tokens that a run adds to each sequence
    past       length of the cache
    keys       total length of keys, as an operand gives it
    rows       rows of the table of rotary angles; None: no table
    window     number of keys that a token sees, itself included; -1: all
    is_buffer  True if the cache has a fixed length, with unused places at its end
    is_ring    True if the cache keeps only the last `window` tokens
    """

    batch: Polynomial | None
    own: Polynomial | None
    past: Polynomial | None
    keys: Polynomial | None
    rows: Polynomial | None
    window: int
    is_buffer: bool
    is_ring: bool

    def contradictions(self, sizes: Binding) -> Iterator[Remedies]:
        """Yields, for each reason why the kernel rejects these sizes of symbols, alternative
        remedies: (size, value that it must get).

        The length of keys must be that of past and new ones together. A ring must be as long as its
        window, and its keys at least as long, because otherwise part of the ring would stay
        unwritten. Several tokens can be appended to a filled cache only for a batch of 1.
        """
        if self.own is None or self.past is None:
            return
        own, past = self.own.at(sizes), self.past.at(sizes)
        keys = None if self.keys is None else self.keys.at(sizes)
        batch = None if self.batch is None else self.batch.at(sizes)
        if self.is_ring and past < self.window:
            yield [(self.past, self.window)]
        if self.is_ring and self.keys is not None and keys is not None:
            needed = max(past, self.window, own)
            if keys < needed:
                yield [(self.keys, needed)]
        if self.batch is not None and past and own > 1 and batch is not None and batch > 1:
            yield [(self.own, 1), (self.batch, 1) if self.is_ring else (self.past, 0)]
        elif self.keys is not None and keys is not None and not self.is_ring:
            before = keys if self.is_buffer else keys - own
            if keys != self._total(own, past):
                yield [(self.keys, self._total(own, past)), (self.past, before)]

    def fits(self, sizes: Binding) -> bool:
        """True if the table of rotary angles has a row for the position of every key, at these
        sizes of symbols."""
        if self.rows is None or self.own is None:
            return True
        if self.is_ring:
            total = 0 if self.keys is None else self.keys.at(sizes)
        else:
            past = 0 if self.past is None else self.past.at(sizes)
            total = self._total(self.own.at(sizes), past)
        return total <= self.rows.at(sizes)

    def _total(self, own: int, past: int) -> int:
        """Returns how many keys a query attends to: `past` and `own` ones, or all places of a
        buffer."""
        return past if past and self.is_buffer else past + own


def cache_sizes(graph: onnx.GraphProto, walks: Lockstep) -> list[CacheSizes]:
    """Returns the sizes of every GroupQueryAttention of a graph, except nodes that inference folded
    away. `walks` has the inferred closed forms."""
    declared = {
        port.name: [dim.dim_value or dim.dim_param for dim in port.type.tensor_type.shape.dim]
        for port in (*graph.input, *graph.output)
    }
    nodes = (n for n in walks.kept if n.op_type == _OP and n.domain == _MICROSOFT)
    return [_of(node, walks, declared) for node in nodes]


def _of(
    node: NodeProto, walks: Lockstep, declared: Mapping[str, Sequence[int | str]]
) -> CacheSizes:
    """Returns the sizes of one GroupQueryAttention; `declared` has the declared sizes of the
    graph's inputs and outputs."""
    names = [*node.input, *[""] * 9]
    attributes = {a.name: a.i for a in node.attribute}
    before = declared.get(names[3], [])
    after = declared.get(node.output[1], []) if len(node.output) > 1 else []
    return CacheSizes(
        batch=walks.size(names[0], 0),
        own=walks.size(names[0], 1),
        past=walks.size(names[3], 2) if names[3] else None,
        keys=walks.value(names[6]),
        rows=walks.size(names[7], 0) if names[7] else None,
        window=attributes.get("local_window_size", -1),
        is_buffer=len(before) == len(after) == 4 and bool(before[2]) and before[2] == after[2],
        is_ring=bool(attributes.get("sliding_window_cache", 0)),
    )


def settled(
    caches: Sequence[CacheSizes], sizes: Mapping[str, int], kept: Collection[str]
) -> dict[str, int]:
    """Returns sizes of all symbols with as few contradictions of caches as possible, starting from
    `sizes`, without changes of the symbols in `kept`. Changes a symbol at most once. Rings come
    first, because growing caches can adapt to a longer mask."""
    changed, done = dict(sizes), set(kept)
    ordered = sorted(caches, key=lambda cache: not cache.is_ring)
    for _ in sizes:
        for cache in ordered:
            for remedies in list(cache.contradictions(changed)):
                for size, to in remedies:
                    if size.symbol is not None and size.symbol not in done and to >= 0:
                        changed[size.symbol] = to
                        done.add(size.symbol)
                        break
    return changed
