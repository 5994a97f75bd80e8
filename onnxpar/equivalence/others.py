"""Collectives of other systems in rank files become those of the plugin, and ranks whose tensors
have names of their own get those of rank 0.

A system without tokens runs the collectives of a rank in the order of its file, and the first
collective of a group on one member meets the first on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from onnxpar.base.errors import ModelError
from onnxpar.equivalence.program import Node, Program, rewired
from onnxpar.equivalence.ranks import PLUGIN

_TENSORRT = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_to_all": "AllToAll",
}
_REDUCTIONS = ("sum", "prod", "max", "min")


def adopted(programs: Sequence[Program]) -> list[Program]:
    """The graphs of ranks with the plugin's collectives, and one name for what all ranks have.
    Errors: ModelError if a collective is of a kind that is not known."""
    tags: dict[tuple[tuple[int, ...], int], int] = {}
    found = [_with_collectives(p, rank, len(programs), tags) for rank, p in enumerate(programs)]
    for program in found[1:]:
        _align(program, found[0])
    return found


def _with_collectives(
    program: Program, rank: int, ranks: int, tags: dict[tuple[tuple[int, ...], int], int]
) -> Program:
    """A rank's graph in which tokens order the collectives of other systems; `tags` has the tag of
    each group's first, second, ... collective."""
    nodes, counts, token = list[Node](), dict[tuple[int, ...], int](), ""
    for node in program.nodes:
        found = _collective(node, ranks)
        if found is None:
            nodes.append(node)
            continue
        op, attrs = found
        where = f"{program.path}: {node.op} {node.name!r:.80}"
        if len(node.inputs) != 1 or len(node.outputs) != 1:
            raise ModelError(f"{where} has not one operand and one result")
        group = tuple(attrs["group"])
        if rank not in group:
            raise ModelError(f"{where} is of the group {[*group]!r:.80}, which lacks rank {rank}")
        counts[group] = counts.get(group, 0) + 1
        attrs["tag"] = tags.setdefault((group, counts[group]), len(tags))
        inputs = (node.inputs[0], token) if token else node.inputs
        token = f"{node.outputs[0]}::token"
        outputs = (node.outputs[0], token)
        nodes.append(
            replace(node, op=op, domain=PLUGIN, inputs=inputs, outputs=outputs, attrs=attrs)
        )
    return replace(program, nodes=nodes)


def _collective(node: Node, ranks: int) -> tuple[str, dict[str, Any]] | None:
    """The plugin's op and attributes of a collective; None for another node. All of these systems
    send equal blocks."""
    if node.domain == "com.microsoft" and node.op in ("AllReduce", "AllGather", "AllToAll"):
        return node.op, _of_onnxruntime(node, ranks)
    if node.domain == "" and node.op == "DistCollective":
        return _of_tensorrt(node, ranks)
    return None


def _of_onnxruntime(node: Node, ranks: int) -> dict[str, Any]:
    """onnxruntime's collectives are over all ranks: its docs/ContribOperators.md."""
    size = node.attrs.get("group_size", ranks if node.op == "AllReduce" else 1)
    if type(size) is not int or size != ranks:
        raise ModelError(
            f"{node.op} {node.name!r:.80} has group_size={size!r:.20}, but there are {ranks} ranks"
        )
    attrs: dict[str, Any] = {"group": list(range(ranks)), "equal": 1}
    if node.op == "AllGather":
        if type(node.attrs.get("axis")) is not int:
            raise ModelError(f"AllGather {node.name!r:.80} has no axis")
        attrs["axis"] = node.attrs["axis"]
    if node.op == "AllToAll":
        attrs |= {"split_axis": 0, "concat_axis": 0}
    return attrs


def _of_tensorrt(node: Node, ranks: int) -> tuple[str, dict[str, Any]]:
    """TensorRT's DistCollective, along the first dimension: its page among TensorRT's operators."""
    kind = str(node.attrs.get("collective_operation", "")).lower()
    if kind not in _TENSORRT:
        raise ModelError(f"DistCollective {node.name!r:.80} is {kind!r:.20}, which is not known")
    op = _TENSORRT[kind]
    given = node.attrs.get("groups", [])
    group = list(range(ranks)) if isinstance(given, list) and not given else given
    if not isinstance(group, list) or not all(type(m) is int and 0 <= m < ranks for m in group):
        raise ModelError(f"DistCollective {node.name!r:.80} has the group {group!r:.40}")
    count = node.attrs.get("nb_rank")
    if type(count) is not int or count != len(group):
        raise ModelError(
            f"DistCollective {node.name!r:.80} has nb_rank={count!r:.20}, "
            f"but its group has {len(group)} ranks"
        )
    attrs: dict[str, Any] = {"group": group, "equal": 1}
    if op in ("AllReduce", "ReduceScatter"):
        attrs["op"] = str(node.attrs.get("reduce_op", "")).lower()
        if attrs["op"] not in _REDUCTIONS:
            raise ModelError(
                f"DistCollective {node.name!r:.80} reduces by {attrs['op']!r:.20}; "
                f"known are {', '.join(_REDUCTIONS)}"
            )
    if op == "AllToAll":
        attrs |= {"split_axis": 0, "concat_axis": 0}
    elif op != "AllReduce":
        attrs["axis"] = 0
    return op, attrs


def _align(program: Program, first: Program) -> None:
    """Gives the tensors of a rank the names that rank 0 has for them, if both graphs have the same
    ops in the same order, and inputs and outputs keep their names."""
    pairs = list(zip(program.nodes, first.nodes, strict=False))
    alike = len(program.nodes) == len(first.nodes) and all(
        (a.kind, len(a.inputs), len(a.outputs)) == (b.kind, len(b.inputs), len(b.outputs))
        for a, b in pairs
    )
    if not alike or any(node.has_body for node in program.nodes):
        return
    names: dict[str, str] = {}
    for own, other in pairs:
        for name, wanted in zip(
            (*own.inputs, *own.outputs), (*other.inputs, *other.outputs), strict=True
        ):
            if names.setdefault(name, wanted) != wanted or (not name) != (not wanted):
                return
    ports = {*program.inputs, *program.outputs}
    rest = {*program.constants.names(), *ports} - names.keys()
    is_unique = len({*names.values()}) == len(names) and not rest & {*names.values()}
    if not is_unique or any(names.get(port, port) != port for port in ports):
        return
    if any(name != wanted for name, wanted in names.items()):
        program.nodes = [
            rewired(node, [names[n] for n in node.inputs], [names[n] for n in node.outputs])
            for node in program.nodes
        ]
        program.constants.rename(names)
        program.shapes = {names.get(n, n): shape for n, shape in program.shapes.items()}
        program.types = {names.get(n, n): kind for n, kind in program.types.items()}
