"""The option --save-strategy: saves the strategy of a plan as few entries, from which propagation
derives the same layouts."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from glob import escape
from typing import Any

from onnxpar.base.write_file import whole_file
from onnxpar.compiler.pass_ import Pass, PassContext
from onnxpar.graph.model_name import model_name
from onnxpar.graph.subgraphs import captured, constants
from onnxpar.layout.mesh import Axes, merge_axes
from onnxpar.load.load import Model
from onnxpar.passes.decide.propagate_layouts import PropagateLayouts
from onnxpar.planner.observer import Observer
from onnxpar.runtime.profile.trace import check_place
from onnxpar.search.op_strategies import partial_kinds
from onnxpar.search.repeats import tied
from onnxpar.search.search import AUTO, EXHAUSTIVE
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.state import ShardingState
from onnxpar.strategy.derived_annotations import with_derived
from onnxpar.strategy.dimension_text import LeafSplit
from onnxpar.strategy.entries import annotations_of
from onnxpar.strategy.named_ops import readers_of_sources
from onnxpar.strategy.presets import default_rounds
from onnxpar.strategy.strategy import Annotation, NodeAnnotation, Strategy, TensorAnnotation
from onnxpar.strategy.write_strategy import factor_entry, node_entry, strategy_text, tensor_entry

SHARD, TENSORS = "shard", "tensors"
WHOLE: LeafSplit = ((), None)
Pieces = tuple[LeafSplit, ...]
Decided = Mapping[tuple[str, str], Pieces]
"""The axes of the factors of a node or tensor, by (SHARD or TENSORS, its name)."""


def strategy_to_save(model: Model, ctx: PassContext) -> Strategy:
    """Returns a strategy that gives the layouts that propagate-layouts has just decided, without
    any other options."""
    return _Saving(model, ctx).strategy()


class Saver(Observer):
    """An observer that makes the text of a plan's strategy after propagate-layouts; `write` writes
    it to the file."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        """If `path` is None, nothing is saved. Errors: InputError if no file can be written
        there."""
        if path is not None:
            check_place(path)
        self.path = path
        self.text = ""

    def passed(self, step: Pass, model: Model, ctx: PassContext) -> None:
        if self.path is not None and isinstance(step, PropagateLayouts):
            self.text = strategy_text(strategy_to_save(model, ctx), _comment(model, ctx))

    def write(self) -> str | None:
        """Writes the file; returns a sentence for the user, or None if there is no file. Errors:
        InputError."""
        if self.path is None:
            return None
        with whole_file(self.path) as file:
            file.write(self.text)
        return f"strategy written to {self.path}; use it with --strategy"


def _comment(model: Model, ctx: PassContext) -> str:
    how = "a strategy file or annotations"
    preset = ctx.request.preset
    if preset is not None:
        how = f"{'--search' if preset in (AUTO, EXHAUSTIVE) else '--preset'} {preset}"
    mesh = ctx.sharding.mesh
    behind = "; then the batch is split over dp" if "dp" in mesh.sizes else ""
    return (
        f"{model_name(model.path)} over {mesh.size} ranks, by {how}.\n"
        f"# Tensors and nodes not listed here get their layouts by propagation{behind}."
    )


@dataclass(frozen=True)
class _Entry:
    """An entry of the strategy file, and the annotations that it stands for."""

    kind: str
    pattern: str
    value: Any
    annotations: tuple[Annotation, ...]


class _Saving:
    """Finds the entries of a strategy from which the decisions of propagate-layouts follow."""

    def __init__(self, model: Model, ctx: PassContext) -> None:
        self.model = model
        self.sharding = ctx.sharding
        sharding = _copy(ctx.sharding)
        tensors = sharding.factors.tensors
        pairs = [(a, b) for a, b in model.states if a in tensors and b in tensors]
        self.pinned = sorted((sharding.pinned | {a for a, _ in pairs}) - {b for _, b in pairs})
        self.goal = self._decided(sharding)
        self.ops = {op.node.name: op for op in sharding.factors.ops}
        self.weights = self._weights()
        fed = readers_of_sources(sharding.factors)
        self.readers = {name: [op.node.name for op in ops] for name, ops in fed.items()}
        self.alike: dict[int, list[OpFactors]] = defaultdict(list)
        self.number: dict[str, int] = {}
        numbers = tied(sharding, partial_kinds(sharding.factors.ops))
        for number, op in zip(numbers, sharding.factors.ops, strict=True):
            self.alike[number].append(op)
            self.number[op.node.name] = number
        self.before = ctx.annotations[:1] if ctx.request.annotated is not None else []
        self.after = default_rounds(model.graph, ctx.sharding, model.step)
        self.values: dict[tuple[Any, str], Any] = {}

    def strategy(self) -> Strategy:
        """Returns the strategy: adds entries until they give the layouts of the plan, then drops
        entries that are not needed."""
        batches: list[list[_Entry]] = []
        while differing := self._differing(batches):
            batches.append(self._next(differing, batches))
        for batch in sorted(reversed(batches), key=len, reverse=True):
            rest = [b for b in batches if b is not batch]
            if not self._differing(rest):
                batches = rest
        entries = {(e.kind, e.pattern): e for batch in batches for e in batch}
        at = {name: i for i, name in enumerate((*self.ops, *self.sharding.factors.tensors))}
        ordered = sorted(entries.values(), key=lambda e: min(at[_name(s)] for s in e.annotations))
        shard, tensors = (
            {e.pattern: e.value for e in ordered if e.kind == kind} for kind in (SHARD, TENSORS)
        )
        return Strategy(self.sharding.mesh, shard, tensors)

    def _decided(self, sharding: ShardingState) -> Decided:
        """Returns the axes of every node, and of every tensor whose layout insert-collectives takes
        from the tensor itself."""
        decided: dict[tuple[str, str], Pieces] = {}
        for op in sharding.factors.ops:
            sharding.legalize(op)
            atoms = [leaf.atom for leaf in op.leaves]
            decided[SHARD, op.node.name] = _pieces(sharding, atoms, sharding.op_axes(op))
        for name in self.pinned:
            atoms = [leaf.atom for leaf in sharding.factors.tensors[name].leaves]
            axes = sharding.tensor_sharding(name).leaves
            decided[TENSORS, name] = _pieces(sharding, atoms, axes)
        return decided

    def _differing(self, batches: Iterable[Sequence[_Entry]]) -> list[tuple[str, str]]:
        """Returns the nodes and tensors that these entries alone do not give the layouts of the
        plan."""
        mesh, factors = self.sharding.mesh, self.sharding.factors
        sharding = ShardingState.open(mesh, factors, self.sharding.costs.topology)
        annotations = [
            annotation for batch in batches for entry in batch for annotation in entry.annotations
        ]
        rounds = [*self.before, with_derived(annotations, sharding), *self.after]
        ctx = PassContext(self.model, sharding, annotations=rounds)
        PropagateLayouts().run(self.model.graph, ctx)
        decided = self._decided(sharding)
        free = {(TENSORS, name) for name in self.sharding.pinned - sharding.pinned}
        return [key for key, pieces in self.goal.items() if decided[key] != pieces or key in free]

    def _weights(self) -> dict[str, Pieces]:
        """Returns the axes of the weights to which an entry may give a layout: all readers of such
        a weight need one layout, without partial sums."""
        reads: dict[str, set[Pieces | None]] = defaultdict(set)
        for op in self.ops.values():
            node_pieces = self.goal[SHARD, op.node.name]
            may_pend = op.rule.additive.union(*(g for g in op.rule.linear if len(g) > 1))
            for i, (tensor, links) in enumerate(zip(op.node.inputs, op.inputs, strict=True)):
                pieces = tuple(WHOLE if k is None else node_pieces[k] for k in links)
                reads[tensor.name].add(None if i in may_pend else pieces)
            for tensor in [t for body in op.bodies for t in body.graph.outputs]:
                reads[tensor.name].add(None)
            for tensor, _, _ in [] if op.bodies else captured(op.node):
                reads[tensor.name].add(None)
        weights: dict[str, Pieces] = {}
        for weight in constants(self.model.graph):
            needs = reads[weight.name]
            if len(needs) == 1 and None not in needs and weight.name in self.sharding.tensors:
                weights[weight.name] = needs.pop() or ()
        return weights | {name: p for (kind, name), p in self.goal.items() if kind == TENSORS}

    def _matrices(self, node: str) -> list[str]:
        """Returns the weights of a node that have more than one dimension."""
        names = (t.name for t in self.ops[node].node.inputs)
        return [name for name in names if len(self.weights.get(name, ())) > 1]

    def _next(
        self, differing: Sequence[tuple[str, str]], batches: Iterable[Sequence[_Entry]]
    ) -> list[_Entry]:
        """Returns the entries to add next, which were not tried yet: first for nodes with weight
        matrices, together with all nodes that have the same structure."""
        tried = {(e.kind, e.pattern, repr(e.value)) for batch in batches for e in batch}
        heavy = [(kind, n) for kind, n in differing if kind == SHARD and self._matrices(n)]
        for kind, name in (*heavy, *differing):
            for candidate in self._candidates(kind, name):
                new = {(e.kind, e.pattern, repr(e.value)): e for e in candidate}
                if not tried.issuperset(new):
                    return [e for key, e in new.items() if key not in tried]
        raise AssertionError(f"no entry makes {differing[0]} what it is")

    def _candidates(self, kind: str, name: str) -> Iterator[list[_Entry]]:
        """Yields lists of entries that would give this node or tensor its layout, the most readable
        ones first."""
        if kind == TENSORS:
            yield [self._entry(TENSORS, name, self._tensor_value)]
            return
        group = [op.node.name for op in self.alike[self.number[name]]]
        matrices = [w for n in group for w in self._matrices(n)]
        split = [w for w in matrices if any(axes for axes, _ in self.weights[w])]
        by_node = [self._entry(SHARD, n, self._node_value) for n in group]
        by_weight = [self._entry(TENSORS, w, self._tensor_value) for w in split]
        by_read = [
            self._entry(SHARD, w, self._reader_value) for n in group for w in self._read_weight(n)
        ]
        if "/" in name:
            yield from (by_node, by_weight)
        else:
            yield from (by_weight, by_read if len(by_read) == len(group) else [], by_node)
        yield [self._entry(SHARD, n, self._factor_value) for n in group]

    def _read_weight(self, node: str) -> list[str]:
        """Returns, as a list, the last weight of a node for which all its readers are split in the
        same way; empty if there is none."""
        names = [t.name for t in self.ops[node].node.inputs if t.name in self.readers]
        return [name for name in names if self._value(self._reader_value, name) is not None][-1:]

    def _entry(self, kind: str, name: str, value: Callable[[str], Any]) -> _Entry:
        """Returns an entry for this name whose pattern also matches similar names with the same
        value. `value` returns the value for a name."""
        own_value = self._value(value, name)
        names: Iterable[str] = self.ops if kind == SHARD else self.sharding.factors.tensors
        if name in self.readers and kind == SHARD:
            names = self.readers
        pattern = widest_pattern(name, names, lambda n: bool(self._value(value, n) == own_value))
        data = {pattern: own_value}
        strategy = Strategy(shard=data) if kind == SHARD else Strategy(tensors=data)
        return _Entry(kind, pattern, own_value, tuple(annotations_of(strategy, self.sharding)))

    def _value(self, value: Callable[[str], Any], name: str) -> Any:
        if (value, name) not in self.values:
            self.values[value, name] = value(name)
        return self.values[value, name]

    def _node_value(self, name: str) -> Any:
        return node_entry(self.ops[name], self.goal[SHARD, name], self.sharding)

    def _factor_value(self, name: str) -> Any:
        return factor_entry(self.ops[name], self.goal[SHARD, name], self.sharding.mesh)

    def _reader_value(self, name: str) -> Any:
        """Returns the value for all readers of a weight; None if they need different ones."""
        values = [self._node_value(node) for node in self.readers[name]]
        return values[0] if all(value == values[0] for value in values) else None

    def _tensor_value(self, name: str) -> Any:
        pieces = self.weights.get(name)
        return None if pieces is None else tensor_entry(name, pieces, self.sharding)


def widest_pattern(name: str, names: Iterable[str], fits: Callable[[str], bool]) -> str:
    """Returns the glob that matches most of `names`, if all matches fit: `name` with `*` for one
    number or for all numbers, such as "layer.*.weight"; or `name` itself, if no such glob matches
    more."""
    words = [escape(word) for word in re.split(r"(\d+)", name)]
    numbers = range(1, len(words), 2)
    best, most = name, 1
    for starred in (*({i} for i in numbers), set(numbers)):
        pattern = "".join("*" if i in starred else word for i, word in enumerate(words))
        matches = [n for n in names if fnmatchcase(n, pattern)]
        if len(matches) > most and all(map(fits, matches)):
            best, most = pattern, len(matches)
    return best


def _copy(sharding: ShardingState) -> ShardingState:
    return replace(
        sharding,
        tensors={name: list(axes) for name, axes in sharding.tensors.items()},
        ops={name: list(axes) for name, axes in sharding.ops.items()},
        pinned=set(sharding.pinned),
        parts=dict(sharding.parts),
    )


def _pieces(sharding: ShardingState, atoms: Sequence[int], axes: Sequence[Axes]) -> Pieces:
    merged = [merge_axes(over) for over in axes]
    return tuple((a, sharding.parts.get((n, a))) for n, a in zip(atoms, merged, strict=True))


def _name(annotation: Annotation) -> str:
    assert isinstance(annotation, (NodeAnnotation, TensorAnnotation))
    return annotation.op.node.name if isinstance(annotation, NodeAnnotation) else annotation.tensor
