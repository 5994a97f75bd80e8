"""Computes what depends on constants alone, by onnxruntime."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from hashlib import sha256

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxpar.base.arrays import Array
from onnxpar.equivalence.evaluate import Runner
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
    schema_of,
)
from onnxpar.equivalence.ranks import PLUGIN
from onnxpar.equivalence.trace import MOVED, move

MOST_EQUAL = 64
"""The most elements of constants that are compared with each other."""


_GROWING = frozenset(["ConstantOfShape", "Expand", "Tile", "Range", "Pad", "OneHot", "EyeLike"])
"""Ops whose results may be much larger than their operands, by the values of these."""
_NO_TENSORS = frozenset(["SequenceEmpty", "SequenceConstruct", "SplitToSequence", "Optional"])
"""Ops that make something else than a tensor from tensors."""
_EXACT = """
Abs Add And Cast Ceil Clip Concat Constant ConstantOfShape DequantizeLinear Div Equal Expand
EyeLike Flatten Floor Gather GatherElements GatherND Greater GreaterOrEqual Identity Less
LessOrEqual Max Min Mul Neg Not OneHot Or Pad QuantizeLinear Range Reciprocal Reshape Round
ScatterElements ScatterND Shape Sign Size Slice Split Sqrt Squeeze Sub Tile Transpose Trilu
Unsqueeze Where
"""
"""Ops whose results have the same bits in any shape."""
_SIZES = frozenset([("", "Shape"), ("", "Size")])
"""Ops that read nothing but a shape."""
MOST_ELEMENTS = 1 << 24
"""The most elements of a computed constant."""


Known = dict[bytes, list[Array]]
"""What is computed already, by the digest of the nodes that compute it and of what they read."""


MOST_FILLED = 1 << 31
"""The most elements of a constant that are all the same."""


def fold(
    program: Program, keeps: bool = False, infers: bool = True, computed: Known | None = None
) -> None:
    """Adds the values of nodes that read only constants to a program's constants, and removes these
    nodes, unless `keeps`. Sizes of tensors of known shape are constants, too; if it `infers`,
    constants tell more shapes. Errors: NotComputed if onnxruntime cannot compute one."""
    computed = {} if computed is None else computed
    while True:
        _fold_once(program, keeps, computed)
        if not keeps and _take_branches(program):
            continue
        known = len(program.shapes)
        if not infers or not known:
            return
        for node in program.nodes:
            if any(name and name not in program.shapes for name in node.outputs):
                infer(node, program)
        if len(program.shapes) == known:
            return


def _fold_once(program: Program, keeps: bool, computed: Known) -> None:
    rest, constant = [], list[Node]()
    known = set(program.constants.names())
    makers = {name: node for node in program.nodes for name in node.outputs}
    for given in program.nodes:
        node = given
        if node.kind == ("", "CastLike") and node.inputs[0] in known:
            node = _cast(node, program, makers)
        if node.kind in _SIZES and node.inputs[0] in program.shapes:
            shape = np.array(program.shapes[node.inputs[0]], np.int64)
            start, end = node.attrs.get("start", 0), node.attrs.get("end")
            value = shape[slice(start, end)] if node.op == "Shape" else shape.prod()
            program.constants.add(node.outputs[0], np.asarray(value))
            known.add(node.outputs[0])
            continue
        if node.outputs and all(name in known for name in node.outputs):
            rest.append(given)
            continue
        if not _is_constant(node, known):
            rest.append(given)
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
            rest.append(given)
            continue
        known |= set(node.outputs)
    read = {name for node in rest for name in (*node.inputs, *captured(node.proto))}
    read |= {*program.outputs}
    made = [n for node in constant for n in node.outputs if n in read]
    _compute(constant, made, program, computed)
    if not keeps:
        program.nodes = rest


def _take_branches(program: Program) -> bool:
    """Puts the nodes of a branch in the place of each If whose condition is a constant; False if
    there is none."""
    nodes: list[Node] = []
    names = {*program.constants.names(), *program.inputs}
    names |= {name for node in program.nodes for name in node.outputs}
    for node in program.nodes:
        known = program.constants.get(node.inputs[0]) if node.kind == ("", "If") else None
        branch = None if known is None else "then_branch" if known.all() else "else_branch"
        body = None if branch is None else node.bodies[branch]
        if body is None or body.own & names:
            nodes.append(node)
            continue
        names |= body.own
        for name, value in body.constants.items():
            program.constants.add(name, value)
        nodes += body.nodes
        for name, inner in zip(node.outputs, body.outputs, strict=True):
            if name:
                nodes.append(read_node(helper.make_node("Identity", [inner], [name])))
    is_taken = len(nodes) != len(program.nodes) or nodes != program.nodes
    program.nodes = nodes
    return is_taken


def _cast(node: Node, program: Program, makers: Mapping[str, Node]) -> Node:
    """The Cast that a CastLike is, if the type of its second operand is known; else the node."""
    kind = _type(node.inputs[1], program, makers)
    if not kind:
        return node
    proto = onnx.NodeProto()
    proto.CopyFrom(node.proto)
    proto.op_type = "Cast"
    del proto.input[1:]
    proto.attribute.append(helper.make_attribute("to", kind))
    return read_node(proto)


def _type(name: str, program: Program, makers: Mapping[str, Node]) -> int:
    """The type of a tensor: that of the operand which has the same one, and so on; 0 if none is
    known."""
    while not program.types.get(name):
        if name in program.constants:
            return int(helper.np_dtype_to_tensor_dtype(program.constants[name].dtype))
        node = makers.get(name)
        schema = None if node is None else schema_of(node, program.opsets)
        if node is not None and node.domain == PLUGIN:
            name = node.inputs[0]
        elif node is None or schema is None or node.op == "Cast":
            return 0 if node is None else int(node.attrs.get("to", 0))
        else:
            place = min(node.outputs.index(name), len(schema.outputs) - 1)
            kind = schema.outputs[place].type_str
            pairs = zip(node.inputs, schema.inputs, strict=False)
            name = next((own for own, port in pairs if own and port.type_str == kind), "")
    return program.types[name]


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
    is_rounded = any(program.constants.is_rounded(name) for name in node.inputs)
    for name, value in zip(node.outputs, results, strict=True):
        program.constants.add(name, value, is_rounded)
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
    if node.domain != "" or node.op in RANDOM or node.op in _NO_TENSORS or node.has_body:
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
    rounded: set[str] = set()
    for node in nodes:
        is_exact = node.domain == "" and node.op in _EXACT.split()
        read = any(name in rounded or program.constants.is_rounded(name) for name in node.inputs)
        rounded |= {*node.outputs} if read or not is_exact else set()
    if wanted:
        for name, value in zip(wanted, _run(nodes, wanted, program, computed), strict=True):
            program.constants.add(name, value, name in rounded)


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
    if key not in computed:
        computed[key] = Runner(data).run(wanted, {})
    return computed[key]
