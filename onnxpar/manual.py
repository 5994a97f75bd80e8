"""Manual parallelism: what a program that is written per rank needs to know of its mesh.

The model is one rank's program, as the body of JAX's shard_map is: shapes of inputs and outputs
are those of a rank. A strategy's tensor entries say how global arrays are dealt to inputs and
weights and assembled from outputs; what has no entry is whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import onnx
import onnx_graphsurgeon as gs
from onnx import NodeProto

from onnxpar.collective import DOMAIN
from onnxpar.collective_shapes import OPS, result_types
from onnxpar.errors import StrategyError
from onnxpar.layout import Factor, Layout
from onnxpar.mesh import Axes, Mesh, parts_over
from onnxpar.shapes import Walk
from onnxpar.sharding import overlaps
from onnxpar.standard_shardings import parse_axes
from onnxpar.strategy import Strategy, matching, read_ask
from onnxpar.subgraphs import subgraphs

MANUAL = "manual"
"""The preset's name."""
REPLICAS = "@replicas"
"""Ends the names of outputs that hold the copies of others."""


@dataclass(frozen=True)
class Manual:
    """A mesh, and how tensors are dealt over it. Errors: StrategyError for what a manual program
    has no use for."""

    mesh: Mesh
    strategy: Strategy

    def __post_init__(self) -> None:
        if self.strategy.shard:
            raise StrategyError(
                f"{self.strategy.source}: 'shard' splits ops, which a manual program does itself; "
                "'tensors' says how inputs, weights and outputs are dealt"
            )

    def check_names(self, names: Iterable[str]) -> None:
        """Errors: StrategyError for an entry that matches no input, weight or output."""
        names = list(names)
        for pattern in self.strategy.tensors:
            matching(str(pattern), names, "input, weight or output", self.strategy.source)

    def input_layout(self, name: str, local: Sequence[int]) -> Layout:
        """The layout of a tensor of which each rank holds a part of this shape."""
        axes = self._axes(name, len(local))
        return Layout(tuple(Factor(n * parts_over(a), a) for n, a in zip(local, axes, strict=True)))

    def weight_layout(self, name: str, shape: Sequence[int]) -> Layout:
        """The layout of a weight of this global shape. Errors: StrategyError where it does not
        divide."""
        axes = self._axes(name, len(shape))
        for i, (size, over) in enumerate(zip(shape, axes, strict=True)):
            if size % parts_over(over):
                raise StrategyError(
                    f"weight '{name}' dimension {i}: {size} elements do not divide into "
                    f"{parts_over(over)} parts, and all ranks run one program"
                )
        return Layout(tuple(Factor(n, a) for n, a in zip(shape, axes, strict=True)))

    def is_dealt(self, name: str) -> bool:
        """Whether some entry speaks of the tensor."""
        return any(_matches(str(pattern), name) for pattern in self.strategy.tensors)

    def group_axes(self, node: str, names: Sequence[str]) -> Axes:
        """The axes of a collective's group. Errors: StrategyError, naming the node."""
        try:
            return tuple(a for axes in parse_axes(names, self.mesh) for a in axes)
        except StrategyError as error:
            raise StrategyError(f"{node}: axes={list(names)}: {error}") from None

    def infer(self, model: onnx.ModelProto) -> None:
        """Declares the types of tensors that each rank has, in place; nothing is folded."""
        outputs = {o.name for o in model.graph.output}
        local = onnx.ModelProto()
        local.CopyFrom(model)
        for weight in list(local.graph.initializer):
            if self.is_dealt(weight.name):
                layout = self.weight_layout(weight.name, weight.dims)
                shape = layout.local_shape(self.mesh, 0)
                local.graph.input.append(
                    onnx.helper.make_tensor_value_info(weight.name, weight.data_type, shape)
                )
                local.graph.initializer.remove(weight)
        walk = Walk(local)
        for node in local.graph.node:
            if node.domain == DOMAIN:
                walk.types.update(self._types(node, walk))
            elif (values := walk.evaluate(node)) is not None:
                walk.know(node, values)
            else:
                walk.infer(node)
        del model.graph.value_info[:]
        for node in model.graph.node:
            for name in node.output:
                if name in walk.types and name not in outputs:
                    model.graph.value_info.append(
                        onnx.helper.make_value_info(name, walk.types[name])
                    )
        for output in model.graph.output:
            if output.name in walk.types:
                _refine(output.type, walk.types[output.name])

    def _types(self, node: NodeProto, walk: Walk) -> dict[str, onnx.TypeProto]:
        what = f"{node.op_type} '{node.name or next(iter(node.output), '')}'"
        if node.op_type not in OPS:
            raise StrategyError(f"{what}: no such collective; there are {', '.join(OPS)}")
        attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        names = [n.decode() if isinstance(n, bytes) else n for n in attrs.get("axes", [])]
        members = math.prod(a.size for a in self.group_axes(what, names)) if names else 0
        members = members or len(attrs.get("group", [])) or self.mesh.size
        try:
            return result_types(node, walk.types, members)
        except (ValueError, KeyError) as error:
            raise StrategyError(f"{what}: {error}") from None

    def _axes(self, name: str, rank: int) -> list[Axes]:
        entries = [e for p, e in self.strategy.tensors.items() if _matches(str(p), name)]
        if not entries:
            return [()] * rank
        entry, what = entries[-1], f"tensor '{name}'"
        if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) != rank:
            raise StrategyError(f"{what} has {rank} dimensions, the strategy says {entry!r}")
        out: list[Axes] = []
        pre = 1
        for ask in entry:
            over, sizes, pre = read_ask(ask, self.mesh, what, pre)
            if sizes is not None:
                raise StrategyError(f"{what}: all ranks run one program, so parts are equal")
            if any(overlaps(over, used) for used in out):
                raise StrategyError(f"{what}: an axis splits two of its dimensions")
            out.append(over)
        return out


def _refine(declared: onnx.TypeProto, found: onnx.TypeProto) -> None:
    """What is found replaces what is declared, but for sizes that only the declaration knows."""
    if declared.HasField("tensor_type") and not found.tensor_type.HasField("shape"):
        return
    merged = onnx.TypeProto()
    merged.CopyFrom(found)
    own = declared.tensor_type.shape.dim
    if len(merged.tensor_type.shape.dim) == len(own):
        for dim, size in zip(merged.tensor_type.shape.dim, own, strict=True):
            if not dim.HasField("dim_value"):
                dim.CopyFrom(size)
    declared.CopyFrom(merged)


def _matches(pattern: str, name: str) -> bool:
    return pattern == name or fnmatchcase(name, pattern)


def refuse_collectives(graph: gs.Graph) -> None:
    """Errors: StrategyError where a program that is to be split has collectives already."""
    for node in graph.nodes:
        if node.domain == DOMAIN:
            raise StrategyError(
                f"{node.op} '{node.name}' is a collective, so the model is a program per rank; "
                "keep it as it stands with --preset manual, or take its collectives out"
            )
        for inner in subgraphs(node):
            refuse_collectives(inner)
