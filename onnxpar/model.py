"""Loads a model: checked, functions inlined, every shape known, weights left where they are."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnx.inliner
import onnx_graphsurgeon as gs
from google.protobuf.message import DecodeError
from onnx import TensorProto

from onnxpar.annotations import Configuration, read_annotations
from onnxpar.errors import ModelError, StrategyError
from onnxpar.inference import infer
from onnxpar.interchange import header_of, import_graph
from onnxpar.open_sizes import OpenSizes, infer_open
from onnxpar.runtime_shapes import is_known
from onnxpar.sequences import split_sequences
from onnxpar.step import Step
from onnxpar.stored import (
    check_external,
    copy_with_stubs,
    densify,
    element_bits,
    is_folded,
    lift_constants,
    nodes_of,
    stored_bytes,
    stored_tensors,
)
from onnxpar.subgraphs import all_nodes
from onnxpar.symbols import Polynomial
from onnxpar.unfuse import unfuse
from onnxpar.upgrade import raise_opset, upgrade
from onnxpar.write_file import unread

_MAX_IR, MAX_OPSET = 13, 26
"""What onnxruntime 1.31 loads; anything newer is refused by name rather than by the runtime."""
TRAINING_OPSET = 18
"""Since then, all reductions take their axes as an operand, and gradients are written with it."""
_MIN_IR = 4
"""From here on, initializers need not be inputs."""
_READ_AT_MOST = 1 << 16
"""Bytes of an initializer that the checker may read."""
_LENT = "com.microsoft"
_COUNTS = (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL)
"""What shapes are computed from."""

InferTypes = Callable[[onnx.ModelProto, Collection[str]], None]
"""Declares the types of a model in place, of which so many inputs have default values."""


@dataclass
class Model:
    """A loaded model. `graph` is complete: static shapes, unique node names, lazy weights.

    `header` has its metadata; `stored` are the initializers of the file, `fixed` those that could
    be fed until their values decided shapes; `step` says which ports are what where it is a
    training step.
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

    @property
    def folder(self) -> Path:
        """Where external data is looked up."""
        return self.path.parent


def load(
    path: str | Path,
    dims: Mapping[str, int] | None = None,
    states: Iterable[tuple[str, str]] = (),
    least: int = 2,
    own_types: Callable[[Step | None], InferTypes | None] = lambda step: None,
    for_training: bool = False,
) -> Model:
    """Reads a model and makes it ready for passes.

    dims    sizes of symbolic dimensions, by symbol; the others stay open
    states  (input, output) pairs that are fed back; caches that grow by Concat are found by
            themselves
    least   a size that open dimensions should be imagined to have at least
    own_types  of a training step or None: what declares types, where it is no global program
    for_training  every weight stays as it is stored, and the opset is TRAINING_OPSET or later

    Errors: ModelError for a file that cannot be used, StrategyError for a size of no symbol.
    """
    path = Path(path)
    proto = read_proto(path)
    annotations = read_annotations(proto)
    least = max([least, *(c.devices for c in annotations)])
    header = header_of(proto)
    proto = _inlined(proto, path)
    stored = {t.name for t in stored_tensors(proto.graph)} - {""}
    _check(proto, path)
    for tensor in stored_tensors(proto.graph):
        check_external(tensor, path)
    densify(proto.graph, path.parent)
    lift_constants(proto.graph)
    defaults, fixed = _settle_defaults(proto, feedable=not for_training)
    proto = upgrade(proto, str(path))
    if for_training:
        proto = raise_opset(proto, TRAINING_OPSET, str(path))
    open_dims = _bind_dims(proto.graph, dims or {}, path)
    unfuse(proto)

    def prepare(inferred: onnx.ModelProto) -> gs.Graph:
        _name_nodes(inferred.graph)
        graph = import_graph(inferred, defaults, path.parent)
        if not open_dims:
            split_sequences(graph)
        if not for_training:
            _unshare_vectors(graph)
        _mark_opset(graph)
        return graph

    sizes = None
    step = Step.of(header)
    infer_types = own_types(step)
    if infer_types is not None:
        infer_types(proto, defaults)
        graph = prepare(proto)
    elif open_dims:
        sizes = infer_open(proto, open_dims, least, prepare)
        graph = sizes.graph(0)
    else:
        infer(proto, keep_weights=for_training)
        graph = prepare(proto)
    handed = [(s.input, s.output) for s in step.slots] if step else []
    pairs = _find_states(graph, [*handed, *states])
    return Model(path, graph, pairs, header, fixed, stored, annotations, sizes, step)


