"""Tensors stored with a model: where their data is and how large, checks of it, and sparse
tensors."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import Message
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
    helper,
    numpy_helper,
)

from onnxpar.base.arrays import Array
from onnxpar.base.errors import ModelError
from onnxpar.base.packing import stored_bits

FOLD_LIMIT = 1 << 16
"""Results with at most this many elements are folded into constants; larger ones are computed in
each run."""
SMALL_WEIGHT = 256
"""Floating-point initializers with at most this many elements take part in constant folding."""
_MOST_BYTES = (1 << 31) - 1
"""A tensor in a model file can have at most this many bytes (a limit of protobuf)."""


def element_bits(dtype: int) -> int:
    """Returns the bits of a stored element of this TensorProto.DataType; 0 for strings."""
    if dtype == TensorProto.STRING:
        return 0
    return stored_bits(np.dtype(helper.tensor_dtype_to_np_dtype(dtype)))


def stored_bytes(tensor: TensorProto) -> int:
    """Returns the bytes of a tensor's data; elements of 4 bits are packed."""
    return -(-int(math.prod(tensor.dims)) * element_bits(tensor.data_type) // 8)


def is_folded(weight: TensorProto) -> bool:
    """True if an initializer takes part in constant folding: it is in the model file itself, and
    small."""
    if weight.data_location == TensorProto.EXTERNAL:
        return False
    size = int(math.prod(weight.dims))
    whole_number = weight.data_type in (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL)
    return size <= (FOLD_LIMIT if whole_number else SMALL_WEIGHT)


def without_data(tensor: TensorProto) -> TensorProto:
    """Returns the tensor without its data, which type inference does not need."""
    return TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)


def copy_with_stubs(
    model: ModelProto, stub: Callable[[TensorProto], TensorProto | None]
) -> ModelProto:
    """Returns a copy of the model in which `stub(initializer)` takes the place of each initializer
    of the main graph for which it is not None. Data of such initializers is never copied."""
    copy = ModelProto()
    for message, target in ((model, copy), (model.graph, copy.graph)):
        for field, value in message.ListFields():
            if field.name in ("graph", "initializer"):
                continue
            if field.is_repeated:
                getattr(target, field.name).extend(value)
            elif field.message_type is not None:
                getattr(target, field.name).CopyFrom(value)
            else:
                setattr(target, field.name, value)
    for tensor in model.graph.initializer:
        copy.graph.initializer.append(stub(tensor) or tensor)
    return copy


def external_location(tensor: TensorProto) -> tuple[str, int, int | None]:
    """Returns (location, offset, length) of a tensor's external data, as the model states them;
    length None: as much as the tensor needs. Errors: ValueError if offset or length is not a
    number."""
    entries = {e.key: e.value for e in tensor.external_data}
    length = int(entries.get("length", 0)) or None  # the runtime takes 0 as no length
    return entries.get("location", ""), int(entries.get("offset", 0)), length


_KEYS = ("location", "offset", "length", "checksum")
"""Entries of external data that onnxruntime knows."""


def read_stored(tensor: TensorProto, folder: Path) -> Array:
    """Returns the values of a tensor; external data is read from files in `folder`."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return np.asarray(numpy_helper.to_array(tensor))
    exact = TensorProto.FromString(tensor.SerializeToString())
    for entry in [e for e in exact.external_data if e.key == "length"]:
        exact.external_data.remove(entry)
    exact.external_data.add(key="length", value=str(stored_bytes(tensor)))
    return np.asarray(numpy_helper.to_array(exact, str(folder)))


def check_stored(tensor: TensorProto, model: Path) -> None:
    """Checks the data of a tensor. Errors: ModelError if its size does not match the type and
    shape, or if it is missing, outside the model's folder, or a segment."""
    dtype = tensor.data_type
    known = [n for n in TensorProto.DataType.values() if n != TensorProto.UNDEFINED]
    if dtype not in known or min(tensor.dims, default=0) < 0:
        raise ModelError(
            f"{model}: weight {tensor.name!r} has data type {dtype} and shape {list(tensor.dims)}, "
            "which are not valid; export the model again"
        )
    if tensor.HasField("segment"):
        raise ModelError(
            f"{model}: weight {tensor.name!r} is a segment of a tensor, which nothing reads; "
            "export the model again"
        )
    if tensor.data_location == TensorProto.EXTERNAL:
        _check_external(tensor, model)
        return
    count = math.prod(tensor.dims)
    if tensor.HasField("raw_data"):
        have, need, what = len(tensor.raw_data), stored_bytes(tensor), "bytes"
    else:
        have = len(getattr(tensor, helper.tensor_dtype_to_field(dtype)))
        is_pair = dtype in (TensorProto.COMPLEX64, TensorProto.COMPLEX128)
        is_packed = 0 < element_bits(dtype) < 8
        need = stored_bytes(tensor) if is_packed else count * (2 if is_pair else 1)
        what = "elements"
    if have != need:
        raise ModelError(
            f"{model}: weight {tensor.name!r} has {have} {what}, but its shape and type need "
            f"{need}; the file is damaged: export or copy it again"
        )


