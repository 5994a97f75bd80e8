"""Manual parallelism: a program that its author writes for one rank, and its mesh.

The model is the program of one rank, like the body of JAX's shard_map: its inputs and outputs have
the shapes of a rank's shards. The tensor entries of a strategy say how global arrays are sharded
into inputs and weights, and assembled from outputs. A tensor without an entry is whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import onnx
import onnx_graphsurgeon as gs
from onnx import NodeProto

from onnxpar.base.errors import StrategyError
from onnxpar.graph.collectives import DOMAIN
from onnxpar.graph.shape_inference import Walk, keep_nodes
from onnxpar.graph.stored import nodes_of
from onnxpar.graph.subgraphs import subgraphs
from onnxpar.graph.training_spec import StepSharding
from onnxpar.layout.layout import Factor, Layout
from onnxpar.layout.mesh import Axes, Axis, Mesh, parts_over
from onnxpar.sharding.state import overlaps
from onnxpar.strategy.collective_shapes import OPS, result_types
from onnxpar.strategy.entries import read_item
from onnxpar.strategy.manual_shapes import RankWalk, common_type
from onnxpar.strategy.named_ops import matching
from onnxpar.strategy.neighbor_exchange import expand_exchanges
from onnxpar.strategy.rank_groups import GroupOf, group_of
from onnxpar.strategy.strategy import Groups, Strategy

MANUAL = "manual"
"""The preset's name."""
REPLICAS = "@replicas"
"""The suffix of outputs that copy other outputs."""


