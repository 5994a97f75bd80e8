"""Takes an encoder-decoder apart into an encoder and a decoder, such that no weight is in both.

Exporters write an encoder, a decoder for the first step and one for later steps, or one file with
both decoders as the branches of an If. The first decoder projects the encoder's result to the keys
and values of cross-attention; the later one reads these as a cache that it does not change, and
needs no first step: its cache of self-attention may be empty. So the projections go behind the
encoder, and the later decoder is used from the first token on.

Exporters take the batch of the projections from the shape of the decoder's activations. So the
whole first decoder goes behind the encoder at first; once the loader knows all sizes in closed
form, it folds these shapes away, and `drop_decoder` removes all layers of the decoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from onnxpar.base.errors import ModelError
from onnxpar.graph.branches import put_branch, taken_branch
from onnxpar.graph.model_folder import encoder_decoder_in
from onnxpar.graph.stored import nodes_before, reads_of, subgraphs_of
from onnxpar.graph.subgraphs import drop_unread, read_by

ENCODER, DECODER = "encoder", "decoder"
"""The parts of an encoder-decoder."""
_CHOICE = "use_cache_branch"
"""The input that chooses between the decoders of the first step and of later steps."""
_HIDDEN = "encoder_hidden_states"
"""The input of a decoder that is the encoder's result."""
_RESULT = "last_hidden_state"
_PAST, _PRESENT = "past_key_values.", "present."
_CUT, _GIVEN = "cross::", "cross::given::"
"""Prefixes of the names of the decoder, and of its inputs, behind the encoder."""


def read_part(proto: ModelProto, part: str, path: Path) -> tuple[ModelProto, list[tuple[str, str]]]:
    """Returns one part of the encoder-decoder in the folder of `path`, and the (input, output)
    pairs of the caches of cross-attention (none for the encoder).

    proto  the model in the file `path`
    part   ENCODER or DECODER

    The encoder's outputs have the names of the decoder's inputs. Errors: ModelError if the folder
    holds no encoder-decoder, or one of another form.
    """
    files = encoder_decoder_in(path.parent)
    if files is None:
        raise ModelError(f"{path.parent} holds no encoder-decoder; give the .onnx file")
    if part == DECODER:
        return _later_decoder(proto, path)
    first = onnx.load(str(files.first), load_external_data=False)
    return _with_projections(proto, path, _branch(first, False, files.first), files.first), []


def weight_files(part: str | None, path: Path) -> dict[str, str]:
    """Returns the names of the files with the weights of a part of a model, or of all of it (None),
    by the prefix that their names have in it."""
    files = encoder_decoder_in(path.parent) if part == ENCODER else None
    return {"": path.name} | ({} if files is None else {_CUT: files.first.name})


def drop_decoder(graph: gs.Graph) -> None:
    """Removes from the encoder's graph the nodes of the first decoder that no output needs, in
    place. Errors: ModelError if the projections still depend on an input of the decoder."""
    drop_unread(graph)
    for node in graph.nodes:
        for tensor in read_by(node):
            name = tensor.name.removeprefix(_GIVEN)
            if name != tensor.name and "::" not in name:
                raise ModelError(
                    "the keys and values of cross-attention do not follow from the encoder's "
                    f"result alone: {node.op} {node.name!r} reads the decoder's {name!r}; export "
                    "the model again with Optimum"
                )


def _later_decoder(proto: ModelProto, path: Path) -> tuple[ModelProto, list[tuple[str, str]]]:
    """Returns the decoder of later steps, which reads one token, and the (input, output) pairs of
    the caches of cross-attention. These caches become outputs, too, unchanged. Errors: ModelError
    for a decoder without them."""
    model = _branch(proto, True, path)
    graph = model.graph
    outputs = {port.name for port in graph.output}
    fixed = [port for port in graph.input if _is_cross(port.name, _PAST)]
    if not fixed:
        raise ModelError(
            f"{path}: the decoder has no inputs {_PAST}N.encoder.key and value; export the "
            "encoder-decoder with its caches (for Optimum, a task that ends in -with-past)"
        )
    pairs = [(port.name, port.name.replace(_PAST, _PRESENT, 1)) for port in fixed]
    stale = {after for _, after in pairs} & outputs  # dummies of a branch
    _keep_outputs(graph, [port for port in graph.output if port.name not in stale])
    _rename(graph, {name: f"{name}::unused" for name in stale})
    for port, (before, after) in zip(fixed, pairs, strict=True):
        graph.node.append(helper.make_node("Identity", [before], [after]))
        graph.output.append(_port(port, after))
    _remove_unread(graph)
    for port in graph.input:
        if port.name == "input_ids":
            port.type.tensor_type.shape.dim[1].dim_value = 1  # as exporters trace it
        elif port.name == _HIDDEN:
            _replace_hidden(graph, port, fixed[0].name, path)
    _remove_unread(graph)
    return model, pairs