_VALUES = {
    "value", "sparse_value", "value_float", "value_floats", "value_int", "value_ints",
    "value_string", "value_strings",
}  # fmt: skip
"""A Constant node must have exactly one of these attributes."""


_HELD = {
    AttributeProto.FLOAT: "f", AttributeProto.FLOATS: "floats",
    AttributeProto.INT: "i", AttributeProto.INTS: "ints",
    AttributeProto.STRING: "s", AttributeProto.STRINGS: "strings",
    AttributeProto.TENSOR: "t", AttributeProto.TENSORS: "tensors",
    AttributeProto.GRAPH: "g", AttributeProto.GRAPHS: "graphs",
    AttributeProto.SPARSE_TENSOR: "sparse_tensor", AttributeProto.SPARSE_TENSORS: "sparse_tensors",
    AttributeProto.TYPE_PROTO: "tp", AttributeProto.TYPE_PROTOS: "type_protos",
}  # fmt: skip
"""The field of AttributeProto that holds the value, by the attribute's type."""


def check_attributes(graph: GraphProto, model: Path) -> None:
    """Checks that each attribute holds a value of the type that it states, as onnxruntime goes by
    the type, and would read 0 or nothing. Errors: ModelError."""
    fields = set(_HELD.values())
    for node in nodes_of(graph):
        for attribute in node.attribute:
            held = fields & {field.name for field, _ in attribute.ListFields()}
            if attribute.type and held - {_HELD.get(attribute.type)}:
                kind = AttributeProto.AttributeType.Name(attribute.type)
                raise ModelError(
                    f"{model}: attribute {attribute.name!r} of {node.op_type} "
                    f"{node.name or next(iter(node.output), '')!r} is stated to be {kind}, but "
                    f"holds {', '.join(sorted(held))}; export the model again"
                )


def check_constants(graph: GraphProto, model: Path) -> None:
    """Checks that each Constant (of any domain) has one value, which is a tensor; onnxruntime loads
    others, with undefined results. Errors: ModelError."""
    for node in nodes_of(graph):
        values = {attribute.name for attribute in node.attribute} & _VALUES
        if node.op_type == "Constant" and len(values) != 1:
            raise ModelError(
                f"{model}: Constant {next(iter(node.output), '')!r} has {len(values)} values "
                "instead of one; export the model again"
            )
        for attribute in node.attribute if node.op_type == "Constant" else ():
            is_tensor = attribute.HasField("t") or attribute.HasField("sparse_tensor")
            if attribute.name in ("value", "sparse_value") and not is_tensor:
                raise ModelError(
                    f"{model}: Constant {next(iter(node.output), '')!r} has a value that is not a "
                    "tensor; export the model again"
                )


def check_bodies(graph: GraphProto, model: Path) -> None:
    """Checks that the bodies of Loops and Scans return as many results as each iteration hands to
    the next. Errors: ModelError."""
    for node in nodes_of(graph):
        if node.op_type not in ("Loop", "Scan"):
            continue
        scanned = sum(a.i for a in node.attribute if a.name == "num_scan_inputs")
        least = len(node.input) - (1 if node.op_type == "Loop" else scanned)
        for body in subgraphs_of(node):
            if len(body.output) < least:
                raise ModelError(
                    f"{model}: body {body.name!r} of a {node.op_type} returns {len(body.output)} "
                    f"results, but each iteration hands {least} to the next; export the model again"
                )


