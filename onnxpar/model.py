"""Loads a model: checked, functions inlined, every shape known, weights left where they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnx.version_converter
import onnx_graphsurgeon as gs
from google.protobuf.message import DecodeError
from onnx import TensorProto

from onnxpar.errors import ModelError, StrategyError
from onnxpar.shapes import infer

_MAX_IR, _MAX_OPSET = 13, 26
"""What onnxruntime 1.31 loads; anything newer is refused by name rather than by the runtime."""
_MIN_OPSET = 10
"""What passes emit."""


@dataclass
class Model:
    """A loaded model. `graph` is complete: static shapes, unique node names, lazy weights."""

    path: Path
    graph: gs.Graph
    states: list[tuple[str, str]]
    dims: dict[str, int]

    @property
    def folder(self) -> Path:
        """Where external data is looked up."""
        return self.path.parent


def load(
    path: str | Path,
    dims: Mapping[str, int] | None = None,
    states: Iterable[tuple[str, str]] = (),
) -> Model:
    """Reads a model and makes it ready for passes.

    dims    sizes of symbolic dimensions, by symbol states  (input, output) pairs that are fed
    back; caches that grow by Concat are found by themselves Errors: ModelError for a file that
    cannot be used, StrategyError for a symbol without a size.
    """
    path = Path(path)
    proto = read_proto(path)
    _check(proto, path)
    if proto.functions:
        proto = onnx.inliner.inline_local_functions(proto)
    proto = _at_least_opset(proto, _MIN_OPSET, path)
    bound = _bind_dims(proto.graph, dict(dims or {}), path)
    for tensor in proto.graph.initializer:
        check_external(tensor, path)
    infer(proto)
    _name_nodes(proto.graph)
    graph = gs.import_onnx(proto)
    graph.ir_version = proto.ir_version
    _mark_opset(graph)
    return Model(path, graph, _find_states(graph, list(states)), bound)


def read_proto(path: Path) -> onnx.ModelProto:
    """Parses the file without its external data. Errors: ModelError, naming the file."""
    try:
        proto = onnx.load(str(path), load_external_data=False)
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ModelError(f"{path}: is a folder; give an .onnx file") from None
    except (DecodeError, ValueError) as error:
        raise ModelError(f"{path}: not an ONNX model, or truncated ({error})") from None
    if not proto.HasField("graph") or not proto.opset_import:
        raise ModelError(f"{path}: not an ONNX model, or truncated (no graph or no opset)")
    return proto


def _check(proto: onnx.ModelProto, path: Path) -> None:
    opset = max((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), default=0)
    if opset > _MAX_OPSET or proto.ir_version > _MAX_IR:
        raise ModelError(
            f"{path}: opset {opset}, IR {proto.ir_version}; onnxruntime loads up to opset "
            f"{_MAX_OPSET}, IR {_MAX_IR}: convert it with onnx.version_converter"
        )
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    for tensor in bare.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            _make_inline_stub(tensor)
    try:
        onnx.checker.check_model(bare)
    except onnx.checker.ValidationError as error:
        raise ModelError(
            f"{path}: breaks the ONNX standard: {str(error).splitlines()[0]}"
        ) from None


def _make_inline_stub(tensor: TensorProto) -> None:
    """The checker would look for the data in the working directory; only its shape matters
    there."""
    dims = list(tensor.dims)
    name, dtype = tensor.name, tensor.data_type
    tensor.Clear()
    tensor.name, tensor.data_type = name, dtype
    tensor.dims.extend([0] if dims else [])
    tensor.raw_data = b"" if dims else bytes(16)[: _itemsize(dtype)]


def _itemsize(dtype: int) -> int:
    return int(onnx.helper.tensor_dtype_to_np_dtype(dtype).itemsize)


def external_location(tensor: TensorProto) -> tuple[str, int, int | None]:
    """(location, offset, length) of external data, as the model states them."""
    entries = {e.key: e.value for e in tensor.external_data}
    length = int(entries["length"]) if "length" in entries else None
    return entries.get("location", ""), int(entries.get("offset", 0)), length


def check_external(tensor: TensorProto, model: Path) -> None:
    """Errors: ModelError where external data is missing, short, or outside the model's folder."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return
    location, offset, length = external_location(tensor)
    folder = model.parent.resolve()
    data = (folder / location).resolve()
    if not data.is_relative_to(folder):
        raise ModelError(
            f"{model}: weight {tensor.name!r} points to {location!r}, outside the model's folder"
        )
    if not data.is_file():
        raise ModelError(f"{model}: external data {location!r} of {tensor.name!r} is missing")
    need = int(np.prod(tensor.dims, dtype=np.int64)) * _itemsize(tensor.data_type)
    have = data.stat().st_size - offset if length is None else length
    if have < need or data.stat().st_size < offset + need:
        raise ModelError(
            f"{model}: external data {location!r} is too short for {tensor.name!r}: "
            f"{need} bytes from {offset}"
        )