def read_proto(path: Path) -> onnx.ModelProto:
    """Parses the file without its external data. Errors: ModelError, naming the file."""
    try:
        proto = onnx.load(str(path), load_external_data=False)
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ModelError(f"{path}: is a folder; give an .onnx file") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {unread(error)}") from None
    except (DecodeError, ValueError) as error:
        raise ModelError(f"{path}: not an ONNX model, or truncated ({error})") from None
    if not proto.HasField("graph") or not proto.opset_import:
        raise ModelError(f"{path}: not an ONNX model, or truncated (no graph or no opset)")
    return proto


def _check(proto: onnx.ModelProto, path: Path) -> None:
    opset = max((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), default=0)
    if opset > MAX_OPSET or proto.ir_version > _MAX_IR:
        raise ModelError(
            f"{path}: opset {opset}, IR {proto.ir_version}; onnxruntime loads up to opset "
            f"{MAX_OPSET}, IR {_MAX_IR}: convert it with onnx.version_converter"
        )
    bare = copy_with_stubs(proto, partial(_unread, path))
    for tensor in stored_tensors(bare.graph):
        if tensor.data_location == TensorProto.EXTERNAL:
            tensor.CopyFrom(_inline_stub(tensor))
    bare.ir_version = max(bare.ir_version, _MIN_IR)  # what the runtime does not mind
    bare.graph.name = bare.graph.name or "graph"
    for port in (*bare.graph.input, *bare.graph.output):
        if port.type.HasField("tensor_type"):
            port.type.tensor_type.shape.SetInParent()
    _lend_domain(bare.graph, bare.opset_import)
    try:
        onnx.checker.check_model(bare)
    except onnx.checker.ValidationError as error:
        raise ModelError(
            f"{path}: breaks the ONNX standard: {str(error).splitlines()[0]}"
        ) from None


def _lend_domain(graph: onnx.GraphProto, opsets: Any) -> None:
    """Ops that onnxruntime adds to ONNX's own domain (SimplifiedLayerNormalization) move to one
    that the checker does not look into."""
    opset = next((o.version for o in opsets if o.domain in ("", "ai.onnx")), 1)
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
                _lend_domain(inner, opsets)
        is_standard = node.domain in ("", "ai.onnx") and onnx.defs.has(node.op_type, opset)
        if not is_standard and is_known(node.op_type, node.domain):
            node.domain = _LENT
            if all(o.domain != _LENT for o in opsets):
                opsets.append(onnx.helper.make_opsetid(_LENT, 1))


def _unread(path: Path, tensor: TensorProto) -> TensorProto | None:
    """What the checker sees of a large initializer. Errors: ModelError where data lacks."""
    if len(tensor.raw_data) <= _READ_AT_MOST:
        return None
    if len(tensor.raw_data) != stored_bytes(tensor):
        raise ModelError(
            f"{path}: initializer {tensor.name!r} has {len(tensor.raw_data)} bytes, its shape and "
            f"type {stored_bytes(tensor)}"
        )
    return _inline_stub(tensor)