def check_sparse(sparse: SparseTensorProto, model: Path) -> None:
    """Checks a sparse tensor. Errors: ModelError if its indices are out of range, or if its dense
    form would be larger than any tensor in a file."""
    values, at, dims = sparse.values, sparse.indices, list(sparse.dims)
    what = f"{model}: sparse tensor {values.name!r} of shape {dims}"
    if min(dims, default=1) < 1:
        raise ModelError(f"{what}: sizes must be at least 1; export the model again")
    need = math.prod(dims) * element_bits(values.data_type) // 8
    if need > _MOST_BYTES:
        raise ModelError(
            f"{what} takes {need:,} bytes in onnxruntime, which makes it dense; the limit is 2 "
            "GiB: store it as a dense weight in an external file"
        )
    count = list(values.dims)
    shapes = [count, [*count, len(dims)]]
    if len(count) != 1 or at.data_type != TensorProto.INT64 or list(at.dims) not in shapes:
        raise ModelError(
            f"{what} has values of shape {count} and indices of shape {list(at.dims)} and data "
            f"type {at.data_type}; it must have a vector of values, and an int64 index for each; "
            "export the model again"
        )
    places = read_stored(at, model.parent)
    most = dims if places.ndim == 2 else [math.prod(dims)]
    if (places < 0).any() or (places >= most).any():
        raise ModelError(f"{what} has a value outside of its shape; export the model again")


def _check_external(tensor: TensorProto, model: Path) -> None:
    """Checks the external data of a tensor: its entries, its file and its size. Errors:
    ModelError."""
    try:
        location, offset, length = external_location(tensor)
    except ValueError as error:
        raise ModelError(
            f"{model}: offset or length of weight {tensor.name!r} is not a number ({error}); "
            "export the model again"
        ) from None
    keys = [entry.key for entry in tensor.external_data]
    for entry in tensor.external_data:
        if keys.count(entry.key) > 1:
            raise ModelError(
                f"{model}: external data of weight {tensor.name!r} has the entry {entry.key!r} "
                f"{keys.count(entry.key)} times; export the model again"
            )
        if entry.key not in _KEYS and not entry.key.startswith("prepacked"):
            raise ModelError(
                f"{model}: external data of weight {tensor.name!r} has an unknown entry "
                f"{entry.key!r}; the known ones are {', '.join(_KEYS)}"
            )
    if "\0" in location or os.path.basename(location) in ("", ".", ".."):
        raise ModelError(
            f"{model}: external data of weight {tensor.name!r} has the location {location!r}, "
            "which is not a valid file name; export the model again"
        )
    folder = model.parent.resolve()
    try:
        data = (folder / location).resolve()
        data.stat()
    except FileNotFoundError:
        pass  # told below
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        reason = getattr(error, "strerror", None) or "its links form a loop"
        raise ModelError(
            f"{model}: external data of weight {tensor.name!r} has the location "
            f"{location[:40]!r}, which cannot be read: {reason}; export the model again"
        ) from None
    if Path(location).is_absolute() or not data.is_relative_to(folder):
        raise ModelError(
            f"{model}: weight {tensor.name!r} points to {location!r}, outside the model's folder; "
            "move the data into that folder, and save the model with the new location"
        )
    if not data.is_file():
        raise ModelError(
            f"{model}: external data {location!r} of {tensor.name!r} is missing; copy it into the "
            "model's folder"
        )
    need = stored_bytes(tensor)
    have = data.stat().st_size - offset if length is None else length
    if length is not None and length > need:
        raise ModelError(
            f"{model}: external data {location!r} of {tensor.name!r} has {length} bytes, but its "
            f"shape and type need {need}; export the model again"
        )
    if have < need or data.stat().st_size < offset + need or offset < 0:
        raise ModelError(
            f"{model}: external data {location!r} is too short for {tensor.name!r}, which needs "
            f"{need} bytes from offset {offset}; copy the file again, or export the model again"
        )


def subgraphs_of(node: NodeProto) -> Iterator[GraphProto]:
    """Yields the graphs among a node's attributes."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def graphs_of(graph: GraphProto) -> Iterator[GraphProto]:
    """Yields the graph and all its subgraphs, at any depth, each before its own subgraphs."""
    yield graph
    for node in graph.node:
        for inner in subgraphs_of(node):
            yield from graphs_of(inner)


def nodes_of(graph: GraphProto) -> Iterator[NodeProto]:
    """Yields every node of a graph, each followed by those of its subgraphs, at any depth."""
    for node in graph.node:
        yield node
        for inner in subgraphs_of(node):
            yield from nodes_of(inner)


def rename_reads(graph: GraphProto, new: Mapping[str, str]) -> None:
    """Renames tensors where nodes read them and where subgraphs return them, but not where they are
    computed. `new` has new names by old ones."""
    for node in nodes_of(graph):
        for i, name in enumerate(node.input):
            if name in new:
                node.input[i] = new[name]
    for inner in graphs_of(graph):
        for port in inner.output if inner is not graph else ():
            port.name = new.get(port.name, port.name)


def reads_of(node: NodeProto) -> set[str]:
    """Returns all names that a node reads, also names that its subgraphs capture from outside."""
    return set(node.input).union(*map(captured_by, subgraphs_of(node)))


def nodes_before(nodes: Iterable[NodeProto], names: Iterable[str]) -> list[NodeProto]:
    """Returns the nodes on which these tensors depend, in order."""
    needed, kept = set(names), list[NodeProto]()
    for node in reversed(list(nodes)):
        if not needed.isdisjoint(node.output):
            kept.append(node)
            needed |= reads_of(node) - {""}
    return kept[::-1]


def onnx_opset(model: ModelProto) -> int:
    """Returns the version of ONNX's own ops that a model imports; 1 if it states none."""
    return next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)


