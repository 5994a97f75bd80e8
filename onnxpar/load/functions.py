"""Inlines the functions of a model: puts the nodes of a function in place of each call."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import onnx
import onnx.inliner
from onnx import FunctionProto, NodeProto

from onnxpar.base.errors import ModelError
from onnxpar.graph.checker import check_functions
from onnxpar.graph.shapes_by_onnxruntime import is_known
from onnxpar.graph.stored import nodes_of, reads_of, subgraphs_of

_NEWEST = (1 << 31) - 1
"""The largest number of an opset that onnx takes."""

MOST_NODES = 100_000
"""Most nodes that calls may expand into, or ten times the nodes in the file if that is more."""
_Key = tuple[str, str, str]


def inlined(proto: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """Returns the model with the calls of its functions replaced by the functions' nodes. A
    function with the name of an op that onnxruntime has is dropped, because onnxruntime runs its
    own op. Errors: ModelError, before anything expands, if a function calls itself, or if the calls
    expand into too many nodes."""
    functions = [f for f in proto.functions if not is_known(f.name, f.domain)]
    if len(functions) < len(proto.functions):
        del proto.functions[:]
        proto.functions.extend(functions)
    if not functions:
        return proto
    _check_expansion(proto, path)
    _take_opsets(proto, path)
    check_functions(proto, path)
    try:
        return onnx.inliner.inline_local_functions(proto)
    except (RuntimeError, onnx.checker.ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(
            f"{path}: its functions cannot be inlined: {reason}; export the model without functions"
        ) from None


def _take_opsets(proto: onnx.ModelProto, path: Path) -> None:
    """Sets the opsets of each function to the model's opsets, by which onnxruntime runs functions.
    Errors: ModelError for a node that does not exist in the model's opset, which onnxruntime
    refuses, too."""
    model = {o.domain.removeprefix("ai.onnx"): o.version for o in proto.opset_import}
    for function in proto.functions:
        for entry in function.opset_import:
            own, entry.version = (
                entry.version,
                model.get(entry.domain.removeprefix("ai.onnx"), entry.version),
            )
            if own == entry.version:
                continue
            for node in _nodes(function.node):
                if node.domain == entry.domain and not _has(node, entry.version):
                    raise ModelError(
                        f"{path}: {node.op_type} in function {function.domain}.{function.name} is "
                        f"of opset {own}, but the model, by whose opset it runs, has "
                        f"{entry.version}; export both with one opset"
                    )


def _has(node: NodeProto, opset: int) -> bool:
    """True if the opset has the node's op, with its attributes and its number of inputs."""
    try:
        schema = onnx.defs.get_schema(node.op_type, min(opset, _NEWEST), node.domain)
    except onnx.defs.SchemaError:
        return onnx.defs.has(node.op_type, node.domain) is False
    known = {*schema.attributes, ""}
    return len(node.input) <= schema.max_input and {a.name for a in node.attribute} <= known


def _check_expansion(proto: onnx.ModelProto, path: Path) -> None:
    """Counts the nodes that the model would have after inlining. Errors: ModelError if there are
    too many, or if a function reads an unknown name or calls itself."""
    for function in proto.functions:
        names = {"", *function.input, *(name for node in function.node for name in node.output)}
        lost = sorted({name for node in function.node for name in reads_of(node)} - names)
        if lost:
            raise ModelError(
                f"{path}: function {f'{function.domain}.{function.name}'!r} reads {lost[0]!r}, "
                "but the function has no input and no result of that name; export the model again"
            )
    bodies = {_key(f): list(_nodes(f.node)) for f in proto.functions}
    sizes: dict[_Key, int] = {}
    for start in bodies:
        path_down = [start]
        while path_down:
            key = path_down[-1]
            called = (k for n in bodies[key] if (k := _key(n)) in bodies)
            missing = next((k for k in called if k not in sizes), None)
            if missing is None:
                sizes[key] = sum(sizes.get(_key(n), 1) for n in bodies[key])
                path_down.pop()
            elif missing in path_down:
                name = f"{missing[0]}.{missing[1]}"
                raise ModelError(
                    f"{path}: function {name!r} calls itself, directly or through others; "
                    "write it as a Loop"
                )
            else:
                path_down.append(missing)
    nodes = list(nodes_of(proto.graph))
    total = sum(sizes.get(_key(n), 1) for n in nodes)
    written = len(nodes) + sum(map(len, bodies.values()))
    if total > max(MOST_NODES, 10 * written):
        largest = max(sizes, key=lambda key: sizes[key])
        raise ModelError(
            f"{path}: calls of functions expand into {total:,} nodes, more than {MOST_NODES:,}; "
            f"each call of {f'{largest[0]}.{largest[1]}'!r} expands into {sizes[largest]:,}; "
            "export the model without functions"
        )


def _key(entry: FunctionProto | NodeProto) -> _Key:
    """Returns the key by which a call and its function find each other: domain, name and
    overload."""
    name = entry.name if isinstance(entry, FunctionProto) else entry.op_type
    return "" if entry.domain == "ai.onnx" else entry.domain, name, entry.overload


def _nodes(nodes: Iterable[Any]) -> Iterable[NodeProto]:
    """Yields the nodes, and the nodes of their bodies, at any depth."""
    for node in nodes:
        yield node
        for inner in subgraphs_of(node):
            yield from nodes_of(inner)
