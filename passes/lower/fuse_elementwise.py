"""fuse-elementwise: one loop computes neighbouring elementwise nodes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.compiler.pass_ import ORDER, Pass, PassContext, Stage
from onnxpar.graph.collectives import DOMAIN, FUSED_ELEMENTWISE
from onnxpar.graph.elementwise_groups import FEWEST, ONE, elementwise_units
from onnxpar.graph.origin import note_origins
from onnxpar.graph.subgraphs import cut_off, read_by, scopes


@dataclass(frozen=True)
class FuseElementwise(Pass):
    """Replace groups of elementwise nodes by one node, whose loop reads each operand once and
    writes only the results that other nodes read.

    onnxruntime runs a kernel for each node, and each kernel reads and writes all tensors of its
    node; an update by AdamW consists of 16 nodes. The bits of results stay the same. Nodes that
    onnxruntime itself fuses, such as the nodes of a Gelu, stay. An update runs as soon as its
    gradient is computed.

    Requires ordered collectives, after gate-recomputation. Ensures that the order of collectives
    stays the same.

    Example: shard(mesh="dp=2", strategy={"tensors": {"x": ["dp", None]}})

        chain (float[4,6] x, float[4,6] y) => (float[4,6] z, float[4,6] d) <float c = {2}>
        { a = Mul(x, c)  b = Add(a, y)  d = Mul(b, b)  e = Sub(d, x)  z = Exp(e) }

    Before:

        mesh dp=2
        input  x: float32 2x6 [dp, -]
        input  y: float32 2x6 [dp, -]
        const  c: float32 scalar []
        a: float32 4x6 [dp, -] = Mul(x, c)
        b: float32 4x6 [dp, -] = Add(a, y)
        d: float32 2x6 [dp, -] = Mul(b, b)
        e: float32 4x6 [dp, -] = Sub(d, x)
        z: float32 2x6 [dp, -] = Exp(e)
        output z: float32 2x6 [dp, -]
        output d: float32 2x6 [dp, -]

    After:

        mesh dp=2
        input  x: float32 2x6 [dp, -]
        input  y: float32 2x6 [dp, -]
        const  c: float32 scalar []
        d: float32 2x6 [dp, -], e: float32 4x6 [dp, -] = onnxpar.FusedElementwise(x, y, c)
                {program=Mul x0 s0; Add v0 x1; Mul v1 v1; Sub v2 x0, results=[2, 3]}
        z: float32 2x6 [dp, -] = Exp(e)
        output z: float32 2x6 [dp, -]
        output d: float32 2x6 [dp, -]
    """

    name: ClassVar[str] = "fuse-elementwise"
    stage = Stage.LOWER
    requires = (ORDER,)

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        programs = (graph, *ctx.lowered.programs.values())
        every = [scope for program in programs for scope in scopes(program)]
        if ctx.choices.units is None:
            by_scope = (elementwise_units(scope, lambda t: _kind(t, ctx)) for scope in every)
            ctx.choices.units = [[[n.name for n in unit] for unit in units] for units in by_scope]
        changed = [
            _fuse(scope, units, ctx) for scope, units in zip(every, ctx.choices.units, strict=True)
        ]
        return any(changed)


def _kind(tensor: gs.Tensor, ctx: PassContext) -> Hashable | None:
    """Returns a key for a tensor: tensors with equal keys have equal shapes on each rank, at all
    sizes. The key has the layout and, if the tensor has open sizes (known only at run time), its
    atoms (parts of dimensions); None for a tensor that no loop may have."""
    layout = ctx.layouts.get(tensor.name)
    if layout is None or tensor.dtype != np.float32:
        return None
    tensors = ctx.sharding.factors.tensors
    factors = tensors.get(tensor.name) or tensors.get(tensor.name.rpartition("@")[0])
    if factors is None and ctx.sharding.factors.open_atoms:
        return None
    atoms = tuple(x.atom for x in factors.leaves) if factors and factors.open else ()
    return ONE if not atoms and set(layout.shape) <= {1} else (layout.dims, atoms)


def _fuse(graph: gs.Graph, units: Sequence[Sequence[str]], ctx: PassContext) -> bool:
    """Replaces the units (groups of nodes, by name) of a graph that are large enough by fused
    nodes, and orders the nodes by units. False if no unit is."""
    by_name = {node.name: node for node in graph.nodes}
    is_named = len(by_name) == len(graph.nodes)  # else names are ambiguous
    if not is_named or all(len(unit) < FEWEST for unit in units):
        return False
    readers: dict[str, set[str]] = {t.name: {""} for t in graph.outputs}
    for node in graph.nodes:
        for tensor in read_by(node):
            readers.setdefault(tensor.name, set()).add(node.name)
    nodes: list[gs.Node] = []
    for unit in units:
        members = [by_name[name] for name in unit]
        if len(unit) < FEWEST:
            nodes += members
        else:
            fused = _fused(members, readers, ctx)
            nodes += [fused] if fused.outputs else []  # else no node reads a result
    graph.nodes = _updates_early(nodes, readers)
    return True


def _fused(members: Sequence[gs.Node], readers: dict[str, set[str]], ctx: PassContext) -> gs.Node:
    """Returns the node that computes the nodes `members`, and removes their operands and results.
    `readers` has the names of the nodes that read each tensor ("" for the graph)."""
    inside = {node.name for node in members}
    computed = {t.name for node in members for t in node.outputs}
    read = {t.name: t for node in members for t in node.inputs if t.name not in computed}
    ones = [name for name, tensor in read.items() if _kind(tensor, ctx) == ONE]
    tensors = [name for name in read if name not in ones]
    operand = {name: f"x{i}" for i, name in enumerate(tensors)}
    operand |= {name: f"s{i}" for i, name in enumerate(ones)}
    steps: list[str] = []
    for node in members:
        source = operand[node.inputs[0].name]
        if node.op != "Identity" or source[0] == "x":
            steps.append(" ".join([node.op, *(operand[t.name] for t in node.inputs)]))
            source = f"v{len(steps) - 1}"
        operand[node.outputs[0].name] = source
    results = [t for node in members for t in node.outputs if readers.get(t.name, set()) - inside]
    attrs = {
        "program": "; ".join(steps),
        "results": [int(operand[t.name][1:]) for t in results],
    }
    last = members[-1]
    for node in members:
        cut_off(node)
    operands = [read[name] for name in (*tensors, *ones)]
    fused = gs.Node(
        FUSED_ELEMENTWISE, f"{last.name}::fused", attrs, operands, results, domain=DOMAIN
    )
    note_origins(fused, members)
    return fused


def _updates_early(nodes: Sequence[gs.Node], readers: dict[str, set[str]]) -> list[gs.Node]:
    """Returns the nodes in another order: a fused node that computes only outputs of the graph
    comes right after its last dependency."""
    place = {t.name: i for i, node in enumerate(nodes) for t in node.outputs}
    behind: dict[int, list[gs.Node]] = {}
    for i, node in enumerate(nodes):
        is_last = node.op == FUSED_ELEMENTWISE and all(
            readers[t.name] == {""} for t in node.outputs
        )
        at = max((place.get(t.name, -1) for t in node.inputs), default=-1) if is_last else i
        behind.setdefault(at, []).append(node)
    return [node for at in sorted(behind) for node in behind[at]]
