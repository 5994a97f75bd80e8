"""The plan of a sharded model, which people read and the runtime follows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from onnxpar.base.lookup import Lookup
from onnxpar.base.shown import Shown
from onnxpar.files.digests import digests_of, sealed
from onnxpar.ir.training_spec import Step
from onnxpar.layout.layout import Layout
from onnxpar.layout.mesh import Mesh
from onnxpar.open_sizes.cache_sizes import CacheSizes
from onnxpar.rules.rule import is_lack
from onnxpar.runtime.bundle import FORMAT
from onnxpar.sharding.planned_collectives import Collective

_OWN_FILE = re.compile(r"plan\.json|shared\.weights|rank_\d{4,}\.([\w-]+\.)?(onnx|weights)")


def open_shape(sizes: Sequence[int]) -> tuple[int | None, ...]:
    """A shape with None for what only data decides, which layouts have as -1."""
    return tuple(None if size < 0 else size for size in sizes)


@dataclass(frozen=True)
class OpenPort:
    """A shape and the JSON of a layout with texts for the sizes that are open (`past + 1`), and
    None or -1 for those that only data decides; strings have no layout."""

    shape: list[int | str | None]
    layout: dict[str, Any] | None


@dataclass(frozen=True)
class Port:
    """A graph input or output: its global shape and its layout.

    `type` is onnxruntime's text, which also says what is no tensor; such have no dtype. A size
    that only data decides is None in `shape`, and -1 in `layout`. An input
    that `has_default` need not be fed. Where sizes are `open`, `shape` and `layout` are examples.
    """

    name: str
    dtype: str | None
    shape: tuple[int | None, ...] | None
    layout: Layout | None
    type: str
    has_default: bool = False
    open: OpenPort | None = None

    def to_json(self, mesh: Mesh) -> dict[str, Any]:
        """As plan.json has it."""
        shape: Any = None if self.shape is None else list(self.shape)
        layout = None if self.layout is None else self.layout.to_json()
        if self.open is not None:
            shape, layout = self.open.shape, self.open.layout
        return {
            "name": self.name,
            "dtype": self.dtype,
            "type": self.type,
            "shape": shape,
            "layout": layout,
            "layout_text": None if self.layout is None else self.layout.text(mesh),
            **({"default": True} if self.has_default else {}),
        }


@dataclass(frozen=True)
class Weight:
    """A weight: its layout, and the bytes of the largest part."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    bytes: int
    bytes_per_rank: int


@dataclass(frozen=True)
class Whole:
    """A node that runs whole on every rank though its operands are split, and what that costs."""

    node: str
    op: str
    reason: str
    bytes: int

    @property
    def is_lack(self) -> bool:
        """True if it lacks a rule, rather than stays whole by choice."""
        return self.bytes > 0 or is_lack(self.reason)


@dataclass(frozen=True)
class Predicted:
    """Seconds of a run by the cost model: of the rank that has the most to do, computing and
    communicating, one after the other; and of one rank that does all."""

    compute: float
    communication: float
    one_rank: float

    @property
    def total(self) -> float:
        """Both, one after the other."""
        return self.compute + self.communication

    def to_json(self) -> dict[str, float]:
        """As plan.json has it."""
        return {"total": self.total, **asdict(self)}


