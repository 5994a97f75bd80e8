"""Loads a model: checked, functions inlined, every shape known, weights left where they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnx_graphsurgeon as gs
from google.protobuf import json_format, text_format
from google.protobuf.message import DecodeError
from onnx import TensorProto
from onnx import parser as onnx_text

from onnxpar.base.errors import ModelError
from onnxpar.base.names import Names
from onnxpar.base.unreadable import cannot_read
from onnxpar.graph.annotations import Configuration, read_annotations
from onnxpar.graph.checker import MIN_IR, blaming, check_bound, check_references, check_standard
from onnxpar.graph.exported import exported_kinds, torch_names
from onnxpar.graph.inference import infer
from onnxpar.graph.input_sizes import bind_dims, fix_shapes
from onnxpar.graph.interchange import default_of, header_of, import_graph, reopen
from onnxpar.graph.open_sizes import OpenSizes, infer_open
from onnxpar.graph.state_pairs import find_states, given_states
from onnxpar.graph.stored import (
    check_attributes,
    check_bodies,
    check_constants,
    check_sparse,
    check_stored,
    check_text,
    densify,
    is_folded,
    lift_constants,
    sparse_tensors,
    stored_tensors,
)
from onnxpar.graph.subgraphs import all_nodes
from onnxpar.graph.tensors import Whole
from onnxpar.graph.training_spec import Step
from onnxpar.graph.typical import Typical, check_closed
from onnxpar.graph.used_names import check_names, names_in, names_of
from onnxpar.load.bodies_for_training import add_bodies
from onnxpar.load.embedding_bags import add_up_bags
from onnxpar.load.encoder_decoder import ENCODER, drop_decoder, read_part
from onnxpar.load.functions import inlined
from onnxpar.load.fused_units import separate_dequantized
from onnxpar.load.kept_bounds import keep_bounds
from onnxpar.load.kept_dropouts import keep_dropouts
from onnxpar.load.kept_ranges import keep_ranges
from onnxpar.load.listed_tensors import read_listed
from onnxpar.load.module_names import ModuleNames, use_module_names
from onnxpar.load.name_nodes import name_nodes
from onnxpar.load.next_step import next_outputs
from onnxpar.load.page_caches import page_caches
from onnxpar.load.scan_axes import scan_first_axes
from onnxpar.load.sequences import split_sequences
from onnxpar.load.spell_out import spell_out
from onnxpar.load.stack_experts import stack_experts
from onnxpar.load.stored_model import StoredModel
from onnxpar.load.tie import tie
from onnxpar.load.tolerated import restate, restate_flags, scalar_bounds
from onnxpar.load.unfuse import FusedNode, unfuse
from onnxpar.load.untie import shared_vectors, untie
from onnxpar.load.upgrade import upgrade

_COUNTS = (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL)
"""Dtypes from which shapes are computed."""

_NO_MODEL = (DecodeError, json_format.ParseError, text_format.ParseError, onnx_text.ParseError)
"""What onnx raises for a file that is none, by its format: binary, or a text, by its name."""

Show = Callable[[str, onnx.ModelProto | gs.Graph], None]
"""Called after each rewrite of the loader, with its name and the model or graph that it leaves."""


def unseen(name: str, graph: onnx.ModelProto | gs.Graph) -> None:
    """A `Show` that does nothing."""


InferTypes = Callable[[onnx.ModelProto, Collection[str]], None]
"""Declares the types of a model in place, given the names of inputs with default values."""


@dataclass
class Model:
    """A loaded model. `graph` is complete: static shapes, unique node names, lazy weights.

    header    the model's metadata
    fixed     inputs with a default value that are constants here, since it may decide shapes
    stored    names of the initializers of the file
    step      the ports of a training step; None for other models
    whole     nodes, and factors of them, that must not be split since sizes are open
    growing   dimensions of states, by input and axis, that have other sizes after a run at some
              open sizes
    exported  kinds that torch.export gave to tensors, by name
    on_host   weights and states that stay in files, as tables of which each run reads some rows,
              and the results that replace these states
    called    what tensors are called in torch, and in the file
    shared    numbers of nodes that read a vector as their scale or bias, if several do
    fused     fused nodes of the file, which `graph` has taken apart
    original  the model before these rewrites; None if passes may change what the graph computes
    names     the names in the graph before passes
    anew      imports the graph again, as it was before passes; None for a dump
    """

    path: Path
    graph: gs.Graph
    states: list[tuple[str, str]]
    header: onnx.ModelProto
    fixed: list[str]
    stored: set[str]
    annotations: tuple[Configuration, ...] = ()
    sizes: OpenSizes | None = None
    step: Step | None = None
    whole: Whole = field(default_factory=dict)
    growing: set[tuple[str, int]] = field(default_factory=set)
    exported: Mapping[str, str] = field(default_factory=dict)
    called: ModuleNames = field(default_factory=ModuleNames)
    shared: Mapping[str, int] = field(default_factory=dict)
    on_host: Sequence[str] = ()
    fused: Sequence[FusedNode] = ()
    original: StoredModel | None = None
    names: Names = field(default_factory=Names)
    anew: Callable[[], gs.Graph] | None = None

    def apart(self) -> Model:
        """Returns the model with the same graph, and with tables of its own."""
        return replace(self, whole={**self.whole}, growing={*self.growing})

    def fresh(self) -> Model:
        """Returns the model with a graph of its own, as it was before passes."""
        assert self.anew is not None
        return replace(self.apart(), graph=self.anew())

    def file_name(self, tensor: str) -> str:
        """Returns the name in the file of a tensor that the loader may have given another one."""
        return self.called.in_file.get(tensor, tensor)

    @property
    def folder(self) -> Path:
        """The folder of external data."""
        return self.path.parent


def load(
    path: str | Path,
    dims: Mapping[str, int | str] | None = None,
    states: Iterable[tuple[str, str]] = (),
    least: int = 2,
    own_types: Callable[[Step | None], InferTypes | None] = lambda step: None,
    for_training: bool = False,
    untied: bool = False,
    typical: Typical | None = None,
    find_others: bool = True,
    shapes: Mapping[str, Sequence[int]] | None = None,
    show: Show = unseen,
    remainders: int = 0,
    page_size: int = 0,
    kv_dtype: str | None = None,
    part: str | None = None,
) -> Model:
    """Reads a model and makes it ready for passes.

    dims    sizes of symbolic dimensions, by symbol; the others stay open
    states  (input, output) pairs that are fed back, in addition to those that `find_states` finds
    least   smallest size at which open dimensions are sampled
    own_types  for the training step that the model is (or None), the function that declares types
        if the model is a program per rank
    for_training  keeps every weight as it is stored
    untied  gives each node that reads a vector as its scale or bias a copy of its own
    typical  sizes at which costs of models with open sizes are computed
    find_others  also looks for states that are not given
    shapes  shapes of inputs, by name, in place of open sizes
    show  called with the name of each rewrite and what it leaves, for dumps
    remainders  sizes are sampled with every remainder modulo this number
    page_size  tokens of a page, in which the caches of a decoder are put; 0: they stay as they are
    kv_dtype   the type of the caches in pages; None: that of the model
    part       the part of an encoder-decoder to make of its files; None: the model is read as it is

    Errors: ModelError for a file that cannot be used, StrategyError for a size whose symbol the
    model does not have.
    """
    # Long, so that the order of all rewrites and checks is in one place.
    path = Path(path)
    proto = read_proto(path)
    if part is not None:
        proto, pairs = read_part(proto, part, path)
        states = [*states, *pairs]
    check_text(proto, path)
    annotations = read_annotations(proto)
    least = max([least, *(c.devices for c in annotations)])
    show("read", proto)
    restate(proto)
    show("restate-tolerated", proto)
    header, exported = header_of(proto), exported_kinds(proto.graph)
    if untied:
        untie(proto.graph)
        show("untie", proto)
    shared = shared_vectors(proto.graph) if for_training else {}
    check_references(proto.graph, path)
    if for_training:
        add_bodies(proto)
        show("bodies-for-training", proto)
    proto = inlined(proto, path)
    restate_flags(proto.graph)
    keep_ranges(proto.graph)
    show("inline-functions", proto)
    if page_size:
        states = [*states, *page_caches(proto, page_size, kv_dtype)]
        show("page-caches", proto)
    _check_stored(proto, path)
    torch = torch_names(proto.graph)
    if for_training:
        torch = tie(proto.graph, torch, path.parent)
        show("tie", proto)
    names_of_modules = use_module_names(proto.graph, torch)
    new_names = {old: new for new, old in names_of_modules.in_file.items()}
    annotations = tuple(each.renamed(new_names) for each in annotations)
    show("use-module-names", proto)
    stored = {t.name for t in stored_tensors(proto.graph)} - {""}
    keeps_ports = not (for_training or page_size or part == ENCODER)
    original = StoredModel.of(proto, path, dims or {}, shapes or {}) if keeps_ports else None
    refusal = check_standard(proto, path)
    with blaming(refusal, path):
        proto, defaults, fixed = _normalized(proto, path, for_training, show)
        fix_shapes(proto.graph, shapes or {})
        open_dims = bind_dims(proto.graph, dims or {}, path)
        show("bind-sizes", proto)
        if refusal is None:
            check_bound(proto, dims or {}, path)
        names = names_in(proto.graph)
        fused = unfuse(proto)
        show("unfuse", proto)
        spell_out(proto)
        show("spell-out", proto)
        read_listed(proto)
        show("read-listed", proto)
        if not open_dims:
            check_closed(typical or Typical(), path)
        step = Step.of(header)
        if step is not None and for_training:
            raise ModelError(
                f"{path} is already a training step; give the model that it was made from"
            )
        if step is not None and step.samples is not None:
            defaults.pop(step.samples, None)  # onnxruntime warns of defaults; a Trainer feeds it
        kinds = (bool(open_dims), for_training, part == ENCODER)
        importer = _Importer(proto, path, defaults, names, *kinds, show)
        infer_types = own_types(step)
        sizes, anew = None, partial(importer.graph, proto)
        if infer_types is not None:
            infer_types(proto, defaults)
        elif open_dims:
            sizes = infer_open(proto, open_dims, least, importer.graph, typical, remainders)
            anew = partial(sizes.graph, 0)
        else:
            keep = stored if for_training else None
            infer(proto, keep)
            if add_up_bags(proto):
                infer(proto, keep)  # shapes behind the bags
                show("add-up-bags", proto)
        graph = anew()
        pairs = _state_pairs(graph, step, states, find_others)
        whole = dict(sizes.whole) if sizes is not None else {}
        if page_size:
            whole |= dict.fromkeys(next_outputs(graph))
        model = Model(path, graph, pairs, header, fixed, stored, annotations, sizes, step, whole)
        model.names, model.anew = names_of(graph), anew
        model.exported, model.called = exported, names_of_modules
        model.shared, model.fused = shared, fused
        model.original = original if step is None and infer_types is None else None
        return model


def unread_inputs(model: Model) -> list[str]:
    """The inputs that a run needs, and that no node reads; of a training step, none."""
    graph = model.graph
    read = {t.name for node in all_nodes(graph) for t in node.inputs}
    read |= {t.name for t in graph.outputs}
    fed = [str(t.name) for t in graph.inputs if default_of(t) is None]
    return [name for name in fed if name not in read] if model.step is None else []


def _state_pairs(
    graph: gs.Graph, step: Step | None, states: Iterable[tuple[str, str]], find_others: bool
) -> list[tuple[str, str]]:
    """The states of a training step, the given ones, and those that are found."""
    given = [*((s.input, s.output) for s in (step.slots if step else ())), *states]
    return (
        find_states(graph, given, step is not None) if find_others else given_states(graph, given)
    )


def _check_stored(proto: onnx.ModelProto, path: Path) -> None:
    """Errors: ModelError for a stored tensor whose data cannot be used."""
    for tensor in stored_tensors(proto.graph):
        check_stored(tensor, path)
    check_attributes(proto.graph, path)
    check_constants(proto.graph, path)
    check_bodies(proto.graph, path)
    for sparse in sparse_tensors(proto.graph):
        check_sparse(sparse, path)


def _normalized(
    proto: onnx.ModelProto, path: Path, for_training: bool, show: Show
) -> tuple[onnx.ModelProto, dict[str, TensorProto], list[str]]:
    """Returns three things: the model in opset 18 or later, with dense constants as initializers;
    the default values of inputs; the initializers that can no longer be fed."""
    densify(proto.graph, path.parent)
    show("densify", proto)
    lift_constants(proto.graph)
    show("lift-constants", proto)
    defaults, fixed = _settle_defaults(proto, feedable=not for_training)
    show("settle-defaults", proto)
    proto = upgrade(proto, str(path))
    show("upgrade-opset", proto)
    return proto, defaults, fixed


class _Importer:
    """Makes graphs of a model's inferred protos: one, or one for each binding of open sizes."""

    def __init__(
        self,
        proto: onnx.ModelProto,
        path: Path,
        defaults: Mapping[str, TensorProto],
        names: Names,
        is_open: bool,
        for_training: bool,
        is_cut: bool,
        show: Show,
    ) -> None:
        self.path, self.defaults, self.names = path, defaults, names
        self.is_open, self.for_training, self.is_cut = is_open, for_training, is_cut
        ports = (*proto.graph.input, *proto.graph.output)
        self.declared = {port.name: _type_copy(port.type) for port in ports}
        self.show = show

    def graph(self, inferred: onnx.ModelProto) -> gs.Graph:
        """The graph that passes see. Errors: ModelError for an output without a type."""
        _check_outputs(inferred.graph, self.path)
        name_nodes(inferred.graph, self.names)
        self.show("infer-shapes", inferred)
        graph = import_graph(inferred, self.defaults, self.path.parent)
        scalar_bounds(graph)
        if self.is_cut:
            drop_decoder(graph)
        for tensor in graph.outputs:
            tensor.onnx_declared = self.declared[tensor.name]
        if self.is_open:
            reopen(graph, self.declared)
        else:
            split_sequences(graph)
        if not self.for_training:
            keep_dropouts(graph)
            _unshare_vectors(graph)
            separate_dequantized(graph)
        keep_bounds(graph)
        scan_first_axes(graph)
        stack_experts(graph, self.path.parent, in_nodes=self.for_training)
        check_names(graph, f"reading {self.path}")
        self.show("import", graph)
        self.show = unseen  # other bindings get the same rewrites
        return graph


