"""Written bundles in memory, to be changed, verified and run."""

from __future__ import annotations

import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from agreement import options
from execution import Array, Executable, Stuck, run_ranks
from onnx import GraphProto, ModelProto, NodeProto, numpy_helper
from onnx.inliner import inline_local_functions

import onnxpar
from onnxpar.layout.layout import Layout
from onnxpar.layout.mesh import Mesh
from onnxpar.planner import sharder

MAIN, STATES = "onnx", "states.onnx"
ROUNDING = 1e-11
"""The largest error of a result in float64, as a share of its largest value."""
DRAWS, MANY_DRAWS = 5, 16
"""On how many inputs ranks are run whose change is refused, and whose change is accepted."""


class Nothing(Exception):
    """A bundle has nothing that a kind of mutants changes."""


@dataclass
class Mutant:
    """One change of a bundle.

    files    the graphs that are changed, by program and rank
    plan     plan.json, if it is changed
    changed  names of ranks' tensors, by program, whose values the change decides
    ports    names of changed ports
    inputs   those of them that are inputs: ranks are wrong at the first node that they do not
             compute from what the session gives them now, wherever that is
    calls    names of collectives whose order, group or tag is changed
    """

    subject: Subject
    kind: str = ""
    text: str = ""
    files: dict[tuple[str, int], ModelProto] = field(default_factory=dict)
    plan: dict[str, Any] | None = None
    changed: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    ports: set[str] = field(default_factory=set)
    inputs: set[str] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)

    def graph(self, program: str, rank: int) -> GraphProto:
        """A graph to be changed."""
        key = program, rank
        if key not in self.files:
            self.files[key] = onnx.ModelProto()
            self.files[key].CopyFrom(self.subject.programs[program][rank])
        return self.files[key].graph

    def edited_plan(self) -> dict[str, Any]:
        """The plan to be changed."""
        if self.plan is None:
            self.plan = json.loads(json.dumps(self.subject.plan))
        return self.plan

    @property
    def changes(self) -> bool:
        """True if a file differs from what it was."""
        before = self.subject.programs
        return (self.plan is not None and self.plan != self.subject.plan) or any(
            model != before[program][rank] for (program, rank), model in self.files.items()
        )


