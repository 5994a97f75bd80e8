"""ONNX's own multi-device annotations, as a model states them.

IR 11 lets a model name configurations of devices, and each node say how its tensors are sharded
over one of them. Read before the graph is imported, since graphsurgeon drops them; a node is known
by its first result, which keeps its name whatever the loader does to the graph.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import ModelProto, NodeProto, ShardingSpecProto

from onnxpar.errors import StrategyError

PREFIX = "onnxpar."
"""Of the metadata that says beside an annotation what the standard cannot."""
Component = tuple[int | None, int]
"""Part of a dimension: its size, None for the rest of it, and into how many shards it is split."""


@dataclass(frozen=True)
class TensorSharding:
    """How one tensor of a node is sharded.

    `devices` are the devices that hold each shard, row-major over `dims`; empty where the model
    leaves that open. `dims` are the split dimensions by axis, which may be negative.
    """

    tensor: str
    devices: tuple[tuple[int, ...], ...] = ()
    dims: Mapping[int, tuple[Component, ...]] = field(default_factory=dict)

    def agrees(self, other: TensorSharding | None) -> bool:
        """Whether both split alike; sizes may be open in one of them."""
        if other is None or self.devices != other.devices:
            return False
        return self._counts() == other._counts()

    def _counts(self) -> dict[int, list[int]]:
        return {axis: [n for _, n in components] for axis, components in self.dims.items()}

    def to_proto(self) -> ShardingSpecProto:
        """As the standard has it; shards on several devices get groups named -1, -2, ..."""
        spec = ShardingSpecProto(tensor_name=self.tensor)
        for i, group in enumerate(self.devices):
            spec.device.append(group[0] if len(group) == 1 else -1 - i)
            if len(group) > 1:
                spec.index_to_device_group_map.add(key=-1 - i, value=group)
        for axis, components in self.dims.items():
            dim = spec.sharded_dim.add(axis=axis)
            for size, shards in components:
                simple = dim.simple_sharding.add(num_shards=shards)
                if size is not None:
                    simple.dim_value = size
        return spec


@dataclass(frozen=True)
class NodeConfiguration:
    """What a model says of one node: shardings by tensor, and onnxpar's own metadata."""

    what: str
    shardings: Mapping[str, TensorSharding]
    stage: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Configuration:
    """One of a model's configurations: its devices, and its nodes by their first result."""

    name: str
    devices: int
    nodes: Mapping[str, NodeConfiguration]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def says_something(self) -> bool:
        """Whether it shards any tensor, rather than stages only."""
        return any(note.shardings for note in self.nodes.values())


def read_annotations(model: ModelProto) -> tuple[Configuration, ...]:
    """The configurations of a model. Errors: StrategyError, naming the node, the tensor and what
    breaks the standard."""
    sizes = {c.name: c.num_devices for c in model.configuration}
    nodes: dict[str, dict[str, NodeConfiguration]] = {name: {} for name in sizes}
    for node in model.graph.node:
        for entry in node.device_configurations:
            what = f"{node.op_type} '{node.name or _key(node)}'"
            if entry.configuration_id not in sizes:
                raise StrategyError(
                    f"{what} is annotated for a configuration {entry.configuration_id!r}; "
                    f"the model has {', '.join(map(repr, sizes)) or 'none'}"
                )
            devices = sizes[entry.configuration_id]
            shardings = [_read_sharding(s, node, what, devices) for s in entry.sharding_spec]
            nodes[entry.configuration_id][_key(node)] = NodeConfiguration(
                what,
                {s.tensor: s for s in shardings},
                entry.pipeline_stage if entry.HasField("pipeline_stage") else None,
                _own_metadata(node),
            )
        if any(_annotated_bodies(node)):
            warnings.warn(
                f"{node.op_type} '{node.name or _key(node)}': annotations in its bodies are not "
                "followed",
                stacklevel=2,
            )
    metadata = _own_metadata(model)
    return tuple(Configuration(n, sizes[n], nodes[n], metadata) for n in sizes)