@dataclass(frozen=True)
class Manual:
    """The mesh of a manual program (a model that its author wrote for one rank), and the sharding
    of its tensors.

    strategy  its `tensors` say how inputs, weights and outputs are sharded
    deal      the sharding that a training step declares, if the program is one; else None

    Errors: StrategyError for a strategy that splits ops.
    """

    mesh: Mesh
    strategy: Strategy
    deal: StepSharding | None = None

    def __post_init__(self) -> None:
        if self.strategy.shard:
            raise StrategyError(
                f"{self.strategy.source}: 'shard' splits ops, which a manual program does itself; "
                "use 'tensors' to shard inputs, weights and outputs"
            )

    def check_names(self, names: Iterable[str]) -> None:
        """Checks the entries of the strategy against the names of inputs, weights and outputs.
        Errors: StrategyError for an entry that matches no name, or that contradicts the training
        step."""
        deal = self.deal or StepSharding([], {}, {})
        names = [*deal.tensors, *deal.like] if self.deal else list(names)
        for pattern in self.strategy.tensors:
            matching(str(pattern), names, "input, weight or output", self.strategy.source)
        if self.deal and self.strategy.groups and dict(self.strategy.groups) != dict(self.groups):
            raise StrategyError(
                f"{self.strategy.source}: its groups are not those of the training step; leave "
                "them out, or make the step again"
            )
        for name, declared in {n: self.deal_entry(n) for n in (*deal.tensors, *deal.like)}.items():
            entry = self._requested(name, exactly=name in deal.like)
            if entry is not None and self._read(name, entry, len(declared)) != self.axes(
                name, len(declared)
            ):
                raise StrategyError(
                    f"{self.strategy.source} shards tensor '{name}' as {entry!r}, but the training "
                    f"step was made for {declared!r}; leave the entry out, or make the step again"
                )

    def deal_entry(self, name: str) -> list[Any]:
        """Returns the entry that the training step declares for a tensor, such as ["dp", None]."""
        assert self.deal is not None
        return self.deal.tensors[self.deal.like.get(name, name)]

    def input_layout(self, name: str, local: Sequence[int]) -> Layout:
        """Returns the layout of the global tensor whose shards have the shape `local`: [4, 3] with
        the entry [None, "tp"] over tp=2 has the global shape [4, 6]."""
        axes = self.axes(name, len(local))
        return Layout(tuple(Factor(n * parts_over(a), a) for n, a in zip(local, axes, strict=True)))

    def weight_layout(self, name: str, shape: Sequence[int]) -> Layout:
        """Returns the layout of a weight with this global shape. Errors: StrategyError if a size
        does not divide evenly."""
        axes = self.axes(name, len(shape))
        for i, (size, over) in enumerate(zip(shape, axes, strict=True)):
            if size % parts_over(over):
                raise StrategyError(
                    f"weight '{name}' dimension {i}: {size} elements do not divide into "
                    f"{parts_over(over)} equal shards, but a program for all ranks needs equal "
                    "ones; leave it whole"
                )
        return Layout(tuple(Factor(n, a) for n, a in zip(shape, axes, strict=True)))

    def is_dealt(self, name: str) -> bool:
        """True if an entry splits the tensor, so that ranks hold different parts."""
        entry = self.entry(name)
        return not isinstance(entry, Sequence) or any(item not in (None, 1) for item in entry)

    def part_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of a rank's shard of a weight with this global shape. Errors:
        StrategyError."""
        return self.weight_layout(name, shape).local_shape(self.mesh, 0)

    def split_over(self, name: str) -> Axes:
        """Returns the axes over which a tensor is split, in the order of its dimensions."""
        entry = self.entry(name)
        return tuple(a for over in self._read(name, entry, len(entry)) for a in over)

    def copies_over(self, name: str) -> Axes:
        """Returns the axes and sub-axes (factors of mesh axes) along which ranks hold the same part
        of a tensor: those that do not split it."""
        used = self.split_over(name)
        free: list[Axis] = []
        for axis, size in self.mesh.shape:
            at = 1
            for part in sorted((a for a in used if a.name == axis), key=lambda a: a.pre):
                if part.pre > at:
                    free.append(Axis(axis, part.pre // at, at))
                at = part.pre * part.size
            if at < size:
                free.append(Axis(axis, size // at, at))
        return tuple(free)

    @property
    def groups(self) -> Mapping[str, Groups]:
        """The named groups of ranks: of the training step if the program is one, else of the
        strategy."""
        if self.deal is None:
            return self.strategy.groups
        return {name: tuple(map(tuple, lists)) for name, lists in self.deal.groups.items()}

    def group_of(self, what: str, attrs: Mapping[str, Any]) -> GroupOf:
        """Returns the function from a rank to its group, for a node with these attributes. Errors:
        StrategyError that begins with `what`."""
        return group_of(what, attrs, self.mesh, self.groups)

    def infer(
        self,
        model: onnx.ModelProto,
        defaults: Collection[str] = (),
        for_training: bool = False,
    ) -> None:
        """Declares the types of a rank's tensors in the model, in place.

        defaults      inputs that have default values: they get the whole shape of these values
        for_training  True folds values that are the same on all ranks and do not depend on weights;
                      False folds nothing
        """
        exchanges = expand_exchanges(
            model, lambda node: max(len(group) for group, _ in self._members(node))
        )
        for port in model.graph.input:
            if port.name in defaults and self.is_dealt(port.name):
                dims = port.type.tensor_type.shape.dim
                part = self.part_shape(port.name, [d.dim_value for d in dims])
                for dim, size in zip(dims, part, strict=True):
                    dim.dim_value = size
        outputs = {o.name for o in model.graph.output}
        local = onnx.ModelProto()
        local.CopyFrom(model)
        for weight in list(local.graph.initializer):
            if self.is_dealt(weight.name):
                shape = self.part_shape(weight.name, weight.dims)
                local.graph.input.append(
                    onnx.helper.make_tensor_value_info(weight.name, weight.data_type, shape)
                )
                local.graph.initializer.remove(weight)
        walk = RankWalk(local, self._members, self._types, for_training).walk
        for exchange in exchanges:
            exchange.check_extents(walk.types)
        _put_folded(model.graph, walk)
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
        """Returns the types of a collective's results, by name, with sizes that differ between
        ranks left open. Errors: StrategyError."""
        if node.op_type not in OPS:
            raise StrategyError(f"{_title(node)}: no such collective; use one of {', '.join(OPS)}")
        counts = sorted({len(group) for group, _ in self._members(node)})
        try:
            by_count = [result_types(node, walk.types, count) for count in counts]
        except (ValueError, KeyError) as error:
            raise StrategyError(f"{_title(node)}: {error}") from None
        common = {
            name: common_type([types.get(name) for types in by_count]) for name in by_count[0]
        }
        return {name: type_ for name, type_ in common.items() if type_ is not None}

    def _members(self, node: NodeProto) -> list[tuple[tuple[int, ...], int]]:
        """For each rank, returns the ranks of its group for a node, and its position in the
        group."""
        attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        of = self.group_of(_title(node), attrs)
        return [(of(rank), of(rank).index(rank)) for rank in range(self.mesh.size)]

    def axes(self, name: str, rank: int) -> list[Axes]:
        """Returns the axes that split each dimension of a tensor with `rank` dimensions. Errors:
        StrategyError."""
        return self._read(name, self.entry(name) or [None] * rank, rank)

    def entry(self, name: str) -> Any:
        """Returns the entry for a tensor, such as ["dp", None], from the training step or else the
        strategy; [] if there is none, which leaves the tensor whole."""
        if self.deal is None:
            return self._requested(name) or []
        known = name in self.deal.tensors or name in self.deal.like
        return self.deal_entry(name) if known else []

    def _requested(self, name: str, exactly: bool = False) -> Any:
        """Returns the strategy's last entry that matches a tensor's name; None if no entry does.
        With `exactly`, only an entry with the tensor's own name matches, no pattern."""
        all_entries = self.strategy.tensors.items()
        entries = [
            e for p, e in all_entries if p == name or (not exactly and _matches(str(p), name))
        ]
        return entries[-1] if entries else None

    def _read(self, name: str, entry: Any, rank: int) -> list[Axes]:
        """Returns the axes of each dimension from an entry of a tensor with `rank` dimensions.
        Errors: StrategyError for sizes by hand, or for an axis that splits two dimensions."""
        what = f"tensor '{name}'"
        if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) != rank:
            raise StrategyError(f"{what} has {rank} dimensions, but the strategy gives {entry!r}")
        out: list[Axes] = []
        pre = 1
        for item in entry:
            over, sizes, pre = read_item(item, self.mesh, what, pre)
            if sizes is not None:
                raise StrategyError(
                    f"{what}: all ranks run one program, so their shards must have equal sizes; "
                    "give only the axis"
                )
            if any(overlaps(over, used) for used in out):
                raise StrategyError(
                    f"{what}: an axis splits two of its dimensions; use each axis once"
                )
            out.append(over)
        return out


