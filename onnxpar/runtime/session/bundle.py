"""A sharded model, the folder `model.par`, as the runtime reads it: mesh, inputs and outputs, and
states."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.base.bundle_names import ENCODER_PART, PLAN, rank_name, suffix_of
from onnxpar.base.digests import check_listed, check_seal
from onnxpar.base.errors import InputError, ModelError
from onnxpar.base.lookup import Lookup
from onnxpar.base.read_bounded import read_bounded
from onnxpar.base.unreadable import cannot_read, missing
from onnxpar.graph.training_spec import Step
from onnxpar.layout.layout import Layout
from onnxpar.layout.mesh import Mesh
from onnxpar.layout.symbols import Polynomial
from onnxpar.runtime.session.bundle_files import WRITE_AGAIN, BundleFiles
from onnxpar.runtime.session.tensors import ELEMENTS, tensor_type
from onnxpar.runtime.session.values import is_value

FORMAT = 4
"""The only format of plan.json that this runtime reads."""

Shape = tuple[int | Polynomial | None, ...]
"""The global sizes of a tensor. An open size, known only in a run, is a polynomial of the model's
symbols (`2*batch + 1`); a data-dependent size is None."""
Sizes = tuple[int, ...]
"""The values of the model's symbols in a run, in the order of `Bundle.symbols`."""


@dataclass(frozen=True)
class NodeArg:
    """A graph input or output, like `onnxruntime.NodeArg`; `shape` is the global one."""

    name: str
    type: str
    shape: list[int | str | None]


@dataclass(frozen=True)
class Port:
    """A graph input or output.

    name         its name
    dtype        the dtype of a tensor; object for strings
    shape        global sizes; None if the number of dimensions is data-dependent
    layout       how it is split, with -1 for data-dependent sizes; None if the number of dimensions
                 is data-dependent, or if sizes are open
    type         the type as onnxruntime writes it, such as `tensor(float)`
    has_default  True for an input that need not be fed
    open_layout  if sizes are open, the JSON of the layout with polynomials; -1 for an open size
                 that may differ from the sizes of other inputs
    """

    name: str
    dtype: np.dtype[Any]
    shape: Shape | None
    layout: Layout | None
    type: str = ""
    has_default: bool = False
    open_layout: Mapping[str, Any] | None = None

    @property
    def is_value(self) -> bool:
        """True for anything but a tensor of numbers: strings, sequences, maps, optionals."""
        return bool(self.type) and is_value(self.type)

    def is_free(self, axis: int) -> bool:
        """True if the size of a dimension is open and need not agree with the sizes of other
        inputs."""
        if self.open_layout is None:
            return False
        return bool(self.open_layout["dims"][axis].get("size") == -1)

    @property
    def arg(self) -> NodeArg:
        """The port as `onnxruntime.NodeArg` describes it."""
        shape = [str(s) if isinstance(s, Polynomial) else s for s in self.shape or ()]
        return NodeArg(self.name, self.type or tensor_type(self.dtype), shape)

    @property
    def symbols(self) -> frozenset[str]:
        """The names of the open sizes that occur in the shape."""
        return frozenset(
            v for s in self.shape or () if isinstance(s, Polynomial) for v in s.variables
        )

    def layout_at(self, sizes: Mapping[str, int]) -> Layout | None:
        """Returns the layout for these values of the symbols (open sizes); None if the number of
        dimensions is data-dependent."""
        if self.open_layout is None:
            return self.layout
        return Layout.from_json(_resolved(self.open_layout, sizes))

    def shape_at(self, sizes: Mapping[str, int]) -> tuple[int | None, ...]:
        """Returns the global shape for these values of the symbols (open sizes); a data-dependent
        size is None."""
        shape = self.shape or ()
        return tuple(s.at(sizes) if isinstance(s, Polynomial) else s for s in shape)

    def expects(self) -> str:
        """Returns dtype and shape as text for errors: `float32 [8, 16]`, with `?` for
        data-dependent sizes."""
        if self.is_value:
            return self.type
        if self.shape is None:
            return f"{self.dtype.name} of any shape"
        return f"{self.dtype.name} [{', '.join('?' if s is None else str(s) for s in self.shape)}]"

    def admits(self, shape: tuple[int, ...]) -> bool:
        """True if an array of this shape can be fed: open and data-dependent sizes may be any."""
        if self.shape is None:
            return True
        return len(shape) == len(self.shape) and all(
            not isinstance(own, int) or own == given
            for own, given in zip(self.shape, shape, strict=True)
        )


