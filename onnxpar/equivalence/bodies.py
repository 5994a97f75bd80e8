"""Proves an If, a Loop or a Scan by what is inside: ranks take the same branches and turns, and
what is carried from turn to turn has the same positions at the end of a turn as at its start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from onnxpar.equivalence.evaluate import NotComputed
from onnxpar.equivalence.fold import drop_unneeded, fold, merge_equal
from onnxpar.equivalence.held import Held
from onnxpar.equivalence.lemma import NotShown, Result
from onnxpar.equivalence.program import Body, Node, Program, Shape, captured, read_node
from onnxpar.equivalence.ranks import RankNode, Ranks
from onnxpar.equivalence.spans import Families
from onnxpar.equivalence.verification import HOW

if TYPE_CHECKING:
    from onnxpar.equivalence.walk import Walk

TURNS = 5
"""The turns of a Loop whose number data decide: its rule holds for any number."""
_GROWTHS = 3
"""The turns for which a body is proved where what is carried grows."""
_Port = tuple[Held | None, Shape, int]
"""What an input of a body is at the start of a turn, the shape of the model's, and its type."""


@dataclass(frozen=True)
class _Inside:
    """What was proved of a body: for each output, what it may be, and the shape of the model's."""

    outputs: list[list[Held]]
    shapes: list[Shape | None]