def _put_folded(graph: onnx.GraphProto, walk: Walk) -> None:
    """Replaces the nodes that a walk through the graph has folded by constants with their
    values."""
    keep_nodes(graph, [n for n in graph.node if walk.folded.isdisjoint(n.output)])
    read = {name for node in nodes_of(graph) for name in node.input}
    read |= {output.name for output in graph.output}
    graph.initializer.extend(walk.protos[name] for name in sorted(walk.folded & read))


def _refine(declared: onnx.TypeProto, inferred: onnx.TypeProto) -> None:
    """Replaces a declared type by the inferred type, in place; sizes that only the declared type
    knows stay."""
    if declared.HasField("tensor_type") and not inferred.tensor_type.HasField("shape"):
        return
    merged = onnx.TypeProto()
    merged.CopyFrom(inferred)
    declared_dims = declared.tensor_type.shape.dim
    if len(merged.tensor_type.shape.dim) == len(declared_dims):
        for dim, size in zip(merged.tensor_type.shape.dim, declared_dims, strict=True):
            if not dim.HasField("dim_value"):
                dim.CopyFrom(size)
    declared.CopyFrom(merged)


def _title(node: NodeProto) -> str:
    return f"{node.op_type} '{node.name or next(iter(node.output), '')}'"


def _matches(pattern: str, name: str) -> bool:
    """True if a name equals a pattern or, as a glob, matches it."""
    return pattern == name or fnmatchcase(name, pattern)


def refuse_collectives(graph: gs.Graph) -> None:
    """Refuses a model that already has collectives, since onnxpar is to split it. Errors:
    StrategyError."""
    for node in graph.nodes:
        if node.domain == DOMAIN:
            raise StrategyError(
                f"{node.op} '{node.name}' is a collective, so the model is a program for one rank; "
                "use --preset manual, or remove its collectives"
            )
        for inner in subgraphs(node):
            refuse_collectives(inner)
