"""The presets (data-parallel, tensor-parallel, ...): requests for layouts that are derived from the
structure of a graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd
from typing import Literal, get_args

import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.graph.interchange import is_weight
from onnxpar.graph.tensors import numpy_dtype
from onnxpar.graph.training_spec import Step
from onnxpar.layout.mesh import Axes, Mesh, check_ranks, parts_over
from onnxpar.sharding.factors import TensorFactors
from onnxpar.sharding.state import ShardingState
from onnxpar.strategy.class_parallel import CLASS, class_annotations
from onnxpar.strategy.context_parallel import AXIS, CONTEXT, RING, context_annotation
from onnxpar.strategy.expert_parallel import EXPERT, apart_annotations, expert_annotations
from onnxpar.strategy.sparse_sums import sparse_sums
from onnxpar.strategy.split_caches import SplitCaches, cache_atoms, cache_heads
from onnxpar.strategy.spread import nest
from onnxpar.strategy.strategy import Annotation, TensorAnnotation
from onnxpar.strategy.table_parallel import TABLES, table_annotations
from onnxpar.strategy.tensor_parallel import tensor_parallel_rounds
from onnxpar.strategy.training_presets import (
    SEQUENCE,
    ZERO_STAGES,
    sequence_annotations,
    zero_rounds,
)

Preset = Literal[
    "data-parallel",
    "tensor-parallel",
    "hybrid",
    "zero1",
    "zero2",
    "zero3",
    "sequence-parallel",
    "context-parallel",
    "ring-attention",
    "expert-parallel",
    "class-parallel",
    "table-parallel",
    "manual",
]
PRESETS: tuple[str, ...] = get_args(Preset)

ADDING = ("tensor-parallel", "hybrid", EXPERT)
"""Presets whose ranks add up activations, and that leave it open how the nodes after these sums are
split."""


def preset_mesh(preset: str | None, devices: int) -> Mesh:
    """Returns the default mesh of a preset over this number of devices: one axis, such as tp=4; for
    hybrid, dp=2 and the rest tp.

    Errors: StrategyError for fewer than 1 device, or for hybrid over an odd number of devices.
    """
    check_ranks(devices)
    if preset == "hybrid":
        if devices % 2:
            raise StrategyError(
                f"hybrid over {devices} devices: an odd number has no default mesh; "
                "give --mesh dp=..,tp=.."
            )
        return Mesh((("dp", 2), ("tp", devices // 2)))
    names = {
        "data-parallel": "dp",
        "manual": "ranks",
        EXPERT: "ep",
        TABLES: "dp",
        **dict.fromkeys((CONTEXT, RING), AXIS),
        CLASS: "dp",
        **dict.fromkeys(ZERO_STAGES, "dp"),
    }
    return Mesh(((names.get(preset or "", "tp"), devices),))


def default_rounds(
    graph: gs.Graph, sharding: ShardingState, step: Step | None = None
) -> list[list[Annotation]]:
    """Returns the annotations for nodes and tensors that a strategy leaves open: data-parallel over
    the axis `dp`, if the mesh has this axis and the batch is large enough; else none."""
    mesh = sharding.mesh
    size = _batch_size(graph, step)
    if "dp" not in mesh.sizes or size is None or size < mesh.sizes["dp"]:
        return []
    return [list(batch_annotations(graph, sharding, (mesh.axis("dp"),), step))]


def preset_rounds(
    graph: gs.Graph,
    sharding: ShardingState,
    preset: str | None,
    step: Step | None = None,
    states: Sequence[tuple[str, str]] = (),
) -> list[list[Annotation]]:
    """Returns the annotations of a preset, in rounds: an annotation applies only to leaves (parts
    of dimensions) that earlier rounds left undecided.

    step    the training step, if the model is one
    states  for any other model, the pairs (input, output that is fed back to it)

    Errors: StrategyError if the preset is unknown, or does not fit the model or the mesh.
    """
    mesh = sharding.mesh
    if preset is None:
        return []
    if preset not in PRESETS:
        raise StrategyError(f"preset {preset!r} is unknown; use one of {', '.join(PRESETS)}")
    if preset == "data-parallel":
        return [list(batch_annotations(graph, sharding, _all_axes(mesh), step))]
    if preset == EXPERT:
        return _expert_rounds(graph, sharding, step)
    if preset == CLASS:
        classes: list[Annotation] = list(class_annotations(graph, sharding, _all_axes(mesh), step))
        return [classes, list(batch_annotations(graph, sharding, _all_axes(mesh), step))]
    if preset == TABLES:
        all_axes, atoms = _all_axes(mesh), batch_atoms(graph, sharding, step)
        atoms |= _ragged_atoms(graph, sharding, step)
        tables: list[Annotation] = list(table_annotations(graph, sharding, all_axes, atoms, step))
        return [tables, list(batch_annotations(graph, sharding, all_axes, step))]
    other_axes = ("dp", AXIS) if preset in (CONTEXT, RING) else ("dp",)
    axes = tuple(mesh.axis(name) for name, _ in mesh.shape if name not in other_axes)
    if preset == "hybrid" and (not axes or "dp" not in mesh.sizes):
        raise StrategyError(
            f"hybrid needs a mesh with an axis dp and another axis, not {mesh}; give --mesh "
            "dp=..,tp=.."
        )
    batch: list[Annotation] = []
    if "dp" in mesh.sizes:
        batch = list(batch_annotations(graph, sharding, (mesh.axis("dp"),), step))
    caches = cache_atoms(sharding, states) if preset in (CONTEXT, RING) else None
    if caches and AXIS in mesh.sizes:
        over = (mesh.axis(AXIS),)
        split = SplitCaches(caches, over, cache_heads(sharding, states, caches), axes)
        return [batch, [split], *tensor_parallel_rounds(graph, sharding, (*axes, *over), step)]
    wide = tensor_parallel_rounds(graph, sharding, axes, step)
    if preset == SEQUENCE:
        return [batch, *wide[:-1], sequence_annotations(graph, axes, sharding, step), *wide[-1:]]
    if preset in (CONTEXT, RING):
        samples = batch_atoms(graph, sharding, step)
        context = context_annotation(graph, sharding, samples, step, preset)
        return [batch, *wide[:-1], [context], *wide[-1:]]
    if preset not in ZERO_STAGES:
        return [batch, *wide]
    if "dp" not in mesh.sizes:
        raise StrategyError(f"{preset} needs a mesh with an axis dp, not {mesh}; give --mesh dp=..")
    first, last = zero_rounds(graph, sharding, step, preset, (mesh.axis("dp"),))
    return [batch, *wide[:-1], first, last, *wide[-1:]]


def _ragged_atoms(graph: gs.Graph, sharding: ShardingState, step: Step | None) -> set[int]:
    """Returns the atoms (parts of dimensions) that number the ids of bags in a training step. Such
    an input has the ids of all samples one after the other, so the step does not name a batch
    dimension of it."""
    data = {*step.data} - step.batch.keys() if step is not None else set()
    ids = [t for t in graph.inputs if t.name in data and numpy_dtype(t).kind in "iu" and t.shape]
    known = [sharding.factors.tensors[t.name] for t in ids if t.name in sharding.factors.tensors]
    return {atom for factors in known for atom in _atoms_of(factors, 0)}


def _expert_rounds(
    graph: gs.Graph, sharding: ShardingState, step: Step | None
) -> list[list[Annotation]]:
    """Returns the rounds of expert-parallel: experts over the axis `ep`, the batch over all axes
    but `tp`, and weights over `tp` as in tensor-parallel; without an axis `ep`, experts and the
    batch over all axes."""
    mesh = sharding.mesh
    if "ep" not in mesh.sizes:
        inner: Axes = ()
        outer = over = _all_axes(mesh)
    else:
        over, inner = (mesh.axis("ep"),), tuple(a for a in _all_axes(mesh) if a.name == "tp")
        outer = tuple(a for a in _all_axes(mesh) if a.name != "tp")
    rest = tuple(a for a in outer if a not in over)  # the experts of each shard of the batch
    samples = batch_atoms(graph, sharding, step)
    beside = dict.fromkeys(samples, rest) if rest else {}
    whole_batch = dict.fromkeys(samples, outer) if len(samples) == 1 else {}
    experts: list[Annotation] = list(expert_annotations(graph, sharding, over, beside, whole_batch))
    batch = list(batch_annotations(graph, sharding, outer, step))
    return [
        [*experts, *apart_annotations(sharding, over)],
        batch,
        *(tensor_parallel_rounds(graph, sharding, inner, step) if inner else []),
    ]


def batch_annotations(
    graph: gs.Graph, sharding: ShardingState, axes: Axes, step: Step | None = None
) -> Iterator[Annotation]:
    """Yields annotations that split the batch over `axes`. In a training step, the step names the
    dimensions of the batch; in another model, they are the first dimension of the first input, and
    of every input whose first dimension has the same size. Gradients that are sums of few rows stay
    whole.

    If the batch has fewer elements than shards, some ranks have none; a batch of one element stays
    whole. Errors: StrategyError for a model without a batch.
    """
    size = _batch_size(graph, step)
    parts = parts_over(axes)
    if parts == 1:
        return
    if size is None:
        raise StrategyError(f"data-parallel over {parts}: {_no_batch(graph)}")
    if step is not None:
        yield from sparse_sums(sharding, step, axes)
    for name, factors, dim in _batched(graph, sharding, step):
        yield TensorAnnotation(name, _batch_axes(factors, dim, axes, step.turns if step else 1))


def batch_atoms(graph: gs.Graph, sharding: ShardingState, step: Step | None = None) -> set[int]:
    """Returns the atoms (parts of dimensions) that number the samples of a batch."""
    inputs = _batched(graph, sharding, step)
    return {atom for _, factors, batch in inputs for atom in _atoms_of(factors, batch)}


def _atoms_of(factors: TensorFactors, dim: int) -> Iterator[int]:
    """Yields the atoms (parts of dimensions) of dimension `dim` of a tensor."""
    leaves = zip(factors.leaves, factors.dim_of_leaf, strict=True)
    return (leaf.atom for leaf, at in leaves if at == dim)


def _batched(
    graph: gs.Graph, sharding: ShardingState, step: Step | None
) -> Iterator[tuple[str, TensorFactors, int]]:
    """Yields (name, factors, dimension that numbers samples) for each input that has samples."""
    for name, dim in _batch_dims(graph, step).items():
        factors = sharding.factors.tensors.get(name)
        if factors and dim in factors.dim_of_leaf:
            yield name, factors, dim


def _batch_axes(factors: TensorFactors, dim: int, axes: Axes, iterations: int) -> list[Axes | None]:
    """Returns the axes for each leaf (a part of a dimension) of an input; None for a leaf that
    stays open. The first leaf of the dimension `dim` takes the axes. If this leaf is too short, the
    next leaf takes the rest: two groups of samples over dp=4 take dp:(1)2 and dp:(2)2.

    iterations  the iterations of gradient accumulation; leaves that number them are not split
    """
    out: list[Axes | None] = [None] * len(factors.leaves)
    remaining = axes
    own_leaves = [i for i, at in enumerate(factors.dim_of_leaf) if at == dim]
    for i in own_leaves:
        leaf, parts = factors.leaves[i], parts_over(remaining)
        if iterations > 1:
            iterations //= leaf.size
            continue
        if parts == 1:
            break
        share = parts if leaf.size >= parts or i == own_leaves[-1] else gcd(leaf.size, parts)
        out[i], remaining = nest([share, parts // share], remaining) or (remaining, ())
    return out


def _batch_dims(graph: gs.Graph, step: Step | None) -> dict[str, int]:
    """Returns the dimension that numbers samples, by name of an input. In a model that is no
    training step, it is the first dimension of each input where this has the size that it has in
    the first input."""
    if step is not None:
        return step.batch
    size = _first_size(graph)
    data = [t for t in graph.inputs if not is_weight(t) and t.shape]
    return {t.name: 0 for t in data if size is not None and t.shape[0] == size}


def _batch_size(graph: gs.Graph, step: Step | None) -> int | None:
    """Returns the number of samples in a batch; None if the model has no batch."""
    if step is None:
        return _first_size(graph)
    sizes = [t.shape[step.batch[t.name]] for t in graph.inputs if t.name in step.batch]
    return int(sizes[0]) if sizes else None


def _first_size(graph: gs.Graph) -> int | None:
    """Returns the first size of the first input that has a shape; None if there is none."""
    for tensor in graph.inputs:
        if not is_weight(tensor) and tensor.shape and isinstance(tensor.shape[0], int):
            return int(tensor.shape[0])
    return None


def _no_batch(graph: gs.Graph) -> str:
    """Returns the reason why no input has a batch, and the remedy, for an error."""
    data = [tensor for tensor in graph.inputs if not is_weight(tensor)]
    if not data:
        return "the model has no input; use tensor-parallel"
    values = [t.name for t in data if t.dtype is None or t.dtype == object]
    if len(values) == len(data):
        return (
            f"input {values[0]!r} holds no numbers (strings, sequences and the like stay whole on "
            "every rank); use tensor-parallel to split weights, if there are any"
        )
    unknown = next((t.name for t in data if t.shape is None and t.name not in values), None)
    if unknown is not None:
        return (
            f"input {unknown!r} declares no shape; export the model with one (names for sizes that "
            "vary), or use tensor-parallel"
        )
    return "no input has a dimension that could be a batch; use tensor-parallel"


def _all_axes(mesh: Mesh) -> Axes:
    return tuple(mesh.axis(name) for name, _ in mesh.shape)
