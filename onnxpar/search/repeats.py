"""Finds repeated blocks of a graph, such as the layers of a model, which get the same strategy."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.search.op_cost import is_far
from onnxpar.search.op_strategies import Kinds
from onnxpar.search.rated_ops import rated_as
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.state import ShardingState

LEAST_NODES = 4
"""Fewest nodes of a block that counts as repeated."""
LEAST_TIMES = 3
"""Fewest consecutive occurrences of a block that count as repetitions."""


def tied(sharding: ShardingState, kinds: Kinds) -> list[int]:
    """Returns a number for each node, in the order of the graph; nodes in the same place of
    repeated blocks have the same number."""
    return numbered(signs(sharding, kinds))


def signs(
    sharding: ShardingState, kinds: Kinds, known: dict[Hashable, int] | None = None
) -> list[int]:
    """Returns a number for each node, in the order of the graph; nodes with equal signatures have
    equal numbers. `known` has the numbers of signatures in other searches."""
    numbers = {} if known is None else known
    ops = sharding.factors.ops
    return [numbers.setdefault(signature(op, sharding, kinds), len(numbers)) for op in ops]


def numbered(signs: Sequence[int]) -> list[int]:
    """Returns the numbers of `tied`, from the numbers of `signs`: [0, 1, 2, 3, 0, 1, 2, 3, ...] for
    blocks of four nodes."""
    numbers = list(range(len(signs)))
    for start, end, period in runs(np.array(signs), 0):
        for i in range(start + period, end):
            numbers[i] = numbers[i - period]
    return numbers


def signature(op: OpFactors, sharding: ShardingState, kinds: Kinds) -> Hashable:
    """Returns a key of everything that determines the strategies of a node and their costs."""
    if op.bodies:
        return (op.node.name, op)
    atoms: dict[int, int] = {}
    leaves = [
        (leaf.size, leaf.factor, atoms.setdefault(leaf.atom, len(atoms)), *_sizes(op, i, sharding))
        for i, leaf in enumerate(op.leaves)
    ]
    attrs = sorted((k, repr(v)) for k, v in op.node.attrs.items())
    return (
        (op.node.op, op.node.domain, tuple(attrs), tuple(leaves), op.inputs, op.outputs),
        (
            op.apart,
            op.co_sharded,
            op.rings,
            tuple(sorted(op.whole.items())),
            tuple(sorted(op.rule.sizes.items())),
            None if op.chosen is None else (op.chosen.share, atoms.get(op.chosen.atom)),
            any(t.name in sharding.factors.on_host for t in op.node.outputs),
            op.node.name in sharding.factors.in_convolutions,
            sharding.factors.in_loops.get(op.node.name),
            rated_as(op.node),
            tuple(is_far(t, sharding) for t in (*op.node.inputs, *op.node.outputs)),
        ),
        tuple(map(str, sharding.ops[op.node.name])),
        tuple(_operand(t, op, sharding, kinds) for t in (*op.node.inputs, *op.node.outputs)),
    )


def _sizes(op: OpFactors, leaf: int, sharding: ShardingState) -> tuple[Hashable, ...]:
    """Returns everything that determines the sizes of the shards of leaf number `leaf` of a node,
    besides its global size: its sizes where costs are computed, whether it is open, and shard sizes
    that the user gave."""
    atom = op.leaves[leaf].atom
    each = tuple((weight, at.extent(leaf)) for weight, at in op.costed)
    return each, atom in sharding.factors.open_atoms, atom if sharding.parts else None


def _operand(tensor: gs.Tensor, op: OpFactors, sharding: ShardingState, kinds: Kinds) -> Hashable:
    """Returns everything about an operand or result that a node's strategies and costs depend
    on."""
    name = tensor.name
    factors = sharding.factors.tensors.get(name)
    dims = factors and (factors.dims, factors.priced, factors.dim_of_leaf)
    is_of_experts = op.chosen and sharding.factors.is_of_experts(tensor, op.chosen)
    pinned = sharding.tensor_sharding(name) if name in sharding.pinned else None
    shape = None if tensor.shape is None else tuple(map(str, tensor.shape))
    partial = tuple(sorted(kinds.get(name, ())))
    kind = type(tensor).__name__, bool(name), shape, str(tensor.dtype), is_of_experts
    return kind, dims, partial, pinned


def runs(signs: Array, offset: int) -> Iterator[tuple[int, int, int]]:
    """Yields (start, end, period) for each stretch of `signs` that repeats with that period: the
    longest stretch first, then the stretches before and after it. `offset` is added to start and
    end."""
    best = (0, 0, 0)
    for period in range(LEAST_NODES, len(signs) // LEAST_TIMES + 1):
        same = np.flatnonzero(signs[period:] != signs[:-period])
        edges = np.concatenate(([-1], same, [len(signs) - period]))
        i = int(np.diff(edges).argmax())
        length = int(edges[i + 1] - edges[i] - 1)
        if length >= period * (LEAST_TIMES - 1) and length + period > best[1] - best[0]:
            start = int(edges[i] + 1)
            best = (start, start + length + period, period)
    start, end, period = best
    if period:
        yield offset + start, offset + end, period
        yield from runs(signs[:start], offset)
        yield from runs(signs[end:], offset + end)
