"""The plan of a sharded model: what plan.json holds, for people and for the runtime."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from onnxpar.base.bundle_names import ENCODER_PART, PLAN, is_own
from onnxpar.base.digests import Digests, digests_of, sealed
from onnxpar.base.lookup import Lookup
from onnxpar.base.read_bounded import read_bounded
from onnxpar.base.shown import Shown
from onnxpar.graph.cache_sizes import CacheSizes
from onnxpar.graph.training_spec import Step
from onnxpar.layout.layout import Layout
from onnxpar.layout.mesh import Mesh
from onnxpar.layout.symbols import Polynomial
from onnxpar.rules.rule import is_lack
from onnxpar.runtime.session.bundle import FORMAT
from onnxpar.search.proof import Proof
from onnxpar.sharding.mixtures import CompactedMixture
from onnxpar.sharding.planned_collectives import Collective


def open_shape(sizes: Sequence[int]) -> tuple[int | None, ...]:
    """Returns the sizes of a layout as a shape, with None for data-dependent sizes, which layouts
    have as -1."""
    return tuple(None if size < 0 else size for size in sizes)


@dataclass(frozen=True)
class OpenPort:
    """Shape and layout of an input or output whose sizes are open.

    shape   an open size is text (`past + 1`), a data-dependent one None
    layout  the JSON of the layout, with -1 for data-dependent sizes; None for strings
    """

    shape: list[int | str | None]
    layout: dict[str, Any] | None


@dataclass(frozen=True)
class Port:
    """An input or output of the model: its global shape and its layout.

    dtype        NumPy's name; None for sequences and optionals, which only `type` describes
    shape        None in it stands for a data-dependent size, which `layout` has as -1
    type         onnxruntime's text: `tensor(float)`
    has_default  the input need not be fed
    open         shape and layout with open sizes; then `shape` and `layout` are examples
    """

    name: str
    dtype: str | None
    shape: tuple[int | None, ...] | None
    layout: Layout | None
    type: str
    has_default: bool = False
    open: OpenPort | None = None

    def to_json(self, mesh: Mesh) -> dict[str, Any]:
        """Returns the entry of plan.json for this input or output."""
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
    """A weight that ranks store.

    name            in the unsplit model
    tensor          in the graphs of ranks, which have a copy for each layout that nodes need
    layout          as JSON; `layout_text` as onnxpar prints it
    bytes           of the whole weight; `bytes_per_rank` of the largest shard
    stacks          the names in the model file of the weights that the loader stacked to it
    """

    name: str
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    layout: Mapping[str, Any]
    layout_text: str
    bytes: int
    bytes_per_rank: int
    stacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Whole:
    """A node that every rank runs on whole operands, so that ranks gather `bytes` of split operands
    for it."""

    node: str
    op: str
    reason: str
    bytes: int

    @property
    def is_lack(self) -> bool:
        """True if the node stays whole because onnxpar cannot split it (no sharding rule, or split
        operands had to be gathered); False if it stays whole by choice."""
        return self.bytes > 0 or is_lack(self.reason)


@dataclass(frozen=True)
class RankLoad:
    """The memory and work of one rank; in plans whose ranks have different devices.

    weights, states, activations  bytes; of activations, the peak
    flops                         of matrix products and convolutions in a run
    memory                        bytes of its device; None if unknown
    compute                       seconds of a run, without waiting for other ranks
    """

    weights: int
    states: int
    activations: int
    flops: int
    memory: float | None = None
    compute: float = 0.0

    @property
    def held(self) -> int:
        """Bytes of memory that the rank needs in all."""
        return self.weights + self.states + self.activations


@dataclass(frozen=True)
class OnHost:
    """The weights and states (`tensors`) that stay in files, from which nodes read only the rows
    that they need; `bytes_per_rank` is the maximum over ranks."""

    tensors: list[str]
    bytes_per_rank: int


@dataclass(frozen=True)
class Predicted:
    """Seconds of a run by part, as the cost model predicts them.

    compute        the sum over nodes of the time on the rank that is slowest in the node
    communication  the sum over collectives, computed likewise, without what runs beside compute
    one_rank       the time of the unsplit model in onnxruntime with all cores of a host if that is
                   known, else on the fastest rank
    session        the overhead of a run in the session, outside of ranks; 0 if unknown
    on_rank        the time of the unsplit model with the cores of one rank
    is_timed       `one_rank` and `on_rank` were measured on this host, and `compute` is scaled by
                   the ratio of that measurement to its prediction
    """

    compute: float
    communication: float
    one_rank: float
    session: float = 0.0
    on_rank: float = 0.0
    is_timed: bool = False

    @property
    def total(self) -> float:
        """The sum of compute, communication and session."""
        return self.compute + self.communication + self.session

    def timed(self, alone: float, on_rank: float) -> Predicted:
        """Returns the times corrected by measured seconds of the unsplit model: `alone` with all
        cores of the host, `on_rank` with the cores of one rank. `compute` is scaled by measured /
        predicted `on_rank`."""
        longer = on_rank / self.on_rank if self.on_rank else 1.0
        compute = self.compute * longer
        return replace(self, compute=compute, one_rank=alone, on_rank=on_rank, is_timed=True)

    def to_json(self) -> dict[str, float]:
        """Returns the times as in plan.json, with their total."""
        return {"total": self.total, **asdict(self)}


@dataclass(repr=False)
class Plan(Shown):
    """The plan of a sharded model; `to_json` returns the content of plan.json.

    states        pairs (input, output): the input gets the output's value in the next run
    whole         nodes that every rank runs whole
    memory        bytes by kind, such as `weights_per_rank`
    flops         of the whole model, of the rank with most, and the mean over ranks
    ranges        the integers [low, high) that each integer input may hold
    fixed         inputs of the unsplit model whose default values are now constants
    example       a size for every open symbol
    limits        pairs of sizes (a, b): a run must have a <= b
    typical       (sizes, share of runs): `memory`, `flops` and `predicted` are means over these
                  sizes, or the maximum for memory
    is_told       true if the user gave the typical sizes
    caches        relations between sizes that attention kernels demand
    predicted     None for a manual program
    proof         how far the plan can be from the best one; None if there was no search
    loads         the memory and work of each rank, if the devices of ranks differ
    initial       where the first value of each state comes from, by input name: STORED with the
                  model, or ZERO
    in_place      the states that runs change in their own memory, by input name
    on_host       the weights and states that stay in files; None if there are none
    row_outputs   as in LoweredState
    step          the roles (loss, rate, ...) of inputs and outputs, if the model is a training step
    lookups       inputs whose elements index a table, with the bounds to check
    fused         (number before, number after) fuse-all-reduces of collectives, by kind
    mixtures      as in LoweredState
    notes         sentences that the user should read
    costs         where the cost model's speeds come from, in words
    unpaired      inputs that look like states, but to which no output is fed back
    streams       number of streams: collectives of different streams run at once
    request       the options with which a training step was sharded (`options`), and the digest of
                  its model (`sha256`); None for other models
    explained     how the plan came about, for an HTML page; None unless requested
    hidden        seconds of communication that run beside compute, and that `predicted` leaves out
    samples       the sizes at which the compiler made or checked its decisions, if sizes are open
    sent_at_runs  bytes that a rank sends in each collective, by name, at the sizes of recorded
                  runs; empty unless requested
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
    limits: Sequence[tuple[Polynomial, Polynomial]] = ()
    initial: Mapping[str, str] = field(default_factory=dict)
    in_place: Collection[str] = ()
    on_host: OnHost | None = None
    row_outputs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    step: Step | None = None
    lookups: Sequence[Lookup] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    fused: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    mixtures: Sequence[CompactedMixture] = ()
    notes: list[str] = field(default_factory=list)
    predicted: Predicted | None = None
    proof: Proof | None = None
    loads: Sequence[RankLoad] = ()
    typical: Sequence[tuple[Mapping[str, int], float]] = ()
    is_told: bool = False
    caches: Sequence[CacheSizes] = ()
    unpaired: Sequence[str] = ()
    request: Mapping[str, Any] | None = None
    explained: Any = field(default=None, compare=False)
    costs: str = ""
    streams: int = 1
    hidden: float = field(default=0.0, compare=False)
    samples: Sequence[Mapping[str, int]] = field(default=(), compare=False)
    sent_at_runs: Mapping[str, int] = field(default_factory=dict, compare=False)

    @property
    def held(self) -> int:
        """Bytes of memory that a rank needs; if devices differ, of the rank that needs most."""
        return max([load.held for load in self.loads] or [sum(self.memory.values())])

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
            "states": [self._state(*pair) for pair in self.states],
            "on_host": None if self.on_host is None else asdict(self.on_host),
            "unpaired": list(self.unpaired),
            "step": None if self.step is None else asdict(self.step),
            "request": None if self.request is None else dict(self.request),
            "fixed": list(self.fixed),
            "lengths": [],
            "example": dict(self.example),
            "limits": [[str(least), str(most)] for least, most in self.limits],
            "ranges": {name: list(r) for name, r in self.ranges.items()},
            "lookups": _dicts(self.lookups),
            "collectives": _dicts(self.collectives),
            "streams": self.streams,
            "fused": {kind: list(counts) for kind, counts in self.fused.items()},
            "mixtures": [mixture.to_json() for mixture in self.mixtures],
            "weights": _dicts(self.weights),
            "whole": _dicts(self.whole),
            "memory": dict(self.memory),
            "flops": dict(self.flops),
            "metadata": dict(self.metadata),
            "predicted": None if self.predicted is None else self.predicted.to_json(),
            "proof": None if self.proof is None else self.proof.to_json(),
            "costs": self.costs,
            "loads": list(_grouped(self.loads)),
            "typical": [{"sizes": dict(s), "weight": weight} for s, weight in self.typical],
            "typical_given": self.is_told,
            "notes": list(self.notes),
        }

    def _state(self, source: str, result: str) -> dict[str, Any]:
        rows = self.row_outputs.get(source)
        entry: dict[str, Any] = {
            "input": source,
            "output": result,
            "initial": self.initial.get(source),
        }
        if source in self.in_place:
            entry["in_place"] = True
        return entry if rows is None else {**entry, "rows": list(rows)}

    def text(self) -> str:
        """The content of plan.json as text."""
        return json.dumps(self.to_json(), indent=1)


