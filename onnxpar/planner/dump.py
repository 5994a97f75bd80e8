"""Writes the graph after each pass as files (--dump): as text for people, and as a model that `opt`
reads back.

    03-insert-collectives.onnxtxt    a line for each node, with layouts
    03-insert-collectives.onnx       the graph, with the decisions so far in its metadata
    weights.data                     the weights of all dumped models, once

After localize-ops, the graph is that of rank 0, with tables for the other ranks beside it: only the
text shows it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx
import onnx_graphsurgeon as gs
from onnx import numpy_helper

from onnxpar.base.arrays import Array
from onnxpar.base.errors import ModelError, OnnxparError
from onnxpar.base.write_file import new_file, writing
from onnxpar.compiler.graph_text import graph_text, layout_of
from onnxpar.compiler.pass_ import Choices, Pass, PassContext, Request
from onnxpar.cost.cost import Costs
from onnxpar.graph.interchange import declare_types, header_of, import_graph
from onnxpar.graph.lazy_values import StackedValues
from onnxpar.graph.metadata import note_layouts
from onnxpar.graph.reshards import is_reshard, set_reshard
from onnxpar.graph.stored import check_stored, nodes_of, stored_tensors
from onnxpar.graph.subgraphs import all_nodes
from onnxpar.graph.training_spec import Step
from onnxpar.graph.write_model import export_model, goes_apart, move_data, write_model
from onnxpar.layout.mesh import Mesh
from onnxpar.load.load import Model
from onnxpar.load.read_file import read_proto
from onnxpar.planner.observer import Observer
from onnxpar.planner.rewrite_dump import LOADING, RESHARD, RewriteDump, exportable
from onnxpar.planner.typed_json import decode, encode
from onnxpar.sharding.analysis import analyse
from onnxpar.sharding.state import ShardingState

KEY = "onnxpar.dump"
"""Key of the model metadata that hold the decisions so far."""
FORMAT = 3
WEIGHTS = "weights.data"
DUMPED = "[0-9][0-9]-*.onnx"
"""Names of dumped models, as a glob."""
_ASIDE = ".attempts"
"""The folder for files of attempts at a plan other than the latest."""
_TABLES = ("annotations", "layouts", "copies", "facts", "fused")


class Dump(Observer):
    """An observer that writes the graph after each pass to a numbered file in a folder. In the end,
    the folder has the files of the chosen attempt; until then, a hidden folder keeps the files of
    earlier attempts. Errors: OnnxparError if a file cannot be written."""

    takes_time = True
    _rewrites: RewriteDump

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._files: list[Path] = []
        self._attempts: list[Dump] = []
        self._at: dict[str, tuple[int, int]] = {}
        with writing(folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in self.folder.glob(DUMPED):
                if WEIGHTS.encode() in old.read_bytes():
                    old.unlink()  # else it would have the weights of another dump
            (self.folder / WEIGHTS).unlink(missing_ok=True)

    def begin(self) -> Dump:
        attempt = super().begin()
        if self._attempts:
            self._attempts[-1]._move(self.folder, self._aside(len(self._attempts)))
        self._attempts.append(attempt)
        return attempt

    def keep(self, attempt: Dump) -> None:
        number = 1 + next(i for i, other in enumerate(self._attempts) if other is attempt)
        if number < len(self._attempts):
            for file in self._attempts[-1]._files:
                file.unlink()
            attempt._move(self._aside(number), self.folder)
        shutil.rmtree(self.folder / _ASIDE, ignore_errors=True)
        self._attempts = [attempt]

    def _aside(self, number: int) -> Path:
        return self.folder / _ASIDE / str(number)

    def _move(self, source: Path, target: Path) -> None:
        with writing(target):
            target.mkdir(parents=True, exist_ok=True)
            for file in self._files:
                (source / file.name).replace(target / file.name)

    def loading(self, name: str, graph: onnx.ModelProto | gs.Graph) -> None:
        """Writes the model after a rewrite of the loader."""
        if name == "read":
            self._rewrites = RewriteDump(self.folder / LOADING)
        self._rewrites(name, graph)

    def passed(self, step: Pass, model: Model, ctx: PassContext) -> None:
        number = 1 + sum(file.suffix == ".onnxtxt" for file in self._files)
        file = self.folder / f"{number:02d}-{step.name}"
        with self._new_file(f"{file}.onnxtxt") as text:
            text.write_text(graph_text(model.graph, ctx), encoding="utf-8")
        if ctx.lowered.localized or model.sizes is not None:
            return
        proto, stacks = _described(model, ctx)
        with writing(self.folder / WEIGHTS):
            self._move_weights(proto, model.folder, stacks)
        with self._new_file(f"{file}.onnx") as written:
            written.write_bytes(proto.SerializeToString())

    @contextmanager
    def _new_file(self, path: str) -> Iterator[Path]:
        with new_file(path) as written:
            yield written
        self._files = [*self._files, Path(path)]

    def _move_weights(
        self, proto: onnx.ModelProto, source: Path, stacks: Mapping[str, StackedValues]
    ) -> None:
        """Moves large weights of a model to the file that all dumps share; each weight is read and
        written only once."""
        with (self.folder / WEIGHTS).open("ab") as sink:
            for tensor in stored_tensors(proto.graph):
                key = f"{tensor.name} {tensor.data_type} {list(tensor.dims)}"
                place = self._at.get(key)
                if tensor.name in stacks and place is None:
                    values = stacks[tensor.name].load()
                    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
                if not goes_apart(tensor):
                    continue
                self._at[key] = move_data(tensor, source, sink, WEIGHTS, place)


def write_graph(model: Model, ctx: PassContext, output: Path) -> None:
    """Writes the graph as a model, with the decisions so far in its metadata. Errors: OnnxparError
    if the graph is that of a rank already, or if the file cannot be written."""
    if ctx.lowered.localized:
        raise OnnxparError(
            f"{output}: after localize-ops each rank has a graph of its own; `onnxpar shard` "
            "writes them"
        )
    proto, stacks = _described(model, ctx)

    def values(name: str) -> Array | None:
        return stacks[name].load() if name in stacks else None

    write_model(proto, model.folder, output, values)


def is_dump(path: Path) -> bool:
    """True if a file is a dump: text, or a model with decisions in its metadata."""
    if path.suffix == ".onnxtxt":
        return True
    return path.is_file() and _state_of(read_proto(path)) is not None


def read_dump(path: Path) -> tuple[Model, PassContext]:
    """Returns the model and the decisions of a dump; for a dumped text, reads the .onnx file beside
    it. Errors: ModelError."""
    file = path.with_suffix(".onnx")
    if path.suffix == ".onnxtxt" and not file.is_file():
        raise ModelError(
            f"{path}: opt reads the model of a dump, not its text, and {file.name} is missing. "
            "--dump writes no model after localize-ops: give an earlier dump, or the model "
            "itself. It writes none for a model with open sizes: dump again with --dim NAME=N for "
            "each size"
        )
    proto = read_proto(file)
    state = _state_of(proto)
    if state is None or state.get("format") != FORMAT:
        raise ModelError(
            f"{file} was not written by --dump of this version of onnxpar; write it again"
        )
    try:
        return _restored(file, proto, state)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ModelError(
            f"{file} is damaged ({type(error).__name__}: {error}); write it again with --dump"
        ) from None


def _state_of(proto: onnx.ModelProto) -> dict[str, Any] | None:
    text = next((e.value for e in proto.metadata_props if e.key == KEY), None)
    try:
        state = json.loads(text) if text is not None else None
    except ValueError:
        state = {}
    return state if state is None or isinstance(state, dict) else {}


def _described(model: Model, ctx: PassContext) -> tuple[onnx.ModelProto, dict[str, StackedValues]]:
    """Returns the graph as a model with the decisions so far in its metadata; and by name, the
    values of stacked weights, which the model does not have."""
    stacks: dict[str, StackedValues] = {}
    with exportable(model.graph) as graph:
        proto = export_model(graph, model.header, stacks)
        declare_types(graph, proto.graph)
    sharding = ctx.sharding
    if not ctx.facts:
        return proto, stacks
    _note_layouts(proto.graph, ctx)
    state = {
        "mesh": encode(sharding.mesh),
        "topology": encode(sharding.costs.topology),
        "tensors": encode(sharding.tensors),
        "ops": encode(sharding.ops),
        "pinned": encode(sharding.pinned),
        "parts": encode(sharding.parts),
        "choices": encode(vars(ctx.choices)),
        **{name: encode(getattr(ctx, name)) for name in _TABLES},
        "states": model.states,
        "fixed": model.fixed,
        "stored": sorted(model.stored),
        "preset": ctx.request.preset,
        "step": asdict(model.step) if model.step is not None else None,
        "format": FORMAT,
    }
    proto.metadata_props.add(key=KEY, value=json.dumps(state))
    return proto, stacks


def _note_layouts(graph: onnx.GraphProto, ctx: PassContext) -> None:
    """Adds the layouts of tensors that are split to the metadata of their nodes, for people."""
    nodes = list(nodes_of(graph))
    names = {name for node in nodes for name in (*node.input, *node.output)}
    known = {name: layout_of(name, ctx) for name in names}
    split = {n: x.text(ctx.sharding.mesh) for n, x in known.items() if x and not x.is_whole}
    for node in nodes:
        note_layouts(node, split)


def _restored(
    file: Path, proto: onnx.ModelProto, state: Mapping[str, Any]
) -> tuple[Model, PassContext]:
    """Returns the model and the context that a dumped model holds; `state` is the decoded
    metadata."""
    for tensor in stored_tensors(proto.graph):
        check_stored(tensor, file)
    metadata = [e for e in proto.metadata_props if e.key != KEY]
    header = header_of(proto)
    del header.metadata_props[:]
    header.metadata_props.extend(metadata)
    inputs = {port.name for port in proto.graph.input}
    defaults = {t.name: t for t in proto.graph.initializer if t.name in inputs}
    weights = [t for t in proto.graph.initializer if t.name not in inputs]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(weights)
    graph = import_graph(proto, defaults, file.parent)
    states = [(source, result) for source, result in state["states"]]
    written = [n for n in all_nodes(graph) if is_reshard(n)]
    texts = [node.attrs[RESHARD] for node in written]
    pairs = [(a.name, b.name) for n in written for a, b in zip(n.inputs, n.outputs, strict=True)]
    factors = analyse(graph, [*states, *pairs])
    factors.ops = [op for op in factors.ops if not any(op.node is node for node in written)]
    for node, text in zip(written, texts, strict=True):
        set_reshard(node, decode(json.loads(text), factors))
    step = Step.from_json(state["step"]) if state["step"] is not None else None
    model = Model(file, graph, states, header, state["fixed"], set(state["stored"]), step=step)
    mesh: Mesh = decode(state["mesh"], factors)
    ops = decode(state["ops"], factors)
    _check_leaves({op.node.name: len(op.leaves) for op in factors.ops}, ops, file)
    sharding = ShardingState(
        mesh,
        factors,
        Costs(decode(state["topology"], factors), mesh),
        decode(state["tensors"], factors),
        ops,
        decode(state["pinned"], factors),
        decode(state["parts"], factors),
    )
    tables = {name: decode(state[name], factors) for name in _TABLES}
    choices = Choices(**decode(state["choices"], factors))
    return model, PassContext(
        model,
        sharding,
        Request(preset=state["preset"]),
        choices=choices,
        **tables,
    )


def _check_leaves(present: Mapping[str, int], dumped: Mapping[str, list[Any]], file: Path) -> None:
    """Raises ModelError unless every node consists of as many factor occurrences as when the dump
    was written (`dumped`), so that its decisions can be applied."""
    for name, count in present.items():
        if name not in dumped or len(dumped[name]) != count:
            raise ModelError(
                f"{file}: the rule of node '{name}' has changed since the dump; write it again"
            )
