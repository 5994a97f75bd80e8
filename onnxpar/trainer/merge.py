"""Writes the weights of a checkpoint into the model from which the training step was made."""

from __future__ import annotations

import os
from pathlib import Path

from onnx import GraphProto

from onnxpar.base.arrays import Array
from onnxpar.base.errors import ModelError, OnnxparError
from onnxpar.graph.given_model import Source, model_file
from onnxpar.graph.stored import check_stored, graphs_of, nodes_of, stored_tensors
from onnxpar.graph.training_spec import AVERAGE, IN_MODEL
from onnxpar.graph.write_model import NewValue, write_model
from onnxpar.load.read_file import read_proto
from onnxpar.load.untie import untie
from onnxpar.planner.refuse_overwriting import refuse_overwriting
from onnxpar.trainer.checkpoint import Checkpoint


def merge(
    checkpoint: str | os.PathLike[str],
    model: Source,
    output: str | os.PathLike[str],
    *,
    training: bool = False,
    ema: bool = False,
) -> int:
    """Writes the model with the weights of a checkpoint, which may be from any mesh. Returns the
    number of replaced weights.

    checkpoint  a checkpoint, or a folder whose newest complete checkpoint is used
    model       the model that was trained: a file, an onnx.ModelProto, or its bytes
    output      the file to write
    training    True to leave Dropout and batch-norm in training mode; by default they are switched
                to inference
    ema         True for the moving averages of the weights (`grad --ema`)

    A shared vector that was given a copy per node for training becomes several weights. Errors:
    ModelError if the model lacks a weight of the checkpoint, or has it with another shape.
    """
    with model_file(model) as path:
        return _merge(Checkpoint.load(checkpoint), path, Path(output), training, ema)


def _merge(checkpoint: Checkpoint, path: Path, target: Path, training: bool, ema: bool) -> int:
    proto = read_proto(path)
    if not target.parent.is_dir():
        raise OnnxparError(f"{target.parent}: no such folder for the output")
    refuse_overwriting({"model": path, "output": target})
    if not training:
        _to_inference(proto.graph)
    slots = [slot for slot in checkpoint.slots if slot.kind in IN_MODEL]
    states = {slot.input: slot.input for slot in slots}
    if ema:
        averages = {slot.of: slot.input for slot in checkpoint.slots if slot.kind == AVERAGE}
        if not averages:
            raise ModelError(
                f"{checkpoint.path} has no moving averages; leave --ema out, or write the step "
                "with `onnxpar grad --ema`"
            )
        states |= averages
    stored = {slot.input: slot.stored or {slot.input: False} for slot in slots}
    trained = {name: states[state] for state, names in stored.items() for name in names}
    turned = {name for names in stored.values() for name, is_turned in names.items() if is_turned}
    known = {t.name for t in proto.graph.initializer}
    apart = {name.rpartition("@")[0] for name in trained if name not in known}
    if apart:
        untie(proto.graph, apart)
    tensors = {t.name: t for t in stored_tensors(proto.graph)}
    for name in trained:
        if name not in tensors:
            raise ModelError(
                f"{path} has no weight {name!r}, which the checkpoint {checkpoint.path} has; give "
                "the model from which the step was written"
            )
    for tensor in tensors.values():
        check_stored(tensor, path)

    def value(name: str) -> NewValue | None:
        if name not in trained:
            return None
        blank = _oriented(checkpoint.states.blank(trained[name]), name in turned)
        if list(blank.shape) != list(tensors[name].dims):
            raise ModelError(
                f"{path}: {name!r} has the shape {list(tensors[name].dims)}, but "
                f"{list(blank.shape)} in the checkpoint {checkpoint.path}"
            )

        def fill(whole: Array) -> None:
            checkpoint.states.fill(trained[name], _oriented(whole, name in turned))

        return NewValue(blank.dtype, blank.shape, fill)

    write_model(proto, path.parent, target, value)
    return len(trained)


def _oriented(value: Array, is_transposed: bool) -> Array:
    return value.T if is_transposed else value


def _to_inference(graph: GraphProto) -> None:
    """Switches Dropout and BatchNormalization to inference, in place: Dropout returns its input,
    BatchNormalization uses its running statistics. Removes constants that no node reads any
    more."""
    flags: set[str] = set()
    for node in nodes_of(graph):
        if node.op_type == "Dropout":
            flags.update(node.input[2:])
            del node.input[2:]
        elif node.op_type == "BatchNormalization":
            del node.output[1:]
            for attribute in node.attribute:
                if attribute.name == "training_mode":
                    attribute.i = 0
    idle = flags - {name for node in nodes_of(graph) for name in node.input}
    for scope in graphs_of(graph):
        unread = idle - {port.name for port in scope.output}
        for tensor in [t for t in scope.initializer if t.name in unread]:
            scope.initializer.remove(tensor)
        for node in [n for n in scope.node if n.op_type == "Constant" and n.output[0] in unread]:
            scope.node.remove(node)
