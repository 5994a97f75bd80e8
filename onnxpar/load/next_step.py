"""Adds outputs to a decoder that are the inputs of its next step, if each text goes on with its
likeliest token: the tokens, and their positions. So ranks can take several steps, one after the
other, without the process that drives them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import onnx_graphsurgeon as gs
from onnx import GraphProto, TensorProto, ValueInfoProto, helper

from onnxpar.load.top_k_logits import BEST_TOKENS, PICK_DIM

NEXT = "next_{}"
"""The output with the next value of an input."""


def add_next_step(graph: GraphProto, tokens: str, positions: Sequence[str]) -> None:
    """Adds the nodes and outputs to a decoder that has candidates (`candidates.py`), in place.

    tokens     the input of tokens, whose next value are the likeliest tokens, (1, picks)
    positions  inputs that are 1 more in the next step
    """
    ports = {port.name: port for port in graph.input}
    scope = "next_step"

    def constant(name: str, dtype: int, *values: int) -> str:
        tensor = helper.make_tensor("value", dtype, [len(values)], values)
        output = f"{scope}/{name}"
        graph.node.append(helper.make_node("Constant", [], [output], output, value=tensor))
        return output

    def add(op: str, operands: Sequence[str], name: str, **attrs: Any) -> str:
        graph.node.append(helper.make_node(op, operands, [name], name, **attrs))
        return name

    int64 = TensorProto.INT64
    zero, one = constant("zero", int64, 0), constant("one", int64, 1)
    best = add("Slice", [BEST_TOKENS, zero, one, one], f"{scope}/best")
    row = add("Reshape", [best, constant("shape", int64, 1, -1)], f"{scope}/row")
    add("Cast", [row], NEXT.format(tokens), to=_dtype(ports[tokens]))
    graph.output.append(
        helper.make_tensor_value_info(NEXT.format(tokens), _dtype(ports[tokens]), [1, PICK_DIM])
    )
    for name in positions:
        more = constant(f"{name}/one", _dtype(ports[name]), 1)
        add("Add", [name, more], NEXT.format(name))
        port = graph.output.add()
        port.CopyFrom(ports[name])
        port.name = NEXT.format(name)


def _dtype(port: ValueInfoProto) -> int:
    return int(port.type.tensor_type.elem_type)


def next_of(inputs: Iterable[str], outputs: Collection[str]) -> dict[str, str]:
    """Returns, for each of `inputs`, the output with its next value, as far as a decoder has such
    outputs."""
    return {name: NEXT.format(name) for name in inputs if NEXT.format(name) in outputs}


def next_outputs(graph: gs.Graph) -> frozenset[str]:
    """Returns the outputs of a decoder with the inputs of its next step. All ranks must hold them
    whole, to take that step alone."""
    ports = [[port.name for port in each] for each in (graph.inputs, graph.outputs)]
    return frozenset(next_of(*ports).values())