def choose_configuration(
    configurations: Sequence[Configuration], name: str | None, devices: int | None
) -> Configuration | None:
    """The configuration of that name, else the only one that shards over so many devices; None if
    the model has none, or for the name `none`. Errors: StrategyError, listing what there is."""
    if name == "none":
        return None
    have = ", ".join(f"{c.name!r} of {c.devices} devices" for c in configurations) or "none"
    if name is not None:
        named = [c for c in configurations if c.name == name]
        if not named:
            raise StrategyError(f"--configuration {name}: the model has {have}")
        return named[0]
    configurations = [c for c in configurations if c.says_something]
    fitting = [c for c in configurations if devices in (None, c.devices)]
    if len(fitting) == 1:
        return fitting[0]
    if not configurations:
        return None
    ranks = f"{devices} ranks" if devices is not None else "this run"
    raise StrategyError(
        f"{len(fitting)} of the model's configurations fit {ranks} (it has {have}); choose one "
        "with --configuration NAME, or ignore them with --configuration none"
    )


def annotate_node(
    node: NodeProto,
    configuration: str,
    shardings: Sequence[TensorSharding],
    metadata: Mapping[str, str],
) -> None:
    """Writes a node's annotation."""
    entry = node.device_configurations.add(configuration_id=configuration)
    entry.sharding_spec.extend(s.to_proto() for s in shardings)
    onnx.helper.set_metadata_props(node, {**_all_metadata(node), **metadata})


def annotate_model(
    model: ModelProto, configuration: str, devices: int, metadata: Mapping[str, str]
) -> None:
    """Declares the only configuration of a model that has none yet; IR 11 is the first with it."""
    model.ir_version = max(model.ir_version, 11)
    model.configuration.add(name=configuration, num_devices=devices)
    onnx.helper.set_model_props(model, {**_all_metadata(model), **metadata})


def clear_annotations(model: ModelProto) -> None:
    """Drops all annotations of a model, and the metadata beside them."""
    del model.configuration[:]
    for node in model.graph.node:
        del node.device_configurations[:]
    for holder in (model, *model.graph.node):
        kept = [p for p in holder.metadata_props if not p.key.startswith(PREFIX)]
        del holder.metadata_props[:]
        holder.metadata_props.extend(kept)


def _key(node: NodeProto) -> str:
    return next((o for o in node.output if o), "")


def _annotated_bodies(node: NodeProto) -> Iterator[NodeProto]:
    """The annotated nodes in the bodies of a node, at any depth."""
    for attribute in node.attribute:
        for body in (attribute.g, *attribute.graphs):
            for inner in body.node:
                if inner.device_configurations:
                    yield inner
                yield from _annotated_bodies(inner)


def _own_metadata(holder: ModelProto | NodeProto) -> dict[str, str]:
    return {k: v for k, v in _all_metadata(holder).items() if k.startswith(PREFIX)}


def _all_metadata(holder: ModelProto | NodeProto) -> dict[str, str]:
    return {p.key: p.value for p in holder.metadata_props}


def _read_sharding(
    spec: ShardingSpecProto, node: NodeProto, what: str, devices: int
) -> TensorSharding:
    tensor = spec.tensor_name
    what = f"{what}, tensor {tensor!r}"
    if not tensor or tensor not in [*node.input, *node.output]:
        raise StrategyError(f"{what}: is annotated, but the node neither reads nor makes it")
    dims: dict[int, tuple[Component, ...]] = {}
    for dim in spec.sharded_dim:
        parts = tuple(
            (s.dim_value if s.HasField("dim_value") else None, s.num_shards)
            for s in dim.simple_sharding
        )
        if dim.axis in dims or not parts or any(shards < 1 for _, shards in parts):
            raise StrategyError(
                f"{what}: the sharding of axis {dim.axis} must stand there once, with at least "
                "one num_shards >= 1"
            )
        dims[dim.axis] = parts
    groups = {e.key: tuple(e.value) for e in spec.index_to_device_group_map}
    held = tuple(groups.get(d, (d,)) for d in spec.device)
    _check_devices(held, math.prod(n for p in dims.values() for _, n in p), devices, what)
    return TensorSharding(tensor, held, dims)


def _check_devices(held: tuple[tuple[int, ...], ...], shards: int, devices: int, what: str) -> None:
    if not held:
        return
    if len(held) != shards:
        raise StrategyError(
            f"{what}: {len(held)} entries of device for {shards} shards; give one per shard, and "
            "replicas of a shard as a group in index_to_device_group_map"
        )
    used = [d for group in held for d in group]
    if sorted(used) != list(range(devices)):
        raise StrategyError(
            f"{what}: is held by devices {used}; all of the configuration's {devices} devices must "
            "hold it, each once, since every rank runs every node"
        )