@dataclass(frozen=True)
class Bundle:
    """A sharded model: the contents of a folder `model.par`.

    mesh             the mesh of ranks
    inputs, outputs  the ports, by name
    states           the state pairs: {input: the output that is its value in the next run}
    fixed            inputs of the unsplit model whose default values are now constants
    symbols          names of the open sizes
    limits           pairs of sizes; in a run, the first must not be greater than the second
    initial          {input of a state: kind of its initial value, "stored" or "zero"}
    in_place         the states that runs change in their own memory, by input
    row_outputs      for each state that is a table on the host, by input: the outputs of a rank's
                     graph with the indices and the values of changed rows
    step             the roles of ports, if the model is a training step
    lookups          inputs that are indices
    programs         of a step for samples of several lengths: {values of the open sizes: the
                     program for them}, the shortest first; else empty, and one program takes all
                     sizes
    """

    path: Path
    mesh: Mesh
    inputs: Mapping[str, Port]
    outputs: Mapping[str, Port]
    states: Mapping[str, str]
    fixed: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()
    limits: tuple[tuple[Polynomial, Polynomial], ...] = ()
    initial: Mapping[str, str] = field(default_factory=dict)
    in_place: frozenset[str] = frozenset()
    row_outputs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    step: Step | None = None
    lookups: tuple[Lookup, ...] = ()
    programs: Mapping[Sizes, str] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """All of plan.json."""

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Bundle:
        """Reads the `plan.json` in the folder. Errors: ModelError, naming the file and the
        fault."""
        return Bundle.of(Path(path), read_plan(Path(path)))

    @staticmethod
    def of(folder: Path, text: bytes) -> Bundle:
        """Returns the sharded model in a folder whose plan.json has this text. Errors: ModelError,
        naming the file and the fault."""
        plan = _parsed(folder / PLAN, text)
        try:
            mesh = Mesh.of((name, size) for name, size in plan["mesh"])
            inputs, outputs = (
                {p["name"]: _port(p) for p in plan[key]} for key in ("inputs", "outputs")
            )
            pairs = plan.get("states", [])
            states = {pair["input"]: pair["output"] for pair in pairs}
            initial = {p["input"]: p["initial"] for p in pairs if p.get("initial")}
            in_place = frozenset(p["input"] for p in pairs if p.get("in_place"))
            rows = {p["input"]: (p["rows"][0], p["rows"][1]) for p in pairs if p.get("rows")}
            lookups = tuple(Lookup(**entry) for entry in plan.get("lookups", ()))
            step = Step.from_json(plan["step"]) if plan.get("step") else None
            fixed, symbols = (tuple(plan.get(key, ())) for key in ("fixed", "example"))
            limits = tuple(
                (Polynomial.parse(least), Polynomial.parse(most))
                for least, most in plan.get("limits", ())
            )
            programs = {tuple(e["sizes"]): str(e["program"]) for e in plan.get("lengths", ())}
            if any(len(sizes) != len(symbols) for sizes in programs):
                raise ValueError(f"{symbols} have the sizes {[*programs]}")
            examples = [plan["example"][symbol] for symbol in symbols]
            if not all(isinstance(size, int) and size >= 0 for size in examples):
                raise ValueError(f"example sizes are {plan['example']}")
            for port in (*inputs.values(), *outputs.values()):
                layout = port.layout_at(dict.fromkeys(symbols, 1))
                if layout is not None:
                    layout.check_axes(mesh)
            check_listed(plan["files"])
            unknown = (states.keys() - inputs.keys()) | (set(states.values()) - outputs.keys())
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(
                f"{folder / 'plan.json'} is damaged: {type(error).__name__}: {error}; "
                "write the folder again with `onnxpar shard`"
            ) from error
        if unknown:
            raise ModelError(
                f"{folder / 'plan.json'} is damaged: its state pairs name {sorted(unknown)[0]!r}, "
                "which is neither an input nor an output; write the folder again with `onnxpar "
                "shard`"
            )
        _check_together(inputs, outputs)
        fields = (fixed, symbols, limits, initial, in_place, rows, step, lookups, programs, plan)
        return Bundle(folder, mesh, inputs, outputs, states, *fields)

    def sizes(self, shapes: Mapping[str, tuple[int, ...]], kept: Collection[str] = ()) -> Sizes:
        """Returns the values of the symbols that follow from the shapes of inputs, by name; 0 for a
        symbol that occurs in none of them. `kept` names the inputs whose values are states of an
        earlier run.

        Errors: InputError if two shapes contradict each other, naming both.
        """
        values: dict[str, int] = {}
        origin: dict[str, str] = {}
        every = [
            (
                f"input {name!r}{_KEPT if name in kept else ''} has {size} at dimension {axis}",
                own,
                size,
                self.inputs[name].is_free(axis),
            )
            for name, shape in shapes.items()
            for axis, (own, size) in enumerate(
                zip(
                    self.inputs[name].shape or (), shape, strict=self.inputs[name].shape is not None
                )
            )
            if isinstance(own, Polynomial)
        ]
        every.sort(key=lambda entry: (entry[3], len(entry[1].terms)))
        tied = [entry[:3] for entry in every if not entry[3]]
        for text, own, size, _ in every:
            unknown = [v for v in own.variables if v not in values]
            if len(unknown) == 1:
                value = own.solve(unknown[0], values, size)
                if value is not None:
                    values[unknown[0]] = value
                    origin[unknown[0]] = text
        for text, own, size in tied:
            if any(v not in values for v in own.variables) or own.at(values) != size:
                others = [origin[v] for v in own.variables if v in origin]
                remedy = (
                    "give sizes that agree: dimensions are equal if they have one name in the "
                    "model, or if an op of the model combines them"
                )
                if any(_KEPT in each for each in (text, *others)):
                    remedy = "feed the kept input, too, or call session.states.reset() first"
                told = [f"{text}, which is {own} in the model", *others, remedy]
                raise InputError("; ".join(told))
        for least, most in self.limits:
            symbols = dict.fromkeys(least.variables + most.variables)
            if values.keys() >= symbols.keys() and least.at(values) > most.at(values):
                at = [f"{s}={values[s]}" for s in symbols]
                raise InputError(
                    f"this sharded model needs {least} <= {most}, and the run has {', '.join(at)}; "
                    f"to run it there, shard the model with --dim {' --dim '.join(at)}"
                )
        return tuple(values.get(s, 0) for s in self.symbols)

    def check_program(self, sizes: Sizes) -> None:
        """Raises an InputError if the model has no program for these sizes of a run."""
        if self.programs and sizes not in self.programs:
            have = ", ".join(" and ".join(map(str, each)) for each in self.programs)
            text = " and ".join(map(str, sizes))
            raise InputError(
                f"this step takes samples of the lengths {have}, and these have {text}; fill them "
                "up to the next one"
            )

    @property
    def digest(self) -> str:
        """A digest of plan.json and of all files that plan.json lists: equal for equal models."""
        return str(self.data.get("sha256", ""))

    @property
    def files(self) -> BundleFiles:
        """The files of the folder, with the ranks that read them and their digests."""
        return BundleFiles(self.path, self.data.get("files", {}), self.mesh.size)

    @property
    def input_specs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """(name, type, shape) of each input that must be fed, as plan.json has them."""
        return [
            (p["name"], p["dtype"] or p["type"], tuple(p["shape"] or ()))
            for p in self.data["inputs"]
            if not p.get("default")
        ]

    @property
    def apart(self) -> frozenset[str]:
        """The outputs that only the evaluation program of a training step computes."""
        return frozenset(self.step.evaluation if self.step else ())

    @property
    def streams(self) -> int:
        """How many collectives may run at the same time, each in a stream of its own."""
        return int(self.data.get("streams", 1))

    @property
    def not_evaluated(self) -> frozenset[str]:
        """The inputs of a training step that its evaluation program does not read."""
        return frozenset(self.inputs.keys() - set(self.step.data) if self.step else ())

    def rank_file(self, rank: int, *programs: str) -> Path:
        """Returns the ONNX file of a rank: its main program or, named by `programs`, the program
        for some length of samples, its evaluation, or both. Errors: ModelError if the file is
        missing."""
        return self.files.path(rank_name(rank, suffix_of(*programs)))

    def states_file(self, rank: int) -> Path:
        """Returns the file with the initial values of a rank's states. Errors: ModelError if the
        file is missing."""
        return self.files.path(rank_name(rank, "states.onnx"))