@dataclass(repr=False)
class Plan(Shown):
    """The plan of a sharded model; `plan.json` is its `to_json`.

    `example` has a size for every open symbol; bytes, memory, FLOPs and what is `predicted` are for
    the `typical` ones, with weights: means of these, and of memory the most. `is_told`: whether a
    user gave these; `caches` as OpenSizes has them. Of a manual program, nothing is predicted.
    `initial` says by state input what its first value is: STORED with the model, or ZERO; `step`
    which ports are what where the model is a training step. `notes` are sentences that a user
    should read; `unpaired` are inputs that no output follows, though the others of their kind are
    states. `explained` has the steps of the plan where somebody asked for them: a page is made of
    it. `sent_at_runs` are the bytes that a rank sends in each collective, by name, at sizes of runs
    that somebody asked about.
    """

    model: str
    mesh: Mesh
    preset: str | None
    inputs: list[Port]
    outputs: list[Port]
    states: list[tuple[str, str]]
    collectives: list[Collective]
    weights: list[Weight]
    whole: list[Whole]
    memory: Mapping[str, int] = field(default_factory=dict)
    flops: Mapping[str, int] = field(default_factory=dict)
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    fixed: Sequence[str] = ()
    example: Mapping[str, int] = field(default_factory=dict)
    initial: Mapping[str, str] = field(default_factory=dict)
    step: Step | None = None
    lookups: Sequence[Lookup] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    predicted: Predicted | None = None
    typical: Sequence[tuple[Mapping[str, int], float]] = ()
    is_told: bool = False
    caches: Sequence[CacheSizes] = ()
    unpaired: Sequence[str] = ()
    explained: Any = field(default=None, compare=False)
    sent_at_runs: Mapping[str, int] = field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        how = f", {self.preset}" if self.preset else ""
        return f"<Plan of {self.model} over {self.mesh.size} ranks (mesh {self.mesh}{how})>"

    def to_json(self) -> dict[str, Any]:
        """The object of plan.json, `inspect --json` and `plan --json`."""
        return {
            "format": FORMAT,
            "model": self.model,
            "mesh": [list(axis) for axis in self.mesh.shape],
            "ranks": self.mesh.size,
            "preset": self.preset,
            "inputs": [p.to_json(self.mesh) for p in self.inputs],
            "outputs": [p.to_json(self.mesh) for p in self.outputs],
            "states": [
                {"input": i, "output": o, "initial": self.initial.get(i)} for i, o in self.states
            ],
            "unpaired": list(self.unpaired),
            "step": None if self.step is None else asdict(self.step),
            "fixed": list(self.fixed),
            "example": dict(self.example),
            "ranges": {name: list(r) for name, r in self.ranges.items()},
            "lookups": _dicts(self.lookups),
            "collectives": _dicts(self.collectives),
            "weights": _dicts(self.weights),
            "whole": _dicts(self.whole),
            "memory": dict(self.memory),
            "flops": dict(self.flops),
            "metadata": dict(self.metadata),
            "predicted": None if self.predicted is None else self.predicted.to_json(),
            "typical": [{"sizes": dict(s), "weight": weight} for s, weight in self.typical],
            "typical_given": self.is_told,
            "notes": list(self.notes),
        }

    def text(self) -> str:
        """The JSON, with one collective, weight or port a line."""
        return json.dumps(self.to_json(), indent=1)


@dataclass(frozen=True, repr=False)
class SavedPlan(Shown):
    """The plan of a sharded model as its plan.json has it."""

    data: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"<SavedPlan of {self.data['model']} over {self.data['ranks']} ranks>"

    def to_json(self) -> dict[str, Any]:
        """The object of plan.json."""
        return dict(self.data)


def _dicts(items: Sequence[Any]) -> list[dict[str, Any]]:
    return [asdict(item) for item in items]


def foreign_part(folder: Path) -> str | None:
    """Names what a folder holds that is not of a sharded model; None if it holds one, of any
    format, and nothing else."""
    try:
        plan = json.loads((folder / "plan.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return "is no sharded model"
    if not isinstance(plan, dict) or not {"format", "model", "mesh", "ranks"} <= plan.keys():
        return "its plan.json was not written by onnxpar"
    for entry in sorted(folder.iterdir()):
        if entry.is_symlink() or not entry.is_file() or not _OWN_FILE.fullmatch(entry.name):
            return f"holds {entry.name!r}, which is no part of a sharded model"
    return None


def write_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    """Writes plan.json to a folder in which all else of a sharded model stands, with the digests of
    it. Errors: OSError."""
    files = digests_of(sorted(f for f in folder.iterdir() if f.name != "plan.json"))
    (folder / "plan.json").write_text(sealed({**plan, "files": files}), encoding="utf-8")