class Bodies:
    """The proof of a node of the model with bodies, and of a node of ranks with the same op.

    held  for each operand of the model's node, what it is on ranks
    how   the weakest proof that was needed inside
    """

    def __init__(
        self, walk: Walk, node: Node, local: RankNode, held: Sequence[Held | None]
    ) -> None:
        self.walk, self.node, self.local, self.held = walk, node, local, held
        self.families: Families = walk.families
        self.how = "lemma"
        self.shapes = [walk.shape(name) or () for name in node.inputs]
        self.places = [
            index for index, name in enumerate(local.first.inputs) if name not in walk.ranks.tokens
        ]
        """The operands of ranks' nodes that are no tokens."""

    def show(self) -> list[Result]:
        """What ranks hold of the results. NotShown if it is nothing."""
        op = {"If": self._if, "Loop": self._loop, "Scan": self._scan}.get(self.node.op)
        if op is None or self.node.domain:
            raise NotShown(f"{self.node.op} has a body that no rule knows")
        if not all(
            each is not None or not name
            for each, name in zip(self.held, self.node.inputs, strict=False)
        ):
            raise NotShown("an operand is not related")
        for own in self.local.nodes:
            if own.bodies.keys() != self.node.bodies.keys():
                raise NotShown("a rank has other bodies")
        return op()

    def _check_whole(self, index: int) -> None:
        """An operand that decides which nodes run must be the same on all ranks."""
        held = self.held[index] if index < len(self.held) else None
        if held is not None and not held.is_whole(tuple(self.shapes[index])):
            raise NotShown(f"{held.term!r} decides what runs, and ranks have parts of it")

    def _if(self) -> list[Result]:
        self._check_whole(0)
        found = [self._prove(name, []) for name in ("then_branch", "else_branch")]
        results = []
        for index, (first, second) in enumerate(
            zip(found[0].outputs, found[1].outputs, strict=True)
        ):
            shapes = [inside.shapes[index] or () for inside in found]
            if None in (found[0].shapes[index], found[1].shapes[index]):
                raise NotShown(f"the shape of result {index} is unknown")
            if shapes[0] != shapes[1] and self.walk.readers.get(self.node.outputs[index]):
                raise NotShown("nodes read a result that branches give other shapes")
            same = [
                held for held in first if any(_are_alike((held, other), shapes) for other in second)
            ]
            if not same:
                raise NotShown(f"after a branch, ranks have other positions of result {index}")
            results += [Result(index, h.dims, shapes[0], h.partial) for h in same]
        return results

    def _loop(self) -> list[Result]:
        self._check_whole(0)
        self._check_whole(1)
        carried = [self._operand(index) for index in range(2, len(self.held))]
        first: list[_Port] = [
            (self._scalar(), (), int(TensorProto.INT64)),
            (self._scalar(), (), int(TensorProto.BOOL)),
        ]
        inside, carried = self._induce("body", first, carried, [])
        condition = inside.outputs[0]
        if not any(held.is_whole(()) for held in condition):
            raise NotShown("whether there is one more turn is not the same on all ranks")
        return self._results(inside, carried, 1, [0] * (len(inside.outputs) - 1 - len(carried)))

    def _scan(self) -> list[Result]:
        if self.walk.model.opsets.get("", 1) < 9:
            raise NotShown("a Scan of this opset has samples")
        scanned = int(self.node.attrs["num_scan_inputs"])
        count = len(self.held) - scanned
        body = self.node.bodies["body"]
        axes = self.node.attrs.get("scan_input_axes") or [0] * scanned
        rows: list[_Port] = []
        turns: set[int] = set()
        for index, axis in zip(range(count, len(self.held)), axes, strict=True):
            held, shape, kind = self._operand(index)
            assert held is not None
            at = int(axis) % len(shape)
            if not held.dims[at].is_whole(shape[at]):
                raise NotShown(f"ranks go through parts of {held.term!r}")
            turns.add(shape[at])
            dims = (*held.dims[:at], *held.dims[at + 1 :])
            rows.append((replace(held, dims=dims), (*shape[:at], *shape[at + 1 :]), kind))
        if len(turns) != 1:
            raise NotShown("what is scanned has other lengths")
        self._check_attributes()
        carried = [self._operand(index) for index in range(count)]
        inside, carried = self._induce("body", [], carried, rows)
        stacked = len(body.outputs) - count
        places = self.node.attrs.get("scan_output_axes") or [0] * stacked
        return self._results(inside, carried, 0, [int(p) for p in places], turns.pop())

    def _check_attributes(self) -> None:
        """All attributes but bodies must be the model's."""
        for own in self.local.nodes:
            for name in {*own.attrs, *self.node.attrs} - {*self.node.bodies}:
                pair = self.node.attrs.get(name), own.attrs.get(name)
                values = [p if p is not None else [] for p in pair]
                is_same = values[0] == values[1]
                if not is_same and any(np.any(value) for value in values):
                    raise NotShown(f"a rank has another {name}")

    def _scalar(self) -> Held:
        return Held("", "", ())

    def _operand(self, index: int) -> _Port:
        name = self.node.inputs[index]
        kind = self.walk.model.types.get(name, int(TensorProto.FLOAT))
        return self.held[index], tuple(self.shapes[index]), kind

    def _induce(
        self, name: str, first: Sequence[_Port], carried: list[_Port], rows: Sequence[_Port]
    ) -> tuple[_Inside, list[_Port]]:
        """Proves a turn; what is carried must be at its end what it was at its start. What grows
        must be whole at both, and is proved for several turns."""
        skip = max(len(first) - 1, 0)
        for _ in range(_GROWTHS):
            inside = self._prove(name, [*first, *carried, *rows])
            after: list[_Port] = []
            for index, (before, shape, kind) in enumerate(carried):
                assert before is not None
                new = inside.shapes[index + skip]
                if new is None or len(new) != len(shape):
                    raise NotShown(f"what is carried in place {index} has no known shape")
                dims = before.dims
                for axis, (old, size) in enumerate(zip(shape, new, strict=True)):
                    if old != size:
                        if not dims[axis].is_whole(old):
                            raise NotShown(f"ranks have parts of dimension {axis}, which grows")
                        whole = self.families.whole(size)
                        dims = (*dims[:axis], whole, *dims[axis + 1 :])
                wanted = dims, before.partial
                if all(
                    (held.dims, held.partial) != wanted for held in inside.outputs[index + skip]
                ):
                    raise NotShown(
                        f"ranks have other positions of what is carried in place {index} at the "
                        "end of a turn"
                    )
                after.append((replace(before, dims=dims), new, kind))
            is_same = [shape for _, shape, _ in after] == [shape for _, shape, _ in carried]
            carried = after
            if is_same:
                break
        return inside, carried

    def _results(
        self, inside: _Inside, carried: Sequence[_Port], skip: int, axes: Sequence[int],
        turns: int | None = None,
    ) -> list[Result]:  # fmt: skip
        """What ranks hold after the last turn: what is carried, and what turns have stacked."""
        results = []
        for index, (held, shape, _) in enumerate(carried):
            assert held is not None
            known = self.walk.model.shapes.get(self.node.outputs[index]) or shape
            dims = tuple(
                family if size == own else self.families.whole(own)
                for family, size, own in zip(held.dims, shape, known, strict=True)
            )
            results.append(Result(index, dims, known, held.partial))
        for place, axis in enumerate(axes, len(carried)):
            term = self.node.outputs[place]
            each = inside.shapes[place + skip]
            if each is None:
                raise NotShown(f"the shape of result {place} is unknown")
            own = self.walk.model.shapes.get(term)
            at = axis % (len(each) + 1)
            count = own[at] if own else turns if turns is not None else TURNS
            whole = self.families.whole(count)
            for held in inside.outputs[place + skip]:
                dims = (*held.dims[:at], whole, *held.dims[at:])
                shape = (*each[:at], count, *each[at:])
                results.append(Result(place, dims, shape, held.partial))
        return results

    def _prove(self, name: str, ports: Sequence[_Port]) -> _Inside:
        """What is proved of the outputs of a body. NotShown if it is not enough."""
        body, locals_ = self.node.bodies[name], [own.bodies[name] for own in self.local.nodes]
        first = locals_[0]
        if any((each.inputs, each.outputs) != (first.inputs, first.outputs) for each in locals_):
            raise NotShown("bodies of ranks have other inputs or outputs")
        outer = self.walk
        pairs = zip(first.inputs, self.local.first.inputs, strict=False)
        tokens = {*outer.ranks.tokens}
        if self.node.op != "If":
            tokens -= first.own
            tokens |= {formal for formal, actual in pairs if actual in outer.ranks.tokens}
        model = _program(outer.model, body)
        ranks = Ranks(
            [_program(p, own) for p, own in zip(outer.ranks.programs, locals_, strict=True)],
            tokens,
        )
        formals = [n for n in first.inputs if n not in tokens]
        results = [n for n in first.outputs if n not in ranks.tokens]
        if len(formals) != len(body.inputs) or len(results) != len(body.outputs):
            raise NotShown("a body of ranks has more inputs or outputs than the model's")
        starts = []
        for formal, own, (held, shape, kind) in zip(body.inputs, formals, ports, strict=True):
            assert held is not None
            model.shapes[formal], model.types[formal] = shape, kind
            starts.append(replace(held, term=formal, name=own))
        walk = self._inner(model, ranks, body, locals_, starts)
        walk.run()
        found = [self._output(walk, *pair) for pair in zip(body.outputs, results, strict=True)]
        self.walk.trace.assumed.update(walk.trace.assumed)
        for how in walk.proved.values():
            self.how = max(self.how, how, key=[*HOW].index)
        self.walk.weights.compared += walk.weights.compared
        return _Inside(found, [walk.shape(term) for term in body.outputs])

    def _inner(
        self, model: Program, ranks: Ranks, body: Body, locals_: Sequence[Body],
        starts: Sequence[Held],
    ) -> Walk:  # fmt: skip
        """The walk through a body, which knows what is related outside."""
        for rank, program in enumerate(ranks.programs):
            for held in starts:
                program.shapes[held.name] = tuple(f.sizes[rank] for f in held.dims)
                program.types[held.name] = model.types[held.term]
        try:
            fold(model)
            for program in ranks.programs:
                fold(program, keeps=True)
        except NotComputed as error:
            raise NotShown(f"a constant of a body cannot be computed: {error}") from None
        straighten(model)
        merge_equal(model)
        drop_unneeded(model, body.outputs)
        walk = self.walk.inside(model, ranks)
        read = {n for node in body.nodes for n in (*node.inputs, *captured(node.proto))}
        hidden = {name for each in locals_ for name in each.own}
        for term in sorted((read | {*body.outputs}) - body.own):
            for held in self.walk.relations.by_term.get(term, ()):
                if held.name not in hidden:
                    walk.hold(held)
        for held in starts:
            walk.hold(held)
        return walk

    def _output(self, walk: Walk, term: str, name: str) -> list[Held]:
        held = walk.relations.of(term, name)
        if term in walk.model.constants and walk.ranks.is_constant(name):
            held = held or walk.weights.relate(term, name)
        if not held:
            key = next((n.key for n in walk.model.nodes if n.key in walk.refused), None)
            text = walk.failure(key) if key is not None else None
            why = f": {text.text}" if text is not None else ""
            rules = [line for line in text.details if line.startswith("rule")] if text else []
            more = f" ({rules[0].removeprefix('rule').strip()})" if rules else ""
            raise NotShown(f"in the body, {term!r} is not shown{why}{more}")
        return held