@dataclass(frozen=True, repr=False)
class SavedPlan(Shown):
    """A plan that was read back from the plan.json of a sharded model; `data` is the parsed
    JSON."""

    data: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"<SavedPlan of {self.data['model']} over {self.data['ranks']} ranks>"

    def to_json(self) -> dict[str, Any]:
        """The object of plan.json."""
        return dict(self.data)


def _grouped(loads: Sequence[RankLoad]) -> Iterator[dict[str, Any]]:
    """Yields the loads of ranks as JSON, with neighbouring ranks of equal load in one entry:
    `{"ranks": [0, 3], ...}` is for ranks 0 to 3."""
    first = 0
    for load, same in groupby(loads):
        count = len(list(same))
        yield {"ranks": [first, first + count - 1], **asdict(load)}
        first += count


def _dicts(items: Sequence[Any]) -> list[dict[str, Any]]:
    return [asdict(item) for item in items]


def foreign_part(folder: Path) -> str | None:
    """Returns why a folder is not only a sharded model: a text that names a foreign file in it.
    None if it is one, of any version of the format, perhaps with the folder of its encoder, so that
    it may be replaced."""
    try:
        plan = json.loads(read_bounded(folder / PLAN))
    except (OSError, ValueError, RecursionError):
        return "is not a sharded model"
    if not isinstance(plan, dict) or not {"format", "model", "mesh", "ranks"} <= plan.keys():
        return "its plan.json was not written by onnxpar"
    for entry in sorted(folder.iterdir()):
        if entry.name == ENCODER_PART and entry.is_dir() and not entry.is_symlink():
            odd = foreign_part(entry)
            if odd is not None:
                return f"its folder {entry.name!r} {odd}"
            continue
        if entry.is_symlink() or not entry.is_file() or not is_own(entry.name):
            return f"contains {entry.name!r}, which is not part of a sharded model"
    return None


def write_plan(
    folder: Path, plan: Mapping[str, Any], files: Mapping[str, Digests] | None = None
) -> None:
    """Writes plan.json into the folder of a sharded model, with the digests of the other files:
    `files`, or by default the digests of all files in the folder. Errors: OSError."""
    if files is None:
        files = digests_of(sorted(f for f in folder.iterdir() if f.is_file() and f.name != PLAN))
    (folder / PLAN).write_text(sealed({**plan, "files": files}), encoding="utf-8")
