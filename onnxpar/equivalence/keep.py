"""Writes the part of a model, and of its ranks, where a proof ends, as two models that onnxruntime
runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from onnxpar.base.arrays import Array
from onnxpar.base.new_folder import check_place, new_folder
from onnxpar.equivalence.collectives import shard_bounds
from onnxpar.equivalence.evaluate import NotComputed, Values
from onnxpar.equivalence.program import Node, Program
from onnxpar.equivalence.ranks import PLUGIN, RankNode
from onnxpar.equivalence.walk import Walk

PARTS = ("model", "ranks")
_REDUCTIONS = {"sum": "Sum", "max": "Max", "min": "Min"}


def check_keep(folder: Path) -> Path:
    """The folder for kept windows. Errors: InputError if it cannot be written."""
    return check_place(folder, _foreign)


def _foreign(folder: Path) -> str | None:
    others = {path.name for path in folder.iterdir()} - {*PARTS}
    return f"has other files, such as {min(others)}" if others else None


def keep(walk: Walk, key: str, folder: Path) -> str:
    """Writes the nodes of the model that compute the tensor `key` from tensors that are related,
    the nodes of all ranks that come from them, with collectives as nodes of ONNX, and drawn values
    of what both read: a folder `model` and a folder `ranks`, as ONNX's tests have them. Returns a
    line that says so, or why nothing is written. Errors: OSError."""
    try:
        window, nodes = walk.window_of(key)
        values, own = walk.sampler.values(window, nodes)
        model = _Graph(values)
        for node in window.nodes:
            model.nodes.append(node.proto)
        model.add_inputs(walk.model, "")
        wanted = [name for name in window.nodes[-1].outputs if name]
        results = _results(walk, nodes, window.nodes[-1])
        ranks = _ranks_graph(nodes, own)
        for rank, program in enumerate(walk.ranks.programs):
            ranks.add_inputs(program, f"rank{rank}/")
        named = [f"rank{rank}/{name}" for name in results for rank in range(walk.ranks.size)]
        protos = [
            model.proto(wanted, walk.model.opsets),
            ranks.proto(named, walk.ranks.programs[0].opsets),
        ]
    except NotComputed as error:
        return f"kept    nothing: {error}"
    with new_folder(folder, _foreign) as made:
        for name, proto, graph in zip(PARTS, protos, (model, ranks), strict=True):
            data = made / name / "test_data_set_0"
            data.mkdir(parents=True)
            onnx.save(proto, made / name / "model.onnx")
            for number, (tensor, value) in enumerate(graph.inputs.items()):
                stored = numpy_helper.from_array(np.asarray(value), tensor)
                (data / f"input_{number}.pb").write_bytes(stored.SerializeToString())
    return f"kept    the part of the model in {folder}/model, that of ranks in {folder}/ranks"


def _results(walk: Walk, nodes: Sequence[RankNode], last: Node) -> list[str]:
    """What ranks have in the place of a node's results."""
    own = [n for n in nodes if n.first.origin == last.name] or list(nodes[-1:])
    read = {name for node in own for name in node.first.inputs}
    return [name for node in own for name in node.first.outputs[:1] if name not in read]


def _ranks_graph(nodes: Sequence[RankNode], own: Sequence[Values]) -> _Graph:
    graph = _Graph(
        {f"rank{r}/{name}": v for r, values in enumerate(own) for name, v in values.items()}
    )
    for node in nodes:
        if node.first.domain == PLUGIN:
            for rank in range(len(own)):
                graph.communicate(node, own, rank)
            continue
        for rank, each in enumerate(node.nodes):
            proto = NodeProto()
            proto.CopyFrom(each.proto)
            for names in (proto.input, proto.output):
                names[:] = [name and f"rank{rank}/{name}" for name in names]
            proto.name = f"rank{rank}/{proto.name}"
            graph.nodes.append(proto)
    return graph