def _replace_hidden(graph: GraphProto, port: ValueInfoProto, key: str, path: Path) -> None:
    """Replaces the input `port`, the encoder's result, by zeros of the same sizes: only sizes may
    be read in a later step. They are taken from `key`, a cached key. Errors: ModelError if a node
    reads the values."""
    readers = [node for node in graph.node if _HIDDEN in reads_of(node)]
    if any(node.op_type != "Shape" for node in readers):
        raise ModelError(
            f"{path}: the decoder reads {_HIDDEN!r} in every step; export it with caches of "
            "cross-attention"
        )
    nodes = _zeros(_HIDDEN, key, [0, 2, None], port.type.tensor_type.elem_type)
    kept = [*nodes, *graph.node]
    del graph.node[:]
    graph.node.extend(kept)
    graph.input.remove(port)


def _with_projections(encoder: ModelProto, path: Path, first: ModelProto, of: Path) -> ModelProto:
    """Returns the encoder with the first decoder behind it, whose outputs are the keys and values
    of cross-attention. `of` is the file of the first decoder, for errors. Errors: ModelError if the
    two do not fit."""
    results = [port.name for port in encoder.graph.output]
    cross = [port for port in first.graph.output if _is_cross(port.name, _PRESENT)]
    _keep_outputs(first.graph, cross)
    _remove_unread(first.graph)
    others = [port for port in first.graph.input if port.name != _HIDDEN]
    if _RESULT not in results or len(others) == len(first.graph.input) or not cross:
        raise ModelError(
            f"{path} and {of} are no encoder and decoder of one model: the encoder must have an "
            f"output {_RESULT!r}, the decoder an input {_HIDDEN!r} and outputs "
            f"{_PRESENT}N.encoder.key and value; export both again, with caches"
        )
    _check_opsets(encoder, path, first, of)
    names = {name: _CUT + name for name in _names(first.graph)} | {_HIDDEN: _RESULT}
    names |= {port.name: _GIVEN + port.name for port in others}
    names |= {port.name: port.name.replace(_PRESENT, _PAST, 1) for port in cross}
    _rename(first.graph, names)
    graph = encoder.graph
    for port in others:
        graph.node.extend(_sized_like_result(port))
    graph.node.extend(first.graph.node)
    graph.initializer.extend(first.graph.initializer)
    graph.sparse_initializer.extend(first.graph.sparse_initializer)
    encoder.functions.extend(first.functions)
    _keep_outputs(graph, [_port(port, names[port.name]) for port in cross])
    _remove_unread(graph)
    return encoder


def _sized_like_result(port: ValueInfoProto) -> list[NodeProto]:
    """Returns nodes that make zeros in place of an input of the first decoder: its values do not
    affect the projections. Sizes may, so the zeros have as many texts and tokens as the encoder's
    result."""
    counts: list[int | None] = [0, 1] if port.name.startswith("encoder_") else [0, None]
    if len(port.type.tensor_type.shape.dim) == 1:
        counts = [None]  # positions in the cache
    return _zeros(_GIVEN + port.name, _RESULT, counts, port.type.tensor_type.elem_type)


def _zeros(name: str, of: str, counts: Iterable[int | None], kind: int) -> list[NodeProto]:
    """Returns nodes that compute the tensor `name` of zeros, of the ONNX data type `kind`. For each
    dimension, `counts` has the axis of the tensor `of` that has its size; None for size 1."""
    nodes, sizes = [helper.make_node("Shape", [of], [f"{name}::shape"])], []
    for axis, at in enumerate(counts):
        sizes.append(f"{name}::{axis}")
        value = helper.make_tensor("value", TensorProto.INT64, [1], [1 if at is None else at])
        index = helper.make_node("Constant", [], [sizes[-1]], value=value)
        if at is not None:
            index.output[0] += "::axis"
            inputs = [f"{name}::shape", index.output[0]]
            nodes += [index, helper.make_node("Gather", inputs, [sizes[-1]])]
        else:
            nodes.append(index)
    nodes.append(helper.make_node("Concat", sizes, [f"{name}::sizes"], axis=0))
    zero = helper.make_tensor("value", kind, [1], [0])
    return [*nodes, helper.make_node("ConstantOfShape", [f"{name}::sizes"], [name], value=zero)]