def with_encoder(bundle: Bundle) -> list[Bundle]:
    """Returns [a sharded model]; for an encoder-decoder, also the sharded model of the encoder,
    which lies in the folder of the first. Errors: ModelError if that folder is damaged."""
    encoder = bundle.path / ENCODER_PART
    return [bundle, *([Bundle.load(encoder)] if (encoder / PLAN).is_file() else [])]


_KEPT = ", the state kept from an earlier run,"


def read_plan(folder: Path) -> bytes:
    """Returns the text of a sharded model's plan.json. Errors: ModelError if there is none."""
    if folder.is_file():
        raise ModelError(
            f"{folder} is one file, not a sharded model; `onnxpar shard {folder} --devices N` "
            "writes the folder to give here"
        )
    if not folder.exists():
        raise ModelError(missing(folder, "folder", "`onnxpar shard` writes it"))
    file = folder / PLAN
    if not file.is_file():
        raise ModelError(
            f"{folder} is not a sharded model: it has no plan.json; `onnxpar shard {folder} "
            "--devices N` writes one, if this is the folder of a language model"
        )
    try:
        return read_bounded(file)
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}; {WRITE_AGAIN}") from error
    except OSError as error:
        raise ModelError(cannot_read(file, error)) from error


def _parsed(file: Path, text: bytes) -> dict[str, Any]:
    """Returns the object in the text of plan.json. Errors: ModelError if it has changed since it
    was written, or has another format."""
    try:
        plan = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not JSON: {error}; {WRITE_AGAIN}") from error
    if not isinstance(plan, dict) or plan.get("format") != FORMAT:
        version = plan.get("format") if isinstance(plan, dict) else None
        raise ModelError(
            f"{file} has format {version!r}, but this onnxpar reads {FORMAT}; shard the model again"
        )
    check_seal(file, text, WRITE_AGAIN)
    return plan