def _are_alike(pair: tuple[Held, Held], shapes: Sequence[Shape]) -> bool:
    """True if ranks hold the same positions after both branches; of dimensions with other sizes,
    all."""
    first, second = pair
    if first.partial != second.partial or len(shapes[0]) != len(shapes[1]):
        return False
    rows = zip(first.dims, second.dims, *shapes, strict=True)
    return all(a is b if n == m else a.is_whole(n) and b.is_whole(m) for a, b, n, m in rows)


def straighten(program: Program) -> None:
    """Replaces each Scan along other dimensions than the first, of tensors whose shapes are known,
    by one along the first, between Transposes."""
    nodes: list[Node] = []
    for node in program.nodes:
        is_scan = node.kind == ("", "Scan") and program.opsets.get("", 1) >= 9
        nodes += _straightened(node, program) if is_scan else [node]
    program.nodes = nodes


def _straightened(node: Node, program: Program) -> list[Node]:
    scanned = int(node.attrs["num_scan_inputs"])
    count = len(node.inputs) - scanned
    ports = {"input": node.inputs, "output": node.outputs}
    axes = {
        (kind, index): int(axis)
        for kind, names in ports.items()
        for index, axis in enumerate(node.attrs.get(f"scan_{kind}_axes") or (), count)
        if axis and index < len(names)
    }
    shapes = [program.shapes.get(ports[kind][index]) for kind, index in axes]
    if any(shape is None for shape in shapes):
        return [node]
    pairs = zip(axes.items(), shapes, strict=True)
    axes = {place: axis % len(s) for (place, axis), s in pairs if s and axis % len(s)}
    if not axes:
        return [node]
    proto = NodeProto()
    proto.CopyFrom(node.proto)
    kept = [a for a in proto.attribute if a.name not in ("scan_input_axes", "scan_output_axes")]
    del proto.attribute[:]
    proto.attribute.extend(kept)
    before, after = list[Node](), list[Node]()
    for (kind, index), axis in axes.items():
        names = proto.input if kind == "input" else proto.output
        name, turned = names[index], f"{node.key}::{kind}{index}"
        names[index] = turned
        shape = program.shapes[name]
        order = [axis, *(i for i in range(len(shape)) if i != axis)]
        program.shapes[turned] = tuple(shape[i] for i in order)
        program.types[turned] = program.types.get(name, int(TensorProto.FLOAT))
        pair = [name], [turned]
        if kind == "output":
            pair, order = pair[::-1], [order.index(i) for i in range(len(shape))]
        made = helper.make_node("Transpose", *pair, f"{turned}::Transpose", perm=order)
        (before if kind == "input" else after).append(read_node(made))
    return [*before, read_node(proto), *after]


def _program(outer: Program, body: Body) -> Program:
    """A body as a graph of its own."""
    shapes = {name: shape for name, shape in outer.shapes.items() if name not in body.own}
    types: dict[str, Any] = {n: kind for n, kind in outer.types.items() if n not in body.own}
    return replace(
        outer, nodes=[*body.nodes], inputs=[*body.inputs], outputs=[*body.outputs],
        constants=outer.constants.inside(body), shapes=shapes, types=types,
    )  # fmt: skip
