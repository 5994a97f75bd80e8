"""Reads a sharded folder for a proof: of plan.json the mesh, the ports and the sizes, and the files
of ranks."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.base.errors import DamagedError, InputError, ModelError
from onnxpar.equivalence.layouts import MeshReader, families_of
from onnxpar.equivalence.program import Pool, Program, Shape, read_program, read_rank
from onnxpar.equivalence.ranks import Ranks
from onnxpar.equivalence.spans import Families, Family
from onnxpar.equivalence.stored import WeightFiles

MOST_RANKS = 1 << 16
SIZES = "onnxpar.sizes"
"""The input of ranks with the values of open sizes."""
_OPERATORS: Mapping[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True)
class Bundle:
    """A sharded folder. `sizes` has a value for each open size; `compared` says how much of weights
    in files is compared."""

    folder: Path
    plan: Mapping[str, Any]
    mesh: MeshReader
    sizes: Mapping[str, int]
    compared: str = "all"
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
        return tuple(self.size(size) for size in port["shape"])

    def size(self, size: object) -> int:
        """The value of a size: a number, or an expression of open sizes."""
        if isinstance(size, int):
            return size
        try:
            return _value(ast.parse(str(size), mode="eval").body, self.sizes)
        except (KeyError, SyntaxError, TypeError, RecursionError, ZeroDivisionError):
            raise DamagedError(f"plan.json has a size that is none: {size!r:.40}") from None

    def is_allowed(self) -> bool:
        """True if a run may have these sizes, by the limits in plan.json."""
        try:
            pairs = [(self.size(least), self.size(most)) for least, most in self.plan["limits"]]
        except (KeyError, TypeError, ValueError):
            return True
        except DamagedError:
            return False
        return all(least <= most for least, most in pairs)

    def families(self, port: Mapping[str, Any], families: Families) -> tuple[Family, ...] | None:
        """What ranks hold of a port or a weight; None for one without a layout."""
        layout = port.get("layout")
        if layout is None:
            return None
        return tuple(families_of(layout, self.mesh, families, self.size))

    def programs(self) -> list[str]:
        """The ends of the names of rank 0's files with a graph: `onnx`, `evaluation.onnx`."""
        names = [
            path.name.removeprefix("rank_0000.") for path in self.folder.glob("rank_0000.*onnx")
        ]
        found = sorted(
            (n for n in names if not n.endswith("states.onnx")), key=lambda n: (len(n), n)
        )
        if not found:
            raise ModelError(f"{self.folder} has no rank_0000.onnx")
        return found

    def ranks(self, program: str) -> Ranks:
        """The graphs of all ranks. Errors: ModelError if one cannot be read."""
        pool = Pool()
        graphs = [
            read_rank(self.folder / f"rank_{rank:04d}.{program}", self.files, self.fed, pool)
            for rank in range(self.mesh.ranks)
        ]
        for graph in graphs:
            if SIZES in graph.inputs:
                graph.constants.add(SIZES, np.array([*self.sizes.values()], np.int64))
        return Ranks(graphs)

    def model(self, path: Path) -> Program:
        """The unsplit model, at the open sizes. Errors: InputError if ranks have other inputs."""
        shapes = {
            port["name"]: shape
            for port in self.plan["inputs"]
            if (shape := self.shape(port)) is not None
        }
        program = read_program(path, self.files, self.fed, shapes if self.sizes else None)
        unknown = [name for name in program.inputs if name not in self.fed]
        if unknown:
            raise InputError(
                f"{self.folder} was not made from {path}: it has no input {unknown[0]!r}"
            )
        return program


def _value(node: ast.expr, sizes: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if isinstance(node, ast.BinOp):
        function = _OPERATORS[type(node.op)]
        return int(function(_value(node.left, sizes), _value(node.right, sizes)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, sizes)
    raise KeyError(ast.dump(node))


def read_bundle(folder: Path, sizes: Mapping[str, int], compared: str) -> Bundle:
    """Reads plan.json. `sizes` has values of open sizes; the others are those of the plan's
    example; `compared` says how much of weights is compared. Errors: ModelError if it cannot be
    read; InputError if it cannot be verified."""
    plan = _plan(folder)
    try:
        mesh = MeshReader(plan["mesh"])
        open_sizes = {str(name): int(size) for name, size in plan.get("example", {}).items()}
        ports = [port["name"] for port in (*plan["inputs"], *plan["outputs"])]
        pairs = [(pair["input"], pair["output"]) for pair in plan.get("states", ())]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DamagedError(f"{folder}/plan.json lacks a mesh, or ports") from None
    if not 0 < mesh.ranks <= MOST_RANKS:
        raise DamagedError(f"{folder}/plan.json has a mesh of {mesh.ranks} ranks")
    if not {name for pair in pairs for name in pair} <= {*ports}:
        raise DamagedError(f"{folder}/plan.json has states that are no ports")
    if plan.get("lengths"):
        raise InputError(
            f"{folder} has a program for each length of samples: verify cannot check these yet; "
            "shard the step without --shorter"
        )
    unknown = [name for name in sizes if name not in open_sizes]
    if unknown:
        known = ", ".join(open_sizes) or "none"
        raise InputError(f"--dim {unknown[0]}: the open sizes of {folder} are {known}")
    return Bundle(folder, plan, mesh, open_sizes | dict(sizes), compared)


def _plan(folder: Path) -> Mapping[str, Any]:
    path = folder / "plan.json"
    try:
        plan = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise DamagedError(f"{path} is not JSON") from None
    if not isinstance(plan, dict):
        raise DamagedError(f"{path} is not an object")
    return plan


def outputs_of(ranks: Ranks, names: Sequence[str]) -> list[str]:
    """Of these outputs, those that the graphs of ranks have."""
    own = {*ranks.programs[0].outputs}
    return [name for name in names if name in own]