def read_proto(path: Path) -> onnx.ModelProto:
    """Parses the file without its external data. Errors: ModelError, naming the file."""
    try:
        proto = onnx.load(str(path), load_external_data=False)
    except IsADirectoryError:
        raise ModelError(f"{path} is {_kind_of_folder(path)}") from None
    except OSError as error:
        raise ModelError(cannot_read(path, error)) from None
    except (*_NO_MODEL, ValueError) as error:
        raise ModelError(
            f"{path}: not an ONNX model, or truncated ({error}); export or copy it again"
        ) from None
    if not proto.HasField("graph") or not proto.opset_import:
        raise ModelError(
            f"{path}: not an ONNX model, or truncated (no graph or no opset); export or copy it "
            "again"
        )
    return proto


def _kind_of_folder(folder: Path) -> str:
    """The kind of a folder that is given as a model, and the remedy."""
    if (folder / "plan.json").exists():
        return (
            "a sharded model; give the .onnx file that it was made from, or see `onnxpar inspect`"
        )
    models = sorted(folder.glob("*.onnx"))
    return "a folder; give an .onnx file" + (f", such as {models[0]}" if models else "")


def _check_outputs(graph: onnx.GraphProto, path: Path) -> None:
    """Errors: ModelError for an output whose type is neither declared nor inferred."""
    for port in graph.output:
        kind = port.type.WhichOneof("value")
        if kind is None or (kind == "tensor_type" and not port.type.tensor_type.elem_type):
            raise ModelError(
                f"{path}: output {port.name!r} has no type, and none can be inferred; declare one "
                "with onnx.helper.make_tensor_value_info"
            )