class Subject:
    """A model, and a bundle of it."""

    def __init__(self, model: Path, layout: str, folder: Path, **how: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.model, self.layout, self.par = model, layout, folder / "model.par"
        sharder.shard(model, self.par, options(layout, **how))
        self.plan: dict[str, Any] = json.loads((self.par / "plan.json").read_text())
        self.mesh = Mesh.of((name, size) for name, size in self.plan["mesh"])
        self.ranks = self.mesh.size
        ends = sorted(p.name.removeprefix("rank_0000.") for p in self.par.glob("rank_0000.*onnx"))
        self.programs: dict[str, list[ModelProto]] = {
            end: [onnx.load(self._file(end, rank)) for rank in range(self.ranks)] for end in ends
        }
        self.sizes: dict[str, int] = self.plan["example"]
        self.proto = onnx.load(model)
        if self.proto.functions:
            self.proto = inline_local_functions(self.proto)
        self.unsplit = Executable(self.proto)
        self.executables = {
            (end, rank): Executable(model)
            for end, models in self.programs.items()
            if end != STATES
            for rank, model in enumerate(models)
        }
        self._feeds: dict[int, dict[str, Array]] = {}
        self._wanted: dict[int, dict[str, Array]] = {}

    def _file(self, program: str, rank: int) -> Path:
        return self.par / f"rank_{rank:04d}.{program}"

    def refusal(self) -> str:
        """Why the bundle as it is has no mutants: verify does not show it, or its ranks are not
        equal to the model in float64; empty if it has."""
        result = self.verify(Mutant(self))
        if not result.ok:
            return result.text()
        try:
            for program in sorted({p for p, _ in self.executables}):
                self._compare(program, self._run(program, {}, self.plan, 0), self.plan, 0)
        except Stuck as error:
            return f"{error}"
        return ""

    @cached_property
    def tensors(self) -> dict[str, list[dict[str, tuple[tuple[int, ...], np.dtype]]]]:
        """The shape and the type of each tensor, by program and rank."""
        found = {}
        for program in {p for p, _ in self.executables}:
            values = self._run(program, {}, self.plan, 0)
            found[program] = [
                {name: (v.shape, v.dtype) for name, v in own.items() if isinstance(v, np.ndarray)}
                for own in values
            ]
        return found

    def verify(self, mutant: Mutant) -> onnxpar.Verification:
        """What `onnxpar.verify` says of a mutant."""
        kept = {}
        try:
            for (program, rank), model in mutant.files.items():
                path = self._file(program, rank)
                kept[path] = path.read_bytes()
                path.write_bytes(model.SerializeToString())
            if mutant.plan is not None:
                path = self.par / "plan.json"
                kept[path] = path.read_bytes()
                path.write_text(json.dumps(mutant.plan))
            return onnxpar.verify(self.model, self.par)
        finally:
            for path, data in kept.items():
                path.write_bytes(data)

    def differs(self, mutant: Mutant, draws: int) -> str:
        """Where ranks differ from the model; the empty text if they do not on these draws."""
        plan = mutant.plan or self.plan
        if {(p["input"], p["output"]) for p in plan["states"]} != {
            (p["input"], p["output"]) for p in self.plan["states"]
        }:
            return "states are exchanged"
        try:
            if any(program == STATES for program, _ in mutant.files):
                self._check_first_values(mutant, plan)
            own = {
                key: Executable(model) for key, model in mutant.files.items() if key[0] != STATES
            }
            programs = {p for p, _ in own} or (
                {p for p, _ in self.executables} if mutant.plan else {}
            )
            for number in range(draws):
                for program in sorted(programs):
                    values = self._run(program, own, plan, number)
                    self._compare(program, values, plan, number)
        except Stuck as error:
            return str(error) or "stuck"
        return ""

    def _run(
        self, program: str, own: Mapping[tuple[str, int], Executable], plan: Mapping[str, Any],
        number: int,
    ) -> list[dict[str, Array]]:  # fmt: skip
        graphs = [own.get((program, r)) or self.executables[program, r] for r in range(self.ranks)]
        whole = self.feeds(number)
        layouts = {p["name"]: self._layout(p) for p in plan["inputs"]}
        feeds = []
        for rank, graph in enumerate(graphs):
            feed = {"onnxpar.sizes": np.array([*self.sizes.values()], np.int64)}
            for name in graph.inputs:
                if name in layouts:
                    feed[name] = self._part(layouts[name], whole[name], rank)
            feeds.append(feed)
        return run_ranks(graphs, feeds)

    def _compare(
        self, program: str, values: list[dict[str, Array]], plan: Mapping[str, Any], number: int
    ) -> None:
        """Stuck where a rank's part of an output is not the model's."""
        wanted = self.wanted(number)
        names = {port.name for port in self.programs[program][0].graph.output}
        for port in plan["outputs"]:
            name = port["name"]
            if name not in names:
                continue
            layout, whole = self._layout(port), wanted[name]
            scale = (
                np.abs(whole[np.isfinite(whole)]).max(initial=0) if whole.dtype.kind == "f" else 0
            )
            for rank, own in enumerate(values):
                part, got = self._part(layout, whole, rank), own.get(name)
                if got is None or got.shape != part.shape or got.dtype != part.dtype:
                    raise Stuck(f"{name} of rank {rank} has another shape")
                with np.errstate(all="ignore"):
                    same = (
                        np.allclose(got, part, rtol=ROUNDING, atol=ROUNDING * scale, equal_nan=True)
                        if part.dtype.kind == "f"
                        else np.array_equal(got, part)
                    )
                if not same:
                    raise Stuck(f"{name} of rank {rank} is another value on draw {number}")

    def _check_first_values(self, mutant: Mutant, plan: Mapping[str, Any]) -> None:
        ports = {port["name"]: port for port in plan["inputs"]}
        first = {t.name: numpy_helper.to_array(t) for t in self.proto.graph.initializer}
        for rank in range(self.ranks):
            model = mutant.files.get((STATES, rank)) or self.programs[STATES][rank]
            for tensor in model.graph.initializer:
                part = self._part(self._layout(ports[tensor.name]), first[tensor.name], rank)
                if not np.array_equal(part, numpy_helper.to_array(tensor), equal_nan=True):
                    raise Stuck(f"rank {rank} begins with another {tensor.name}")

    def _layout(self, port: Mapping[str, Any]) -> Layout:
        try:
            return Layout.from_json(self._bound(port["layout"]))
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise Stuck(f"the layout of {port['name']}: {error!r:.100}") from None

    def _part(self, layout: Layout, whole: Array, rank: int) -> Array:
        try:
            if layout.shape != whole.shape:
                raise Stuck(f"a layout of {layout.shape} is that of a tensor of {whole.shape}")
            return layout.take(whole, self.mesh, rank)
        except (KeyError, IndexError, ValueError, ZeroDivisionError) as error:
            raise Stuck(f"a layout cannot be cut: {error!r:.100}") from None

    def _bound(self, data: Any) -> Any:
        """A layout with numbers in the place of sizes."""
        if isinstance(data, list):
            return [self._bound(each) for each in data]
        if isinstance(data, dict):
            return {
                key: self._size(value) if key == "size" else self._bound(value)
                for key, value in data.items()
            }
        return data

    def _size(self, size: object) -> int:
        return size if isinstance(size, int) else int(eval(str(size), {}, dict(self.sizes)))

    def feeds(self, number: int) -> dict[str, Array]:
        """Values of all inputs; indices and masks also at their edges."""
        if number not in self._feeds:
            stored = {t.name: t for t in self.proto.graph.initializer}
            states = {pair["input"] for pair in self.plan["states"]}
            self._feeds[number] = {}
            for port in self.plan["inputs"]:
                name, shape = port["name"], tuple(map(self._size, port["shape"]))
                random = np.random.default_rng([number, zlib.crc32(name.encode()), 7])
                dtype = np.dtype(port["dtype"])
                value = self._value(name, shape, dtype, number, random)
                if name in stored and dtype.kind == "f":
                    value = numpy_helper.to_array(stored[name]) + 0.1 * value
                elif dtype.kind == "f" and (name in states or not shape):
                    value = 0.1 * np.abs(value)
                self._feeds[number][name] = np.asarray(value, dtype)
        return self._feeds[number]

    def _value(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype, number: int,
        random: np.random.Generator,
    ) -> Array:  # fmt: skip
        if dtype.kind == "f":
            return np.asarray(random.standard_normal(shape))
        low, high = self.plan["ranges"].get(name, (0, 2 if dtype.kind == "b" else 3))
        if (low, high) == (0, 2) and shape:
            return _mask(shape, number, random)
        if number % 2 == 0:
            return np.asarray(random.integers(low, high, shape))
        cuts = {
            k * high // n + d for n in range(2, self.ranks + 1) for k in range(n) for d in (-1, 0)
        }
        edges = [low, high - 1, *sorted(c for c in cuts if low <= c < high)]
        return np.asarray(random.choice(edges, shape))

    def wanted(self, number: int) -> dict[str, Array]:
        """The outputs of the unsplit model."""
        if number not in self._wanted:
            self._wanted[number] = self.unsplit.run(self.feeds(number))
        return self._wanted[number]

    @cached_property
    def model_nodes(self) -> dict[str, NodeProto]:
        """The nodes of the model, by name, and by the names of their results."""
        nodes = {node.name: node for node in self.proto.graph.node if node.name}
        return nodes | {
            name: node for node in self.proto.graph.node for name in node.output if name
        }

    def depends(self, tensor: str, on: str) -> bool:
        """True if a tensor of the model depends on another."""
        todo, seen = [tensor], set[str]()
        while todo:
            name = todo.pop()
            if name == on:
                return True
            if name not in seen and name in self.model_nodes:
                seen.add(name)
                todo += self.model_nodes[name].input
        return False

    def nearest(self, mutant: Mutant) -> set[str]:
        """The tensors of the model at a change: results of the nodes from which the changed nodes
        of ranks come, and of those that ranks compute next from what is changed. Between them and
        the change, ranks compute nothing that comes from another node of the model, but for what
        they, or the model, also compute in another place: there, the change does no harm."""
        found = {*mutant.ports}
        for program, names in mutant.changed.items():
            rank = next((r for p, r in mutant.files if p == program), 0)
            model = mutant.files.get((program, rank)) or self.programs[program][rank]
            found |= self._nearest(model.graph, names)
        return found

    def _nearest(self, graph: GraphProto, names: set[str]) -> set[str]:
        readers = defaultdict(list)
        for node in graph.node:
            for name in node.input:
                readers[name].append(node)
        made = {name for node in graph.node for name in node.output}
        own = [n for n in graph.node if names & {*n.output} or (names - made) & {*n.input}]
        found = {name for node in own for name in self._results(node)}
        passed = found | (made - _behind(graph, names))
        passed |= {name for name, twins in self.twins.items() if len(twins) > 1}
        seen, todo = set[str](), [*names]
        while todo:
            name = todo.pop()
            if name in seen:
                continue
            seen.add(name)
            found.add(name)
            for node in readers[name]:
                results = self._results(node)
                found |= results
                if results <= passed:
                    todo += node.output[:1] if node.domain == "onnxpar" else node.output
        return found | {twin for name in found for twin in self.twins.get(name, ())}

    def _results(self, node: NodeProto) -> set[str]:
        """The results of the nodes of the model from which a node of ranks comes."""
        data = {entry.key: entry.value for entry in node.metadata_props}
        names = {
            *data.get("onnxpar.name", "").split("\n"),
            *data.get("onnxpar.node", "").split("\n"),
        }
        names |= {node.name, *(re.sub(r"@\d+$", "", name) for name in node.output)}
        makers = [self.model_nodes[name] for name in names if name in self.model_nodes]
        return {name for maker in makers for name in maker.output if name}

    @cached_property
    def twins(self) -> dict[str, list[str]]:
        """For each tensor of the model, those that are computed alike, it among them."""
        codes: dict[str, object] = {
            t.name: numpy_helper.to_array(t).tobytes() for t in self.proto.graph.initializer
        }
        made: dict[object, list[str]] = defaultdict(list)
        for node in self.proto.graph.node:
            attrs = sorted(a.SerializeToString() for a in node.attribute)
            inputs = tuple(codes.get(name, name) for name in node.input)
            code = hash((node.domain, node.op_type, inputs, tuple(attrs)))
            for i, name in enumerate(node.output):
                is_copy = node.op_type == "Identity"
                codes[name] = codes.get(node.input[0], node.input[0]) if is_copy else (code, i)
                made[codes[name]].append(name)
        return {name: names for names in made.values() for name in names}


def _behind(graph: GraphProto, names: set[str]) -> set[str]:
    """These tensors, and all that depend on them; nodes of a graph are in order."""
    found = {*names}
    for node in graph.node:
        if found & {*node.input}:
            found |= {*node.output}
    return found


def _mask(shape: tuple[int, ...], number: int, random: np.random.Generator) -> Array:
    """Ones and zeros, of which no row has only zeros: all ones, drawn, or ones up to a place."""
    mask = random.integers(0, 2, shape)
    if number % 4 == 0:
        mask[...] = 1
    if number % 4 == 2:
        mask = np.arange(shape[-1]) < random.integers(1, shape[-1] + 1, (*shape[:-1], 1))
    mask[..., 0 if number % 4 == 1 else -1 if number % 4 == 3 else 0] = 1
    return np.asarray(mask, np.int64)


def collectives(graph: GraphProto) -> Iterator[NodeProto]:
    """The nodes that communicate, with a token."""
    for node in graph.node:
        if node.domain == "onnxpar" and any(a.name == "tag" for a in node.attribute):
            yield node
