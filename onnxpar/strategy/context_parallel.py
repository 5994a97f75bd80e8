"""The preset context-parallel: splits activations along the sequence over the axis `cp`.

Every weight is whole along `cp`, as in data parallelism. Attention relates each position to all
others. Ranks compute it in one of two ways: each rank gathers all keys and values and attends with
its own queries (Dubey et al., "The Llama 3 Herd of Models", 2024), or ranks exchange positions for
heads before attention, and back after it (Jacobs et al., "DeepSpeed Ulysses", 2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.graph.interchange import is_weight
from onnxpar.graph.subgraphs import all_nodes, bodies
from onnxpar.graph.tensors import is_float, numpy_dtype
from onnxpar.graph.training_spec import Step
from onnxpar.layout.mesh import Axes, parts_over
from onnxpar.sharding.graph_factors import GraphFactors
from onnxpar.sharding.state import ShardingState
from onnxpar.strategy.attention_cores import Cores
from onnxpar.strategy.contraction import CONTRACTIONS
from onnxpar.strategy.core_split import CoreSplit

CONTEXT = "context-parallel"
RING = "ring-attention"
"""The preset ring-attention: context-parallel in which keys and values travel around a ring of
ranks, where an op can be lowered to a ring."""
AXIS = "cp"
"""The mesh axis that splits the sequence."""
_LOOK_UP = ("Gather", "GatherND", "GatherElements")


def context_annotation(
    graph: gs.Graph, sharding: ShardingState, batch: set[int], step: Step | None, preset: str
) -> SplitSequences:
    """Returns the annotation that splits all sequences over the axis `cp`. `batch` has the atoms
    (parts of dimensions) that number samples, `preset` is context-parallel or ring-attention.
    Errors: StrategyError if the mesh has no axis `cp`, or if the model has no sequence that ranks
    can split."""
    mesh = sharding.mesh
    if AXIS not in mesh.sizes:
        raise StrategyError(
            f"{preset} needs a mesh with an axis {AXIS}, not {mesh}; give --mesh {AXIS}=.."
        )
    atoms = frozenset(sequence_atoms(graph, sharding, step)) - batch
    if not atoms and mesh.sizes[AXIS] > 1:
        why = _why_no_sequence(graph, sharding)
        raise StrategyError(
            f"{preset} over {mesh.sizes[AXIS]}: {why}; use tensor-parallel or data-parallel"
        )
    return SplitSequences(
        atoms, frozenset(batch), frozenset(_computed(graph)), (mesh.axis(AXIS),), preset == RING
    )


def _why_no_sequence(graph: gs.Graph, sharding: ShardingState) -> str:
    """Returns the reason why no dimension of an input is a sequence that ranks can split, for an
    error."""
    for tensor in graph.inputs:
        factors = sharding.factors.tensors.get(tensor.name)
        shape = tuple(tensor.shape or ())
        if factors is None or is_weight(tensor) or len(shape) != (3 if is_float(tensor) else 2):
            continue
        if shape[1] > 1 and 1 not in factors.dim_of_leaf:
            return (
                f"the model takes the positions of '{tensor.name}' apart, as an unrolled loop over "
                "them does, so that no rank can have some of them"
            )
    return (
        "no input has a sequence of more than one position as its second dimension (token ids, or "
        "features of each position)"
    )


def sequence_atoms(graph: gs.Graph, sharding: ShardingState, step: Step | None) -> Iterator[int]:
    """Yields the atoms (parts of dimensions) that number positions: the atoms of the second
    dimension of inputs [batch, position] with token ids (which look up rows of a table), and of
    inputs [batch, position, feature]."""
    states = {slot.input for slot in step.slots} if step is not None else set()
    looked_up = _looked_up(sharding.factors)
    for tensor in graph.inputs:
        factors = sharding.factors.tensors.get(tensor.name)
        if factors is None or is_weight(tensor) or tensor.name in states:
            continue
        is_ids = np.issubdtype(numpy_dtype(tensor), np.integer) and len(factors.dims) == 2
        for leaf, dim in zip(factors.leaves, factors.dim_of_leaf, strict=True):
            is_sequence = leaf.atom in looked_up if is_ids else len(factors.dims) == 3
            if dim == 1 and is_sequence:
                yield leaf.atom


def _looked_up(factors: GraphFactors) -> set[int]:
    """Returns the atoms (parts of dimensions) of tensors of ids that look up rows of tables, in the
    main graph and in bodies."""
    atoms: set[int] = set()
    for op in factors.ops:
        if op.node.op in _LOOK_UP and is_float(op.node.inputs[0]):
            ids = factors.tensors.get(op.node.inputs[1].name)
            atoms |= {leaf.atom for leaf in ids.leaves} if ids is not None else set()
    return atoms


def _computed(graph: gs.Graph) -> set[str]:
    """Returns the names of activations: tensors that depend on weights through a product or a
    lookup, or on inputs of features. Masks, positions, and tensors that depend on weights alone are
    left out."""
    stored: set[str] = set()
    features = [t for t in graph.inputs if is_float(t) and len(t.shape or ()) > 1]
    computed = {t.name for t in features if not is_weight(t)}
    count = -1
    while count < len(computed):  # a body may come before the nodes whose results it reads
        count = len(computed)
        for node in all_nodes(graph):
            _follow(node, stored, computed)
    return computed


def _follow(node: gs.Node, stored: set[str], computed: set[str]) -> None:
    """Adds the names of a node's results to `stored` if they depend on weights alone, or to
    `computed` if they depend on weights and data (activations)."""
    read = [t for t in node.inputs if t.name]
    stored |= {t.name for t in read if is_weight(t) and is_float(t)}
    results = {t.name for t in node.outputs}
    multiplies = node.op in CONTRACTIONS and any(t.name in stored for t in read)
    looks_up = node.op in _LOOK_UP and node.inputs[0].name in stored
    if any(t.name in computed for t in read):
        inner = [t for body in bodies(node) for t in body.inputs if is_float(t)]
        computed |= results | {t.name for t in inner}
    elif read and all(is_weight(t) or t.name in stored for t in read):
        stored |= results
    elif multiplies or looks_up:
        computed |= results
    if any(t.name in computed for body in bodies(node) for t in body.outputs):
        computed |= results


@dataclass(frozen=True)
class SplitSequences:
    """The annotation that splits all sequences of the graph over `axes`. It splits the cores of
    attention by queries or by heads, whichever is cheaper.

    atoms     the atoms (parts of dimensions) that number positions of sequences
    batch     the atoms that number samples
    computed  the names of activations, which are worth splitting
    ring      True if keys and values travel around a ring of ranks where an op supports this
    """

    atoms: frozenset[int]
    batch: frozenset[int]
    computed: frozenset[str]
    axes: Axes
    ring: bool = False

    def apply(self, sharding: ShardingState) -> bool:
        """Splits the undecided leaves (parts of dimensions) of positions in all nodes that compute
        activations. Nodes that compute only masks and positions follow by propagation. False for
        one rank."""
        if parts_over(self.axes) == 1:
            return False
        cores = Cores(sharding.factors, self.atoms, self.computed)
        decided: set[str] = set()
        for core in cores.find():
            decided |= CoreSplit(core, cores, sharding, self.axes, self.batch, self.ring).decide()
        for op in sharding.factors.ops:
            if op.node.name not in decided and self.computed & {t.name for t in op.node.outputs}:
                for leaf in cores.positions(op):
                    sharding.assign_op(op, leaf, self.axes)
        return True