def _check_together(inputs: Mapping[str, Port], outputs: Mapping[str, Port]) -> None:
    """Raises a ModelError if a model has both a port that is no tensor of numbers and an output
    whose dtype NumPy lacks. The former needs a run without a binding, in which onnxruntime's Python
    API cannot return such a dtype."""
    if any(port.is_value for port in (*inputs.values(), *outputs.values())):
        for port in outputs.values():
            if port.dtype.isbuiltin != 1:
                raise ModelError(
                    f"output {port.name!r} is {port.dtype.name}, which onnxruntime's Python does "
                    "not return beside strings, sequences, maps or optionals; cast it to float"
                )


def _port(data: Mapping[str, Any]) -> Port:
    """Returns a port from its entry in plan.json. Errors: ModelError; also KeyError, TypeError or
    ValueError for a damaged entry."""
    name, shape = data["name"], data.get("shape")
    type_ = data.get("type", "")
    if not isinstance(name, str) or not isinstance(type_, str):
        raise TypeError(f"an input or output has the name {name!r} and the type {type_!r}")
    dtype = "object" if type_ and is_value(type_) else data["dtype"]
    if dtype not in ELEMENTS and dtype != "object":
        raise ModelError(f"{name!r}: {dtype} tensors are not supported; use one of {[*ELEMENTS]}")
    sizes = (
        None
        if shape is None
        else tuple(Polynomial.parse(s) if isinstance(s, str) else s for s in shape)
    )
    is_open = any(isinstance(s, Polynomial) for s in sizes or ())
    tree = data.get("layout")
    layout = None if tree is None or is_open else Layout.from_json(tree)
    if layout is not None and layout.shape != tuple(-1 if s is None else s for s in sizes or ()):
        raise ModelError(f"{name!r}: its shape {shape} is not that of its layout, {layout.shape}")
    has_default = data.get("default", False)
    opened = _opened(tree) if is_open else None
    if opened is not None and len(opened["dims"]) != len(sizes or ()):
        raise ModelError(
            f"{name!r}: its layout has {len(opened['dims'])} dimensions, but its shape is {shape}"
        )
    return Port(name, np.dtype(dtype), sizes, layout, type_, has_default, opened)


def _opened(tree: Any) -> Any:
    """Returns the JSON of a layout with its open sizes as polynomials. They are parsed only once,
    because CPython's parser sometimes fails if several threads use it (3.11: "recursion depth
    mismatch")."""
    if isinstance(tree, list):
        return [_opened(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    out = {key: _opened(value) for key, value in tree.items()}
    if isinstance(out.get("size"), str):
        out["size"] = Polynomial.parse(out["size"])
    return out


def _resolved(tree: Any, sizes: Mapping[str, int]) -> Any:
    """Returns the JSON of a layout with numbers in place of its polynomials, for these values of
    symbols."""
    if isinstance(tree, Polynomial):
        return tree.at(sizes)
    if isinstance(tree, list):
        return [_resolved(item, sizes) for item in tree]
    if isinstance(tree, dict):
        return {key: _resolved(value, sizes) for key, value in tree.items()}
    return tree