def _inline_stub(tensor: TensorProto) -> TensorProto:
    """A tensor of no elements, or a scalar: for the checker, which would copy the data, or look for
    it in the working directory."""
    dims, dtype = tensor.dims, tensor.data_type
    data = b"" if dims else bytes(16)[: -(-element_bits(dtype) // 8)]
    return TensorProto(name=tensor.name, data_type=dtype, dims=[0] if dims else [], raw_data=data)


def _inlined(proto: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """The model with the bodies of its functions in place of their calls."""
    if not proto.functions:
        return proto
    try:
        proto = onnx.inliner.inline_local_functions(proto, convert_version=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"{path}: its functions cannot be inlined: {reason}") from None
    if proto.functions:
        function = proto.functions[0]
        raise ModelError(
            f"{path}: function {function.domain}.{function.name} cannot be inlined, as its opset "
            f"is not the model's; export both with one opset"
        )
    return proto


def _settle_defaults(
    proto: onnx.ModelProto, feedable: bool
) -> tuple[dict[str, TensorProto], list[str]]:
    """Takes apart what is an initializer and an input: default values, and what stays fixed.

    Before IR 4, all initializers had to be inputs, and none can be fed. Later ones can, as in
    onnxruntime, if they are to be `feedable`; but those that may decide shapes are constants here.
    """
    graph = proto.graph
    inputs = {i.name: i for i in graph.input}
    both = [t for t in graph.initializer if t.name in inputs]
    fed = both if feedable and proto.ir_version >= _MIN_IR else []
    fixed = [t.name for t in fed if is_folded(t) and t.data_type in _COUNTS]
    defaults = {t.name: t for t in fed if t.name not in fixed}
    for name, tensor in defaults.items():
        shape = list(tensor.dims)
        inputs[name].type.CopyFrom(onnx.helper.make_tensor_type_proto(tensor.data_type, shape))
    constants = {t.name for t in both} - defaults.keys()
    _keep(graph.input, [i for i in graph.input if i.name not in constants])
    _keep(graph.initializer, [t for t in graph.initializer if t.name not in defaults])
    proto.ir_version = max(proto.ir_version, _MIN_IR)
    return defaults, fixed


def _keep(field: Any, messages: list[Any]) -> None:
    del field[:]
    field.extend(messages)


def _bind_dims(
    graph: onnx.GraphProto, dims: Mapping[str, int], path: Path
) -> dict[tuple[str, int], Polynomial]:
    """Replaces symbols of the graph's inputs by sizes."""
    found: dict[tuple[str, int], Polynomial] = {}
    labels: dict[str, str] = {}
    for tensor in graph.input:
        for axis, dim in enumerate(tensor.type.tensor_type.shape.dim):
            if dim.HasField("dim_value"):
                continue
            label = dim.dim_param or f"{tensor.name}.{axis}"
            found[tensor.name, axis] = size = _size(label)
            labels.update({symbol: symbol for symbol in size.variables})
            labels[label] = size.symbol or label
    unknown = sorted(dims.keys() - labels.keys())
    if unknown:
        have = ", ".join(sorted(labels)) or "none"
        raise StrategyError(f"--dim {unknown[0]}: {path} has no such symbol; it has: {have}")
    for label, value in dims.items():
        number = Polynomial.constant(value)
        found = {at: size.replace(labels[label], number) for at, size in found.items()}
    for tensor in graph.input:
        for axis, dim in enumerate(tensor.type.tensor_type.shape.dim):
            bound = found.get((tensor.name, axis))
            if bound is not None and not bound.variables:
                dim.dim_value = bound.at({})
                del found[tensor.name, axis]
    return found


def _size(label: str) -> Polynomial:
    """What the name of a dimension says: a symbol, or a size made of symbols (`past + 1`)."""
    try:
        return Polynomial.parse(label)
    except ValueError:
        return Polynomial.variable(re.sub(r"\W", "_", label))


def _name_nodes(graph: onnx.GraphProto) -> None:
    """Gives every node, in subgraphs too, a name of its own, from its op and first result."""
    taken: set[str] = set()
    for node in nodes_of(graph):
        name = node.name or f"{node.op_type}_{next((o for o in node.output if o), '')}"
        unique, i = name, 1
        while unique in taken:
            unique, i = f"{name}_{i}", i + 1
        node.name = unique
        taken.add(unique)


def _unshare_vectors(graph: gs.Graph) -> None:
    """Gives every node a vector of its own where several read one.

    Exporters store equal vectors once (biases of zeros), which does not mean that what they are
    added to is the same dimension.
    """
    for tensor in list(graph.tensors().values()):
        is_vector = isinstance(tensor, gs.Constant) and len(tensor.shape) == 1
        if not is_vector or str(tensor.dtype) in ("int64", "bool", "object"):
            continue
        for i, node in enumerate(_different(tensor.outputs)[1:], 1):
            copy = gs.Constant(
                f"{tensor.name}@{i}", tensor._values, export_dtype=tensor.export_dtype
            )
            for at, operand in enumerate(node.inputs):
                if operand is tensor:
                    node.inputs[at] = copy


def _different(nodes: Iterable[gs.Node]) -> list[gs.Node]:
    """Each node once; they are compared by identity, as equality compares attributes."""
    return list({id(node): node for node in nodes}.values())


def _mark_opset(graph: gs.Graph) -> None:
    """Puts the opset on nodes whose meaning it changes."""
    for node in all_nodes(graph):
        if node.op in ("Softmax", "LogSoftmax", "Hardmax", "Split") and graph.opset < 13:
            node.attrs["onnxpar.opset"] = graph.opset


def _find_states(graph: gs.Graph, declared: list[tuple[str, str]]) -> list[tuple[str, str]]:
    inputs = {t.name: t for t in graph.inputs}
    outputs = {t.name: t for t in graph.outputs}
    for source, result in declared:
        if source not in inputs or result not in outputs:
            raise StrategyError(f"state {source}={result}: no such input and output of the model")
    pairs = dict(declared)
    for output in graph.outputs:
        node = output.inputs[0] if output.inputs else None
        while node is not None and node.op == "Identity":
            node = node.inputs[0].inputs[0] if node.inputs[0].inputs else None
        if node is None or node.op != "Concat" or output.name in pairs.values():
            continue
        source = node.inputs[0]
        if source.name in inputs and source.name not in pairs and source.dtype == output.dtype:
            pairs[source.name] = output.name
    return list(pairs.items())