def _settle_defaults(
    proto: onnx.ModelProto, feedable: bool
) -> tuple[dict[str, TensorProto], list[str]]:
    """Separates initializers that are also inputs: returns default values by name, and the names of
    those that are constants here though they could be fed.

    Before IR 4, all initializers had to be inputs, and none of them can be fed. Since IR 4 they can
    be, as in onnxruntime, if `feedable`; but those that may decide shapes are constants.
    """
    graph = proto.graph
    inputs = {i.name: i for i in graph.input}
    both = [t for t in graph.initializer if t.name in inputs]
    fed = both if feedable and proto.ir_version >= MIN_IR else []
    fixed = [t.name for t in fed if is_folded(t) and t.data_type in _COUNTS]
    defaults = {t.name: t for t in fed if t.name not in fixed}
    for name, tensor in defaults.items():
        shape = list(tensor.dims)
        inputs[name].type.CopyFrom(onnx.helper.make_tensor_type_proto(tensor.data_type, shape))
    constants = {t.name for t in both} - defaults.keys()
    _keep(graph.input, [i for i in graph.input if i.name not in constants])
    _keep(graph.initializer, [t for t in graph.initializer if t.name not in defaults])
    proto.ir_version = max(proto.ir_version, MIN_IR)
    return defaults, fixed


