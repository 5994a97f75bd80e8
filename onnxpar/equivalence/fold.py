"""Computes what depends on constants alone, by onnxruntime."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import sha256

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxpar.base.arrays import Array
from onnxpar.equivalence.evaluate import NotComputed, plain_session
from onnxpar.equivalence.lemma import NotShown
from onnxpar.equivalence.program import (
    MOST_FOLDED,
    MOST_SIZE,
    RANDOM,
    Node,
    Program,
    captured,
    infer,
    read_node,
    rewired,
)
from onnxpar.equivalence.trace import MOVED, move

MOST_EQUAL = 64
"""The most elements of constants that are compared with each other."""


_GROWING = frozenset(["ConstantOfShape", "Expand", "Tile", "Range", "Pad", "OneHot", "EyeLike"])
"""Ops whose results may be much larger than their operands, by the values of these."""
MOST_ELEMENTS = 1 << 24
"""The most elements of a computed constant."""


Known = dict[bytes, list[Array]]
"""What is computed already, by the digest of the nodes that compute it and of what they read."""


MOST_FILLED = 1 << 31
"""The most elements of a constant that are all the same."""


def fold(program: Program, keeps: bool = False, computed: Known | None = None) -> None:
    """Adds the values of nodes that read only constants to a program's constants, and removes these
    nodes, unless `keeps`. Sizes of tensors of known shape are constants, too; constants may tell
    more shapes. Errors: NotComputed if onnxruntime cannot compute one."""
    computed = {} if computed is None else computed
    while True:
        _fold_once(program, keeps, computed)
        known = len(program.shapes)
        if keeps or not known:
            return
        for node in program.nodes:
            if any(name and name not in program.shapes for name in node.outputs):
                infer(node, program)
        if len(program.shapes) == known:
            return


def _fold_once(program: Program, keeps: bool, computed: Known) -> None:
    rest, constant = [], list[Node]()
    known = set(program.constants.names())
    for node in program.nodes:
        if node.op == "Shape" and node.domain == "" and node.inputs[0] in program.shapes:
            shape = np.array(program.shapes[node.inputs[0]], np.int64)
            start, end = node.attrs.get("start", 0), node.attrs.get("end")
            program.constants.add(node.outputs[0], shape[slice(start, end)])
            known.add(node.outputs[0])
            continue
        if node.outputs and all(name in known for name in node.outputs):
            rest.append(node)
            continue
        if not _is_constant(node, known):
            rest.append(node)
            continue
        is_small = _reads_little(node, program)
        if not is_small or node.op in _GROWING:
            made = [n for each in constant for n in each.outputs if n]
            _compute(constant, made, program, computed)
            constant.clear()
        if node.kind == ("", "ConstantOfShape") and _fill(node, program):
            pass
        elif is_small and not _makes_much(node, program):
            constant.append(node)
        elif not _move(node, program):
            rest.append(node)
            continue
        known |= set(node.outputs)
    read = {name for node in rest for name in node.inputs} | set(program.outputs)
    made = [n for node in constant for n in node.outputs if n in read]
    _compute(constant, made, program, computed)
    if not keeps:
        program.nodes = rest


def _move(node: Node, program: Program) -> bool:
    """Adds the results of a node that moves the elements of large constants; False for others."""
    if node.op not in MOVED:
        return False
    values = [program.constants[name] if name else None for name in node.inputs]
    count = len(values) if node.op == "Concat" else 1
    data = [value for value in values[:count] if value is not None]
    is_filled = any(value.size > MOST_ELEMENTS and not any(value.strides) for value in data)
    if is_filled and node.op in ("Concat", "Gather"):  # which need the room
        return False
    try:
        results = move(node, data, values[count:])
    except (NotShown, ValueError, IndexError, TypeError):
        return False
    for name, value in zip(node.outputs, results, strict=True):
        program.constants.add(name, value)
    return True


def drop_unneeded(program: Program, outputs: Sequence[str]) -> None:
    """Removes the nodes on which none of these outputs depends."""
    wanted, kept = {*outputs}, list[Node]()
    for node in reversed(program.nodes):
        if wanted & {*node.outputs}:
            wanted |= {*node.inputs} | captured(node.proto)
            kept.append(node)
    program.nodes = kept[::-1]


def merge_equal(program: Program) -> None:
    """Makes nodes that compute what a node before them computes Identities of its results: ranks
    may have one node for both."""
    first: dict[object, Node] = {}
    same = _equal_constants(program)
    merged: list[Node] = []
    for node in program.nodes:
        inputs = tuple(same.get(name, name) for name in node.inputs)
        attrs = sorted(a.SerializeToString(deterministic=True) for a in node.proto.attribute)
        key = node.kind, inputs, tuple(attrs), tuple(map(bool, node.outputs))
        other = None if node.op in RANDOM and node.domain == "" else first.setdefault(key, node)
        if other is None or other is node:
            merged.append(node)
            continue
        for name, source in zip(node.outputs, other.outputs, strict=True):
            if name:
                same[name] = source
                merged.append(read_node(helper.make_node("Identity", [source], [name], node.name)))
    program.nodes = [
        rewired(node, [same.get(name, name) for name in node.inputs], node.outputs)
        for node in merged
    ]


def _equal_constants(program: Program) -> dict[str, str]:
    """For each small constant, the first with the same value, by name."""
    first: dict[object, str] = {}
    same = {}
    for name in sorted({name for node in program.nodes for name in node.inputs}):
        if name in program.constants and math.prod(program.constants.shape(name)) <= MOST_EQUAL:
            value = program.constants[name]
            content = value.dtype, value.shape, value.tobytes()
            same[name] = name if value.dtype == object else first.setdefault(content, name)
    return same


def _is_constant(node: Node, known: set[str]) -> bool:
    """True for a node that onnxruntime can compute from constants alone."""
    if node.domain != "" or node.op in RANDOM or node.has_body:
        return False
    return all(name in known for name in node.inputs if name)


def _reads_little(node: Node, program: Program) -> bool:
    shapes = [program.constants.shape(n) for n in node.inputs if n in program.constants]
    return sum(map(math.prod, shapes)) * 8 <= MOST_FOLDED


def _makes_much(node: Node, program: Program) -> bool:
    """True if the results are known to be large, or may be and are not known."""
    if any(name and name not in program.shapes for name in node.outputs):
        infer(node, program)
    if node.op in _GROWING and any(n and n not in program.shapes for n in node.outputs):
        return True
    return any(math.prod(program.shapes.get(n, ())) > MOST_ELEMENTS for n in node.outputs)


def _fill(node: Node, program: Program) -> bool:
    """Adds the result of a ConstantOfShape, which takes the room of one element; False if its shape
    is none."""
    shape = tuple(program.constants[node.inputs[0]].tolist())
    if any(not 0 <= size < MOST_SIZE for size in shape) or math.prod(shape) > MOST_FILLED:
        return False
    value = np.asarray(node.attrs.get("value", np.zeros(1, np.float32))).reshape(())
    program.constants.add(node.outputs[0], np.broadcast_to(value, shape))
    return True


def _compute(
    nodes: Sequence[Node], wanted: Sequence[str], program: Program, computed: Known
) -> None:
    if wanted:
        for name, value in zip(wanted, _run(nodes, wanted, program, computed), strict=True):
            program.constants.add(name, value)


def _run(
    nodes: Sequence[Node], wanted: Sequence[str], program: Program, computed: Known
) -> list[Array]:
    made = {name for node in nodes for name in node.outputs}
    read = {name for node in nodes for name in node.inputs if name} - made
    stored = [numpy_helper.from_array(np.asarray(program.constants[n]), n) for n in sorted(read)]
    outputs = [onnx.ValueInfoProto(name=name) for name in wanted]
    graph = helper.make_graph([n.proto for n in nodes], "constants", [], outputs, stored)
    opsets = [helper.make_opsetid(d, v) for d, v in program.opsets.items() if d != "onnxpar"]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    data = model.SerializeToString(deterministic=True)
    key = sha256(data).digest()
    try:
        if key not in computed:
            results = plain_session(data).run(list(wanted), {})
            computed[key] = [np.asarray(value) for value in results]
        return computed[key]
    except Exception as error:  # onnxruntime raises types of its own
        raise NotComputed(f"{error!s:.200}") from None