def _branch(model: ModelProto, is_later: bool, path: Path) -> ModelProto:
    """Returns the model with only one of its decoders, that of later steps (`is_later`) or that of
    the first step, in place of the If; a model without such an If as it is. Errors: ModelError if
    the branches cannot be separated."""
    graph = model.graph
    choices = [n for n in graph.node if n.op_type == "If" and list(n.input) == [_CHOICE]]
    if not choices:
        return model
    condition = {_CHOICE: np.array(is_later)}
    outside = [*(t.name for t in graph.initializer), *(p.name for p in graph.input)]
    (choice,) = choices[:1]
    branch = taken_branch(choice, condition, outside)
    if len(choices) > 1 or branch is None:
        raise ModelError(
            f"{path}: cannot take the branches of {_CHOICE!r} apart; give decoder_model.onnx and "
            "decoder_with_past_model.onnx instead (Optimum: --no-post-process)"
        )
    put_branch(graph, choice, branch)
    del graph.value_info[:]
    _remove_unread(graph)
    return model


def _check_opsets(one: ModelProto, path: Path, other: ModelProto, of: Path) -> None:
    """Adds the opset imports of `other` to `one`. Errors: ModelError if the two import different
    versions of a domain."""
    known = {o.domain: o.version for o in one.opset_import}
    for opset in other.opset_import:
        if known.setdefault(opset.domain, opset.version) != opset.version:
            raise ModelError(
                f"{path} has opset {known[opset.domain]}, and {of} {opset.version}; export both "
                "with one opset"
            )
    del one.opset_import[:]
    one.opset_import.extend(helper.make_opsetid(*entry) for entry in known.items())
    one.ir_version = max(one.ir_version, other.ir_version)


def _is_cross(name: str, prefix: str) -> bool:
    """True for the name of a key or value of cross-attention, among inputs or outputs
    (`prefix`)."""
    return name.startswith(prefix) and ".encoder." in name


def _port(port: ValueInfoProto, name: str) -> ValueInfoProto:
    """Returns a copy of the input or output with another name."""
    copy = ValueInfoProto()
    copy.CopyFrom(port)
    copy.name = name
    return copy


def _keep_outputs(graph: GraphProto, ports: Iterable[ValueInfoProto]) -> None:
    """Replaces the outputs of a graph by `ports`."""
    kept = [_port(port, port.name) for port in ports]
    del graph.output[:]
    graph.output.extend(kept)


def _names(graph: GraphProto) -> set[str]:
    """Returns the names of all tensors of a graph and its bodies (of loops and branches)."""
    names = {t.name for t in (*graph.initializer, *graph.input)}
    names |= {t.values.name for t in graph.sparse_initializer}
    for node in graph.node:
        names.update(node.output)
        for inner in subgraphs_of(node):
            names |= _names(inner)
    return names - {""}


def _rename(graph: GraphProto, names: Mapping[str, str]) -> None:
    """Renames tensors of a graph and its bodies, in place, and drops their recorded types. Inputs
    and outputs of the main graph keep their names."""
    del graph.value_info[:]
    for tensor in graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for sparse in graph.sparse_initializer:
        sparse.values.name = names.get(sparse.values.name, sparse.values.name)
    for node in graph.node:
        node.name = ""
        for each in (node.input, node.output):
            each[:] = [names.get(name, name) for name in each]
        for inner in subgraphs_of(node):
            for port in (*inner.input, *inner.output):
                port.name = names.get(port.name, port.name)
            _rename(inner, names)


def _remove_unread(graph: GraphProto) -> None:
    """Removes nodes, weights and inputs that no output needs."""
    outputs = {port.name for port in graph.output}
    kept = nodes_before(graph.node, outputs)
    del graph.node[:]
    graph.node.extend(kept)
    needed = outputs.union(*map(reads_of, kept))
    for field in (graph.initializer, graph.input):
        left = [each for each in field if each.name in needed]
        del field[:]
        field.extend(left)