@dataclass
class _Graph:
    """Nodes, and the values of the tensors that they may read."""

    values: Mapping[str, Array]
    nodes: list[NodeProto] = field(default_factory=list)
    inputs: dict[str, Array] = field(default_factory=dict)
    constants: dict[str, Array] = field(default_factory=dict)

    def add_inputs(self, program: Program, prefix: str) -> None:
        """Sorts what nodes read of one program into inputs and constants."""
        made = {name for node in self.nodes for name in node.output}
        for name in dict.fromkeys(name for node in self.nodes for name in node.input):
            is_own = name and name.startswith(prefix) and name not in self.constants
            if name in made or not is_own:
                continue
            if name not in self.values:
                raise NotComputed(f"{name} has no value")
            kind = self.constants if name.removeprefix(prefix) in program.constants else self.inputs
            kind[name] = self.values[name]

    def communicate(self, node: RankNode, own: Sequence[Values], rank: int) -> None:
        """Adds what a collective gives a rank, for tensors of these sizes."""
        first, attrs = node.first, [dict(each.attrs) for each in node.nodes]
        op, source, result = first.op.removeprefix("Start"), first.inputs[0], first.outputs[0]
        group = [int(member) for member in attrs[rank].get("group", range(len(own)))]
        me, mine = group.index(rank), attrs[rank]
        parts = [f"rank{member}/{source}" for member in group]
        shapes = [own[member][source].shape for member in group]
        target = f"rank{rank}/{result}"

        def cut(i: int, axis: int, sizes: Sequence[int] | None, index: int) -> str:
            """A shard of a member's tensor."""
            bounds = shard_bounds(shapes[i][axis], sizes, {"group": group})
            return self._slice(parts[i], axis, *bounds[index])

        def lists(index: int) -> list[list[int]]:
            return [own[member][first.inputs[index]].tolist() for member in group]

        if op in ("AllReduce", "ReduceScatter"):
            reduction = _REDUCTIONS.get(mine.get("op", "sum"))
            if reduction is None:
                raise NotComputed(f"{first.name} multiplies")
            is_whole = op == "AllReduce"
            whole = self._add(reduction, parts, target if is_whole else f"{target}::whole")
            if not is_whole:
                axis = int(mine["axis"]) % len(shapes[me])
                bounds = shard_bounds(shapes[me][axis], mine.get("sizes"), {"group": group})
                self._slice(whole, axis, *bounds[me], target)
            return
        if op == "AllToAll":
            pieces = [
                cut(i, attrs[m]["split_axis"], attrs[m].get("split_sizes"), me)
                for i, m in enumerate(group)
            ]
            axis = mine["concat_axis"]
        elif op == "AllToAllV":
            axis = mine.get("axis", 0)
            pieces = [cut(i, axis, sends, me) for i, sends in enumerate(lists(1))]
        elif op == "NeighborExchange":
            axis, before, after = (mine[name] for name in ("axis", "before", "after"))
            pieces = [parts[me]]
            if before[me]:
                size = shapes[me - 1][axis]
                pieces.insert(0, self._slice(parts[me - 1], axis, size - before[me], size))
            if after[me]:
                pieces.append(self._slice(parts[me + 1], axis, 0, after[me]))
        elif op == "HaloExchange":
            axis, (start, end) = mine["axis"], lists(1)[me]
            pieces = [self._slice(self._add("Concat", parts, "", axis=axis), axis, start, end)]
        elif op == "CollectivePermute":
            axis, at = 0, mine["sources"][me]
            pieces = [parts[at] if at >= 0 else self._add("Sub", parts[:1] * 2, "")]
        elif op == "Broadcast":
            axis, pieces = 0, [parts[int(mine.get("root", 0))]]
        elif op == "AllGather":
            axis, pieces = mine["axis"], parts
        else:  # a Gate
            axis, pieces = 0, [parts[me]]
        if len(pieces) == 1:
            self._add("Identity", pieces, target)
        else:
            self._add("Concat", pieces, target, axis=axis)

    def _slice(self, name: str, axis: int, start: int, end: int, target: str = "") -> str:
        bounds = []
        for number in (start, end, axis):
            bounds.append(f"bound{len(self.constants)}")
            self.constants[bounds[-1]] = np.array([number], np.int64)
        return self._add("Slice", [name, *bounds], target)

    def _add(self, op: str, inputs: Sequence[str], target: str, **attrs: Any) -> str:
        name = target or f"{op}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name, **attrs))
        return name

    def proto(self, outputs: Sequence[str], opsets: Mapping[str, int]) -> onnx.ModelProto:
        """The model."""
        graph = helper.make_graph(
            self.nodes, "window",
            [_port(name, value) for name, value in self.inputs.items()],
            [onnx.ValueInfoProto(name=name) for name in outputs],
            [numpy_helper.from_array(np.asarray(v), n) for n, v in self.constants.items()],
        )  # fmt: skip
        imports = [helper.make_opsetid(d, v) for d, v in opsets.items() if d != PLUGIN]
        return helper.make_model(graph, opset_imports=imports, ir_version=10)


def _port(name: str, value: Array) -> onnx.ValueInfoProto:
    kind = helper.np_dtype_to_tensor_dtype(value.dtype)
    return helper.make_tensor_value_info(name, kind, value.shape)
