"""ONNX's own multi-device annotations, read from and written to a model.

Since IR 11, a model can name configurations of devices, and a node can state how its tensors are
sharded over one of them. They are read before the graph is imported, since graphsurgeon drops them.
A node is identified by its first result, whose name the loader never changes.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import onnx
from onnx import ModelProto, NodeProto, ShardingSpecProto

from onnxpar.base.errors import StrategyError
from onnxpar.graph.stored import nodes_of

PREFIX = "onnxpar."
"""Prefix of the keys of metadata with which onnxpar adds to the standard's annotations."""
TENSORS = PREFIX + "tensors"
"""Key of a model's metadata: the layouts of tensors whose sharding the user fixed."""
AXES = PREFIX + "axes"
"""Metadata key. In a node: the axes that split each of its factors. In the model: the same for
nodes that are not in the file's main graph, because they come from a function or a fused op."""
PARTIAL = PREFIX + "partial"
"""Key of a node's metadata: over which axes each of its results is partial, by tensor."""
Component = tuple[int | None, int]
"""A segment of a dimension: its size (None: the rest of the dimension) and its number of shards."""


@dataclass(frozen=True)
class TensorSharding:
    """The sharding of one tensor of a node.

    devices  for each shard, the devices that hold it, row-major over `dims`; empty if the model
             does not assign devices
    dims     the segments of each split dimension, by axis, which may be negative
    """

    tensor: str
    devices: tuple[tuple[int, ...], ...] = ()
    dims: Mapping[int, tuple[Component, ...]] = field(default_factory=dict)

    def agrees(self, other: TensorSharding | None) -> bool:
        """True if `other` has the same devices and the same numbers of shards, whatever the
        sizes."""
        if other is None or self.devices != other.devices:
            return False
        return self._counts() == other._counts()

    def _counts(self) -> dict[int, list[int]]:
        return {axis: [n for _, n in components] for axis, components in self.dims.items()}

    def to_proto(self) -> ShardingSpecProto:
        """Returns the proto of the standard. Several devices that hold the same shard are a group
        in it, with a negative number."""
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
    """The annotation of one node.

    what       the node's name in messages
    shardings  the sharding of each annotated tensor of the node, by name
    stage      the pipeline stage; None if there is none
    metadata   entries with onnxpar's prefix
    """

    what: str
    shardings: Mapping[str, TensorSharding]
    stage: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Configuration:
    """One of a model's configurations: the annotations of nodes for `devices` devices. `nodes` is
    by the name of a node's first result."""

    name: str
    devices: int
    nodes: Mapping[str, NodeConfiguration]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def shards_tensors(self) -> bool:
        """True if the configuration shards a tensor; False if it only assigns pipeline stages."""
        return any(note.shardings for note in self.nodes.values())

    def renamed(self, new: Mapping[str, str]) -> Configuration:
        """Returns the configuration for a model whose tensors were renamed; `new` has new names by
        old ones."""
        nodes = {
            new.get(key, key): replace(
                note,
                shardings={
                    new.get(name, name): replace(stated, tensor=new.get(name, name))
                    for name, stated in note.shardings.items()
                },
                metadata=_renamed(note.metadata, [PARTIAL], new),
            )
            for key, note in self.nodes.items()
        }
        return replace(self, nodes=nodes, metadata=_renamed(self.metadata, [TENSORS, AXES], new))


def _renamed(
    metadata: Mapping[str, str], keys: Sequence[str], new: Mapping[str, str]
) -> dict[str, str]:
    """Returns metadata in which the JSON objects under `keys` have new names of tensors as keys.
    Malformed entries stay, so that their reader can report them."""
    renamed = dict(metadata)
    for key in [key for key in keys if key in renamed]:
        with suppress(ValueError, AttributeError):
            stated = json.loads(renamed[key]).items()
            renamed[key] = json.dumps({new.get(name, name): value for name, value in stated})
    return renamed


_MOST_DEVICES = 1 << 16
"""A configuration may have at most this many devices."""


def read_annotations(model: ModelProto) -> tuple[Configuration, ...]:
    """Returns the configurations of a model. Errors: StrategyError that names the node, the tensor,
    and how the annotation violates the standard."""
    sizes = {c.name: c.num_devices for c in model.configuration}
    for name, count in sizes.items():
        if not 0 <= count <= _MOST_DEVICES:
            raise StrategyError(
                f"the model's configuration {name!r} has {count:,} devices; at most "
                f"{_MOST_DEVICES:,} are possible"
            )
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
                f"{node.op_type} '{node.name or _key(node)}': annotations of nodes in its bodies "
                "are ignored",
                stacklevel=2,
            )
    metadata = _own_metadata(model)
    return tuple(Configuration(n, sizes[n], nodes[n], metadata) for n in sizes)