def _type_copy(type_: onnx.TypeProto) -> onnx.TypeProto:
    copy = onnx.TypeProto()
    copy.CopyFrom(type_)
    return copy


def _keep(field: Any, messages: list[Any]) -> None:
    del field[:]
    field.extend(messages)


def _unshare_vectors(graph: gs.Graph) -> None:
    """Gives each reader of a vector a copy of its own.

    Exporters store equal vectors once (biases of zeros), though they belong to different
    dimensions, which may be split differently.
    """
    names = names_of(graph)
    for tensor in list(graph.tensors().values()):
        is_vector = isinstance(tensor, gs.Constant) and len(tensor.shape) == 1
        if not is_vector or str(tensor.dtype) in ("int64", "bool", "object"):
            continue
        for i, node in enumerate(_different(tensor.outputs)[1:], 1):
            name = names.free(f"{tensor.name}@{i}")
            copy = gs.Constant(name, tensor._values, export_dtype=tensor.export_dtype)
            for at, operand in enumerate(node.inputs):
                if operand is tensor:
                    node.inputs[at] = copy


def _different(nodes: Iterable[gs.Node]) -> list[gs.Node]:
    """The nodes without duplicates; nodes are compared by identity, as `==` compares attributes."""
    return list({id(node): node for node in nodes}.values())