def _at_least_opset(proto: onnx.ModelProto, opset: int, path: Path) -> onnx.ModelProto:
    """The model in a newer opset where it is older: what passes insert is of that one."""
    own = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), opset)
    if own >= opset:
        return proto
    remedy = f"export it with opset {opset} or newer"
    if any(t.data_location == TensorProto.EXTERNAL for t in proto.graph.initializer):
        raise ModelError(f"{path}: opset {own} with external data; {remedy}")
    try:
        return onnx.version_converter.convert_version(proto, opset)
    except (RuntimeError, onnx.version_converter.ConvertError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(
            f"{path}: opset {own} does not convert to {opset}: {reason}; {remedy}"
        ) from None


def _bind_dims(graph: onnx.GraphProto, dims: dict[str, int], path: Path) -> dict[str, int]:
    """Replaces symbols of the graph's inputs by sizes; drops inputs that are initializers too."""
    weights = {t.name for t in graph.initializer}
    kept = [i for i in graph.input if i.name not in weights]
    del graph.input[:]
    graph.input.extend(kept)
    open_dims: dict[str, str] = {}
    known: set[str] = set()
    for tensor in graph.input:
        for axis, dim in enumerate(tensor.type.tensor_type.shape.dim):
            if dim.HasField("dim_value"):
                continue
            symbol = dim.dim_param or f"{tensor.name}.{axis}"
            known.add(symbol)
            if symbol in dims:
                dim.dim_value = dims[symbol]
            else:
                open_dims.setdefault(symbol, f"{tensor.name!r} dimension {axis}")
    unknown = sorted(dims.keys() - known)
    if unknown:
        have = ", ".join(sorted(known)) or "none"
        raise StrategyError(f"--dim {unknown[0]}: {path} has no such symbol; it has: {have}")
    if open_dims:
        wanted = " ".join(f"--dim {s}=N" for s in open_dims)
        where = "; ".join(f"{s}: {w}" for s, w in open_dims.items())
        raise StrategyError(f"{path}: sizes are open ({where}); give {wanted}")
    return dims


def _name_nodes(graph: onnx.GraphProto) -> None:
    """Gives every node a name of its own, from its op and first result."""
    taken: set[str] = set()
    for node in graph.node:
        name = node.name or f"{node.op_type}_{next((o for o in node.output if o), '')}"
        unique, i = name, 1
        while unique in taken:
            unique, i = f"{name}_{i}", i + 1
        node.name = unique
        taken.add(unique)


def _mark_opset(graph: gs.Graph) -> None:
    """Puts the opset on nodes whose meaning it changes."""
    for node in graph.nodes:
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


def stored_proto(tensor: gs.Constant) -> TensorProto | None:
    """The reference behind a weight that has not been read, None for a value in memory."""
    values: Any = tensor._values
    return values.tensor if isinstance(values, gs.ir.tensor.LazyValues) else None