def choose_configuration(
    configurations: Sequence[Configuration], name: str | None, devices: int | None
) -> Configuration | None:
    """Returns the configuration called `name`; if that is None, the only one for `devices` devices;
    if both are None, the only one. None for the name "none", and for a model without
    configurations. Errors: StrategyError that lists the model's configurations."""
    if name == "none":
        return None
    have = ", ".join(f"{c.name!r} of {c.devices} devices" for c in configurations) or "none"
    if name is not None:
        named = [c for c in configurations if c.name == name]
        if not named:
            raise StrategyError(
                f"--configuration {name}: the model has no such configuration; its "
                f"configurations: {have}"
            )
        return named[0]
    configurations = [c for c in configurations if c.shards_tensors]
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
    """Adds shardings of a node's tensors, for the configuration of this name, and `metadata` to a
    node."""
    entry = node.device_configurations.add(configuration_id=configuration)
    entry.sharding_spec.extend(s.to_proto() for s in shardings)
    onnx.helper.set_metadata_props(node, {**_all_metadata(node), **metadata})


def annotate_model(
    model: ModelProto, configuration: str, devices: int, metadata: Mapping[str, str]
) -> None:
    """Adds a configuration of this name and number of devices, and `metadata`, to a model; raises
    its IR version to 11, the first with configurations."""
    model.ir_version = max(model.ir_version, 11)
    model.configuration.add(name=configuration, num_devices=devices)
    onnx.helper.set_model_props(model, {**_all_metadata(model), **metadata})


def clear_annotations(model: ModelProto) -> None:
    """Removes all annotations and onnxpar's metadata from a model, also from bodies of its
    nodes."""
    del model.configuration[:]
    nodes = list(nodes_of(model.graph))
    for node in nodes:
        del node.device_configurations[:]
    holders: list[ModelProto | NodeProto] = [model, *nodes]
    for holder in holders:
        kept = [p for p in holder.metadata_props if not p.key.startswith(PREFIX)]
        del holder.metadata_props[:]
        holder.metadata_props.extend(kept)


def _key(node: NodeProto) -> str:
    return next((o for o in node.output if o), "")


def _annotated_bodies(node: NodeProto) -> Iterator[NodeProto]:
    """Yields the annotated nodes in the bodies of a node, at any depth."""
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
    """Returns the sharding of one tensor from its proto; `what` names the node in errors. Errors:
    StrategyError."""
    tensor = spec.tensor_name
    what = f"{what}, tensor {tensor!r}"
    if not tensor or tensor not in [*node.input, *node.output]:
        raise StrategyError(
            f"{what}: the annotation names a tensor that is not an input or output of the node"
        )
    dims: dict[int, tuple[Component, ...]] = {}
    for dim in spec.sharded_dim:
        parts = tuple(
            (s.dim_value if s.HasField("dim_value") else None, s.num_shards)
            for s in dim.simple_sharding
        )
        if dim.axis in dims or not parts or any(shards < 1 for _, shards in parts):
            raise StrategyError(
                f"{what}: axis {dim.axis} must have exactly one sharded_dim, with at least one "
                "simple_sharding, each with num_shards >= 1"
            )
        dims[dim.axis] = parts
    groups = {e.key: tuple(e.value) for e in spec.index_to_device_group_map}
    held = tuple(groups.get(d, (d,)) for d in spec.device)
    _check_devices(held, math.prod(n for p in dims.values() for _, n in p), devices, what)
    return TensorSharding(tensor, held, dims)


def _check_devices(held: tuple[tuple[int, ...], ...], shards: int, devices: int, what: str) -> None:
    """Raises StrategyError unless each device holds exactly one shard; `held` are the devices of
    each shard."""
    if not held:
        return
    if len(held) != shards:
        raise StrategyError(
            f"{what}: {len(held)} entries of device for {shards} shards; give one per shard; list "
            "replicas of a shard as a group in index_to_device_group_map"
        )
    used = [d for group in held for d in group]
    if len(used) != devices or sorted(used) != list(range(devices)):
        raise StrategyError(
            f"{what}: its shards are on devices {used}; each of the configuration's {devices} "
            "devices must hold exactly one shard, since every rank runs every node"
        )
