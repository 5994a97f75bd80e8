"""Reads a sharded folder for a proof: of plan.json, or of a ports.json that others wrote, the mesh,
the ports and the sizes; and the files of ranks."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.base.bundle_names import REWRITTEN
from onnxpar.base.errors import DamagedError, InputError, ModelError
from onnxpar.equivalence.evaluate import SUPPORTED
from onnxpar.equivalence.layouts import MOST_POSITIONS, MeshReader, families_of
from onnxpar.equivalence.others import adopted
from onnxpar.equivalence.ports import PORTS, plan_of, read_json
from onnxpar.equivalence.program import (
    MOST_SIZE,
    Constants,
    Pool,
    Program,
    Shape,
    read_program,
    read_rank,
    read_values,
)
from onnxpar.equivalence.ranks import PLUGIN, Ranks
from onnxpar.equivalence.spans import Families, Family
from onnxpar.equivalence.stored import WeightFiles

MOST_RANKS = 1 << 16
MOST_TEXT = 1 << 14
"""The most characters of an expression of sizes."""
MOST_VALUE = 1 << 80
"""The largest value of a part of an expression of sizes."""
SIZES = "onnxpar.sizes"
"""The input of ranks with the values of open sizes."""
_BY_HAND = SUPPORTED - {"Gate"} | {"Send", "Recv", "Rank", "GroupSize"}
"""The ops of manual programs, which unsplit models do not have."""
_OPERATORS: Mapping[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True)
class Bundle:
    """A sharded folder. `sizes` has a value for each open size; `source` is the name of the file
    that describes it; `ranges` has the integers [low, high) that inputs may hold, by name;
    `compared` says how much of weights in files is compared; `length` is the name of the programs
    for samples of one length, in a folder of a training step that has programs for several."""

    folder: Path
    plan: Mapping[str, Any]
    mesh: MeshReader
    sizes: Mapping[str, int]
    source: str
    ranges: Mapping[str, tuple[int, int]]
    compared: str = "all"
    length: str | None = None
    files: WeightFiles = field(default_factory=WeightFiles)

    @property
    def ports(self) -> dict[str, Mapping[str, Any]]:
        """The inputs and outputs, by name."""
        return {port["name"]: port for port in (*self.plan["inputs"], *self.plan["outputs"])}

    @property
    def fed(self) -> set[str]:
        """The names of the inputs that a run gets, or that ranks keep from run to run."""
        return {port["name"] for port in self.plan["inputs"]}

    def shape(self, port: Mapping[str, Any]) -> Shape | None:
        """The shape of a port at the open sizes; None if data decide a size."""
        if port["shape"] is None or None in port["shape"]:
            return None
        shape = tuple(self.size(size) for size in port["shape"])
        if any(not 0 <= size < MOST_SIZE for size in shape):
            raise DamagedError(f"{self.source} has a size that is none: {port['shape']!r:.80}")
        return shape

    def size(self, size: object) -> int:
        """The value of a size: a number, or an expression of open sizes."""
        if isinstance(size, int):
            return size
        try:
            if len(str(size)) > MOST_TEXT:
                raise ValueError("it is too long")
            return _value(ast.parse(str(size), mode="eval").body, self.sizes)
        except (
            KeyError, SyntaxError, TypeError, ValueError, RecursionError, ZeroDivisionError,
            MemoryError, OverflowError,
        ):  # fmt: skip
            raise DamagedError(f"{self.source} has a size that is none: {size!r:.40}") from None

    def is_allowed(self) -> bool:
        """True if a run may have these sizes, by the limits in plan.json."""
        try:
            pairs = [(self.size(least), self.size(most)) for least, most in self.plan["limits"]]
        except (KeyError, TypeError, ValueError):
            return True
        except DamagedError:
            return False
        return all(least <= most for least, most in pairs)

    def families(
        self, port: Mapping[str, Any], families: Families, known: Shape | None = None
    ) -> tuple[Family, ...] | None:
        """What ranks hold of a port or a weight; None for one without a layout, or with a size that
        data decide, unless it is one of `known`. Errors: DamagedError."""
        layout, shape = port.get("layout"), port.get("shape")
        if layout is None:
            return None
        if shape is not None and None in shape and (known is None or len(known) != len(shape)):
            return None
        layout = _with_sizes(layout, shape or (), known or ())
        found = tuple(families_of(layout, self.mesh, families, self.size))
        if shape is not None and len(shape) != len(found):
            raise DamagedError(f"{self.folder}/plan.json: the layout of {port['name']!r} is none")
        return found

    def lengths(self) -> list[Bundle]:
        """The folder as it is for samples of each length; itself if it has no such programs.
        Errors: DamagedError."""
        try:
            return [
                replace(self, length=str(entry["program"]), sizes=self._sizes_of(entry["sizes"]))
                for entry in self.plan.get("lengths", ())
            ] or [self]
        except (KeyError, TypeError, ValueError):
            raise DamagedError(f"{self.folder}/plan.json has lengths that are none") from None

    def _sizes_of(self, row: Sequence[Any]) -> dict[str, int]:
        return {name: int(size) for name, size in zip(self.sizes, row, strict=True)}

    def programs(self) -> list[str]:
        """The ends of the names of rank 0's files with a graph: `onnx`, `evaluation.onnx`; of those
        for this length: `length_128.onnx`, `length_128-evaluation.onnx`. Errors: ModelError if
        there is none."""
        if self.plan.get("rank_files"):
            return ["onnx"]
        names = [
            path.name.removeprefix("rank_0000.") for path in self.folder.glob("rank_0000.*onnx")
        ]
        found = sorted(
            (n for n in names if not n.endswith("states.onnx")), key=lambda n: (len(n), n)
        )
        if self.length is not None:
            lengths = [str(entry["program"]) for entry in self.plan["lengths"]]
            found = [name for name in found if _length_of(name, lengths) == self.length]
        if not found:
            end = f"{self.length}.onnx" if self.length else "onnx"
            raise ModelError(f"{self.folder} has no rank_0000.{end}")
        return found

    def fits(self, program: Program) -> bool:
        """True if the inputs of a model, which declares their sizes, have those of the ports."""
        shapes = [(program.shapes.get(name), self.ports[name]) for name in program.inputs]
        return all(shape == self.shape(port) for shape, port in shapes)

    def text(self) -> str:
        """The open sizes, as text."""
        return ", ".join(f"{name}={size}" for name, size in self.sizes.items())

    def ranks(self, program: str) -> Ranks:
        """The graphs of all ranks. Errors: ModelError if one cannot be read."""
        names = [f"rank_{rank:04d}.{program}" for rank in range(self.mesh.ranks)]
        own = self.folder.resolve()
        graphs, pool = [], Pool()
        for name in self.plan.get("rank_files") or names:
            path = self.folder / name
            try:
                is_own = path.resolve().is_relative_to(own)
            except (OSError, RuntimeError, ValueError):  # links in a circle
                raise ModelError(f"{path} cannot be read: it is no file") from None
            if not is_own:
                raise ModelError(f"{path} is in another folder")
            graphs.append(read_rank(path, self.files, self.fed, pool))
        for rank, graph in enumerate(graphs):
            if SIZES in graph.inputs:
                graph.constants.add(SIZES, np.array([*self.sizes.values()], np.int64))
            _add_numbers(graph, rank, self.mesh.ranks)
        return Ranks(adopted(graphs))

    def first_values(self) -> list[Constants]:
        """The first values of states, by rank; empty if ranks have none."""
        found = []
        for rank in range(self.mesh.ranks):
            path = self.folder / f"rank_{rank:04d}.states.onnx"
            if self.plan.get("rank_files") or not path.exists():
                return []
            found.append(read_values(path, self.files))
        return found

    @property
    def rewritten(self) -> Path | None:
        """The file with the graph that ranks compute in place of the model's; None if there is
        none."""
        path = self.folder / REWRITTEN
        return path if path.exists() else None

    def model(self, path: Path) -> Program:
        """The unsplit model, at the open sizes. Errors: InputError if ranks have other inputs."""
        shapes = {
            port["name"]: shape
            for port in self.plan["inputs"]
            if (shape := self.shape(port)) is not None
        }
        is_open = self.sizes and self.length is None
        given = shapes if is_open else None
        program = read_program(path, self.files, self.fed, given, self.rewritten)
        if any(node.domain == PLUGIN and node.op in _BY_HAND for node in program.nodes):
            raise InputError(
                f"{path} is the program of one rank, with collectives of its own: give the unsplit "
                "model that its ranks are to compute"
            )
        unknown = [name for name in program.inputs if name not in self.fed]
        if unknown:
            raise InputError(
                f"{self.folder} was not made from {path}: it has no input {unknown[0]!r}"
            )
        return program


def _with_sizes(
    layout: Mapping[str, Any], shape: Sequence[object], known: Shape
) -> Mapping[str, Any]:
    """A layout with the open sizes of a port in place of those that it does not have, and `known`
    ones in place of those that data decide."""
    try:
        dims = [*layout["dims"]]
        for axis, (dim, size) in enumerate(zip(dims, shape, strict=True)):
            if not isinstance(size, int) and dim.get("size") == -1:
                dims[axis] = {**dim, "size": known[axis] if size is None else size}
    except (KeyError, TypeError, ValueError, AttributeError):
        return layout  # which families_of refuses, unless it needs no sizes
    return {**layout, "dims": dims}


def _add_numbers(graph: Program, rank: int, ranks: int) -> None:
    """Adds the numbers of ranks that a manual program asks for: a rank's own among its group, and
    that of the group's members."""
    for node in graph.nodes:
        if node.domain == PLUGIN and node.op in ("Rank", "GroupSize"):
            group = [int(member) for member in node.attrs.get("group", range(ranks))]
            if rank not in group:
                raise DamagedError(f"{node.name!r} of rank {rank} is in a group without it")
            number = group.index(rank) if node.op == "Rank" else len(group)
            graph.constants.add(node.outputs[0], np.array(number))


