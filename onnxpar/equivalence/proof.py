"""Proves the outputs of one program of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from onnxpar.base.errors import DamagedError, ModelError
from onnxpar.equivalence.bundle import Bundle
from onnxpar.equivalence.held import Held
from onnxpar.equivalence.order import Disorder, check_order
from onnxpar.equivalence.program import Program
from onnxpar.equivalence.ranks import Ranks
from onnxpar.equivalence.spans import Families, Family, covers
from onnxpar.equivalence.verification import Failure
from onnxpar.equivalence.walk import Walk
from onnxpar.equivalence.weights import Weights


class Proof:
    """The proof that ranks compute the outputs of `model`, whose constants are folded.

    collectives  the number of collectives whose order was checked
    """

    def __init__(
        self, model: Program, ranks: Ranks, bundle: Bundle, families: Families, seed: int
    ) -> None:
        self.model, self.ranks, self.bundle, self.families = model, ranks, bundle, families
        self.collectives = 0
        self.weights = Weights(model, ranks, bundle, self.families)
        pairs = bundle.plan.get("states", ())
        zero = {p["input"]: p["output"] for p in pairs if p.get("initial") == "zero"}
        self.walk = Walk(model, ranks, self.families, self.weights, seed, bundle.ranges, zero)

    def run(self) -> Iterator[Failure]:
        """Yields where the proof ends; nothing if ranks compute all outputs."""
        try:
            self.collectives = check_order(self.ranks.programs)
        except Disorder as error:
            yield Failure("order", "", str(error))
        inputs: list[Held] = []
        for port in self.bundle.plan["inputs"]:
            dims = self._families(port)
            shape = self.model.shapes.get(port["name"])
            if dims is not None and shape is not None and not _fit(dims, shape):
                raise DamagedError(
                    f"{self.bundle.source} has a layout of {port['name']!r:.80} that does not fit "
                    f"its shape in the model, {list(shape)}"
                )
            if dims is not None:
                inputs.append(Held(port["name"], port["name"], dims))
        for rank, program in enumerate(self.ranks.programs):
            for held in inputs:  # the session cuts them
                program.shapes[held.name] = tuple(family.sizes[rank] for family in held.dims)
                program.types[held.name] = self.model.types.get(held.term, 0)
        self.walk.fold()
        for port in self.bundle.plan["outputs"]:
            self.bundle.families(port, self.families)
        for held in inputs:
            self.walk.hold(held)
        self.walk.run()
        refused: dict[str, Failure] = {}
        for name in self.model.outputs:
            failure = self._check_output(name)
            if failure is not None:
                refused.setdefault(failure.tensor, failure)
        yield from refused.values()
        yield from self._check_states()
        yield from self._check_defaults()

    def _families(self, port: Mapping[str, Any]) -> tuple[Family, ...] | None:
        """What ranks hold of a port; sizes that data decide are those of the proof. Ports without a
        layout, such as those of strings, are whole; None if their shape is unknown."""
        shape = self.walk.shape(port["name"])
        if port.get("layout") is None and shape is not None:
            return tuple(map(self.families.whole, shape))
        return self.bundle.families(port, self.families, shape)

    def _check_defaults(self) -> Iterator[Failure]:
        """What ranks have as the default, or the first value, of an input must be the model's."""
        firsts = self.bundle.first_values()
        initial = {p["input"]: p.get("initial") for p in self.bundle.plan.get("states", ())}
        on_host, compared = self.bundle.plan.get("on_host"), self.bundle.compared
        for port in self.bundle.plan["inputs"]:
            name, dims = port["name"], self.bundle.families(port, self.families)
            if dims is None or self.weights.is_believed(self.model.defaults, name):
                continue
            whole = self.model.defaults.get(name)
            if whole is None:
                continue
            text = ""
            for rank, program in enumerate(self.ranks.programs):
                spans = [family.spans[rank] for family in dims]
                values = [program.defaults.get(name)]
                if firsts:
                    values.append(firsts[rank].get(name))
                if initial.get(name) == "stored" and values[-1] is None and not on_host:
                    text = f"rank {rank} has no first value of it"
                same = self.bundle.files.is_same
                given = [value for value in values if value is not None]
                if not all(same(value, whole, spans, compared) for value in given):
                    text = f"rank {rank} has another value of it than the model"
            if initial.get(name) == "zero" and whole.any():
                text = "ranks begin with zeros, and the model does not"
            if text:
                yield Failure("state" if name in initial else "default", name, text)

    def _check_states(self) -> Iterator[Failure]:
        ports = self.bundle.ports
        given = {p["input"]: p["output"] for p in self.bundle.plan.get("states", ())}
        for name, wanted in _states_of(self.model):
            if given.get(name) != wanted and wanted in self.model.outputs:
                text = f"the next value of {name!r} is {wanted!r} in the model, "
                text += f"{given.get(name) or 'nothing'!r} in {self.bundle.source}"
                yield Failure("state", wanted, text)
        for pair in self.bundle.plan.get("states", ()):
            source, result = ports[pair["input"]], ports[pair["output"]]
            if pair["output"] in self.ranks.programs[0].outputs and not self._is_carried(
                source, result
            ):
                text = "ranks keep other positions of it than they read in the next run"
                yield Failure("state", pair["output"], text)

    def _is_carried(self, source: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
        """True if ranks read a state at the positions that they kept of it; a dimension that grows
        must be whole."""
        first, second = map(self._families, (source, result))
        before = self.bundle.shape(source)
        after = self.bundle.shape(result) or self.walk.shape(result["name"])
        if first is None or second is None or before is None or after is None:
            return first is second
        if len(first) != len(second):
            return False
        sizes = zip(first, second, before, after, strict=True)
        return all(f is g if n == m else f.is_whole(n) and g.is_whole(m) for f, g, n, m in sizes)

    def _check_output(self, name: str) -> Failure | None:
        """An output must be related, in the layout of its port, and ranks must hold all of it."""
        port = self.bundle.ports.get(name)
        dims = None if port is None else self._families(port)
        held = self.walk.relations.of(name, name)
        if name in self.model.constants:
            held = held or self.weights.relate(name, name)
        if not held:
            return self._first_refusal(name)
        if dims is None:
            text = f"{self.bundle.source} does not say which of its elements ranks have"
            return Failure("output", name, text)
        if not any(h.dims == dims and not h.partial for h in held):
            what = "a part of a sum" if all(h.partial for h in held) else "other positions of it"
            text = f"ranks have {what}, and not what {self.bundle.source} says"
            return Failure("output", name, text)
        shape = self.walk.shape(name)
        if shape is None or not _fit(dims, shape):
            return Failure("output", name, f"{self.bundle.source} has another shape for it")
        if not covers(dims, shape, self.ranks.size):
            return Failure("output", name, "no rank has some of its elements")
        return None

    def _is_incomplete(self, name: str) -> bool:
        """True for a tensor that is related, but of which no rank has some elements. An Expand
        gives copies, and ranks may have any of them."""
        held, shape = self.walk.relations.by_term.get(name), self.walk.shape(name)
        if not held or shape is None:
            return False
        return not any(_fit(h.dims, shape) and covers(h.dims, shape, self.ranks.size) for h in held)

    def _first_refusal(self, name: str) -> Failure:
        """The first node before a tensor that is not proved, of those that ranks have by name: they
        compute the others in another way, and nobody can say which of them is wrong."""
        makers = {t: n for n in self.model.nodes for t in n.outputs}
        todo, seen, before = [name], set[str](), set[str]()
        while todo:
            term = todo.pop()
            node = makers.get(term)
            if term in seen or node is None:
                continue
            seen.add(term)
            before.add(node.key)
            todo += node.inputs
        nodes = [node for node in self.model.nodes if node.key in before]
        refused = [node for node in nodes if node.key in self.walk.refused]
        if self.ranks.has_origins:
            refused.sort(key=lambda node: not self.walk.is_anchored(node))
        for node in nodes:
            if node in refused[:1]:
                return self.walk.failure(node.key)
            if node.op != "Expand" and any(map(self._is_incomplete, node.outputs)):
                text = f"ranks lack elements of what {node.op} {node.name!r} gives"
                return Failure("node", node.key, text)
        return Failure("output", name, "no tensor of ranks is shown to be it")


def _states_of(model: Program) -> list[tuple[str, str]]:
    """The states that a training step, or a graph of the loader, says it has: each input, and the
    output that it becomes."""
    try:
        slots = json.loads(model.metadata.get("onnxpar.training", "{}")).get("slots", ())
        pairs = json.loads(model.metadata.get("onnxpar.states", "[]"))
        found = [(str(slot["input"]), str(slot["output"])) for slot in slots]
        return [*found, *((str(source), str(result)) for source, result in pairs)]
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        raise ModelError(f"{model.path}: what it says of its states is damaged") from None


def _fit(dims: Sequence[Family], shape: Sequence[int]) -> bool:
    """True if ranks hold positions that a tensor of this shape has."""
    return len(dims) == len(shape) and all(map(Family.fits, dims, shape))