def captured_by(graph: GraphProto) -> set[str]:
    """Returns all names that a subgraph reads from the graphs around it; names of its own tensors
    do not count."""
    read = {port.name for port in graph.output}.union(*map(reads_of, graph.node))
    own = {t.name for t in (*graph.input, *graph.initializer)}
    return read - own - {name for node in graph.node for name in node.output}


def _attributes(graph: GraphProto) -> Iterator[AttributeProto]:
    return (attribute for node in nodes_of(graph) for attribute in node.attribute)


def stored_tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """Yields all stored tensors of a graph, including those in attributes and subgraphs."""
    for each in graphs_of(graph):
        yield from each.initializer
    for attribute in _attributes(graph):
        yield from [attribute.t] if attribute.HasField("t") else []
        yield from attribute.tensors
    for entry in sparse_tensors(graph):
        yield from (entry.values, entry.indices)


def sparse_tensors(graph: GraphProto) -> Iterator[SparseTensorProto]:
    """Yields all sparse tensors of a graph, including those in attributes and subgraphs."""
    for each in graphs_of(graph):
        yield from each.sparse_initializer
    for attribute in _attributes(graph):
        yield from [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
        yield from attribute.sparse_tensors


def check_text(model: ModelProto, path: Path) -> None:
    """Checks that all texts in a model are UTF-8 (protobuf returns others as bytes). Errors:
    ModelError."""
    for text in _texts(model):
        if isinstance(text, bytes):
            raise ModelError(f"{path}: the text {text!r:.80} is not UTF-8; export or copy it again")


def _texts(model: ModelProto) -> Iterator[Any]:
    """Yields every text in a model: names, documentation and metadata."""
    rest: list[Any] = [model]
    while rest:
        for field, value in rest.pop().ListFields():
            values = [value] if isinstance(value, str | bytes | Message) else value
            if field.type == field.TYPE_STRING:
                yield from values
            elif field.type == field.TYPE_MESSAGE:
                rest += values


def lift_constants(graph: GraphProto) -> None:
    """Turns Constant nodes with external data into initializers, in place, so that nothing reads
    their data yet."""
    kept = []
    for node in graph.node:
        values = [a for a in node.attribute if node.op_type == "Constant" and a.name == "value"]
        value = values[0].t if values else None
        if value is None or value.data_location != TensorProto.EXTERNAL:
            kept.append(node)
            continue
        graph.initializer.add().CopyFrom(value)
        graph.initializer[-1].name = node.output[0]
    if len(kept) < len(graph.node):
        copies = [NodeProto.FromString(node.SerializeToString()) for node in kept]
        del graph.node[:]
        graph.node.extend(copies)


def densify(graph: GraphProto, folder: Path) -> None:
    """Makes sparse initializers and Constants of a graph dense, in place, as onnxruntime does;
    external data is in `folder`."""
    graph.initializer.extend(_dense(sparse, folder) for sparse in graph.sparse_initializer)
    del graph.sparse_initializer[:]
    for node in graph.node:
        for inner in subgraphs_of(node):
            densify(inner, folder)
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "sparse_value":
                value = _dense(attribute.sparse_tensor, folder)
                attribute.CopyFrom(helper.make_attribute("value", value))


def _dense(sparse: SparseTensorProto, folder: Path) -> TensorProto:
    values = read_stored(sparse.values, folder)
    at = read_stored(sparse.indices, folder)
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    if at.ndim == 2:
        dense[tuple(at.T)] = values
    else:
        dense.reshape(-1)[at] = values
    return numpy_helper.from_array(dense, sparse.values.name)