def _value(node: ast.expr, sizes: Mapping[str, int]) -> int:
    """The value of an expression; it is that of a size, and so it is small on the way, too."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.Name):
        value = sizes[node.id]
    elif isinstance(node, ast.BinOp):
        function = _OPERATORS[type(node.op)]
        value = int(function(_value(node.left, sizes), _value(node.right, sizes)))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_value(node.operand, sizes)
    else:
        raise KeyError(type(node).__name__)
    if abs(value) > MOST_VALUE:
        raise ValueError("it is too large")
    return value


def read_bundle(
    folder: Path, model: Path, sizes: Mapping[str, int], compared: str = "all"
) -> Bundle:
    """Reads plan.json, or else ports.json. `sizes` has values of open sizes; the others are those
    of the plan's example; `compared` says how much of weights is compared. Errors: ModelError if it
    cannot be read; InputError if it cannot be verified."""
    source = "plan.json"
    if not (folder / source).exists() and (folder / PORTS).exists():
        source = PORTS
        plan: Mapping[str, Any] = plan_of(folder / source, model, sizes)
    else:
        plan = read_json(folder / source)
    path = folder / source
    try:
        mesh = MeshReader(plan["mesh"])
        open_sizes = {_text(name): _size(n) for name, n in plan.get("example", {}).items()}
        ports = [_port(port) for port in (*plan["inputs"], *plan["outputs"])]
        pairs = [(_text(p["input"]), _text(p["output"])) for p in plan.get("states", ())]
        for weight in plan.get("weights", ()):
            _text(weight["name"]), _text(weight["tensor"])
            _port(weight)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DamagedError(f"{path} lacks a mesh, ports or weights, or has others") from None
    if not 0 < mesh.ranks <= MOST_RANKS:
        raise DamagedError(f"{path} has a mesh of {mesh.ranks} ranks")
    if not {name for pair in pairs for name in pair} <= {*ports}:
        raise DamagedError(f"{path} has states that are no ports")
    if len({i for i, _ in pairs}) < len(pairs) or len({o for _, o in pairs}) < len(pairs):
        raise DamagedError(f"{path} has a state twice")
    known_sizes = () if plan.get("lengths") else open_sizes
    unknown = [name for name in sizes if name not in known_sizes]
    if unknown:
        known = ", ".join(known_sizes) or "none"
        raise InputError(f"--dim {unknown[0]}: the open sizes of {folder} are {known}")
    ranges = plan["ranges"] if source == PORTS else {}  # sessions take others than plan.json has
    return Bundle(folder, plan, mesh, open_sizes | dict(sizes), source, ranges, compared)


def _port(port: Mapping[str, Any]) -> str:
    """The name of a port, or of a weight. Errors: TypeError, KeyError or ValueError if it is
    none."""
    shape, layout = port["shape"], port.get("layout")
    if shape is not None and not isinstance(shape, list):
        raise TypeError("a shape is no list")
    for size in shape or ():
        if type(size) not in (int, str, type(None)):
            raise TypeError(f"a size is {size!r:.40}")
    if layout is not None:
        dims = layout["dims"]
        if not isinstance(dims, list) or (shape is not None and len(dims) != len(shape)):
            raise ValueError("a layout does not fit its shape")
    return _text(port["name"])


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a name is {value!r:.40}")
    return value


def _size(value: object) -> int:
    if type(value) is not int or not 0 <= value < MOST_POSITIONS:
        raise ValueError(f"a size is {value!r:.40}")
    return value


def _length_of(name: str, lengths: Iterable[str]) -> str:
    """The length for which a file has a program, by the end of the file's name; "" for the longest,
    which it does not name."""
    found = (own for own in lengths if own and name.startswith((f"{own}.", f"{own}-")))
    return next(found, "")


def outputs_of(ranks: Ranks, names: Sequence[str]) -> list[str]:
    """Of these outputs, those that the graphs of ranks have."""
    own = {*ranks.programs[0].outputs}
    return [name for name in names if name in own]
