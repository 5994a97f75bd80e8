"""Activation recomputation: the backward pass computes activations again instead of keeping them in
memory. Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.base.near_names import there_are
from onnxpar.graph.clone import clone_nodes, needed
from onnxpar.graph.metadata import node_names
from onnxpar.graph.recomputation_gates import add_gate
from onnxpar.graph.subgraphs import captured
from onnxpar.graph.tensors import shape_bytes
from onnxpar.training.gradients.reverse import reached_from
from onnxpar.training.gradients.value import Value


@dataclass(frozen=True)
class Block:
    """Nodes of a forward pass that the backward pass computes again.

    before  the tensors that the nodes read, except parameters and constants
    after   an activation that other nodes read; once its gradient is known, the nodes are computed
            again
    kept    the names of the nodes' results that stay in memory, `after` among them
    """

    nodes: list[gs.Node]
    before: tuple[gs.Tensor, ...]
    after: gs.Tensor
    kept: frozenset[str]


def find_blocks(nodes: Sequence[gs.Node], parameters: Collection[str], loss: str) -> list[Block]:
    """Divides a forward pass into blocks so that computing them again in the backward pass saves
    memory. Returns the blocks.

    nodes       the nodes of the forward pass
    parameters  the names of parameters
    loss        the name of the loss

    A block ends where all later nodes read only a single activation (a tensor that depends on
    parameters) of the nodes so far. The number of blocks minimizes the sum of two sizes: the bytes
    that are kept, and the bytes of the largest block. Errors: StrategyError if there are fewer than
    two such places.
    """
    active = reached_from(nodes, parameters) - set(parameters)
    ends = _single(nodes, active)
    if len(ends) < 2:
        raise StrategyError(
            "--recompute: the model cannot be cut into blocks, because no two activations are "
            "on all paths to the loss; leave --recompute out"
        )
    sizes = [_bytes(node, active) for node in nodes]
    total = [0]
    for size in sizes:
        total.append(total[-1] + size)
    cuts = min(
        (_partition(ends, total, count) for count in range(1, len(ends))),
        key=lambda cut: _cost(cut, ends, total),
    )
    return [
        Block(list(nodes[a + 1 : b + 1]), (ends[a],), ends[b], frozenset((ends[b].name,)))
        for a, b in pairwise(cuts)
        if ends[b].name != loss
    ]


def _matches(node: gs.Node, pattern: str) -> bool:
    """True if a name of the node matches a glob."""
    return any(fnmatchcase(name, pattern) for name in node_names(node))


def named_blocks(
    nodes: Sequence[gs.Node], parameters: Collection[str], patterns: Sequence[str]
) -> list[Block]:
    """Returns blocks of the nodes whose names match one of the globs `patterns`: one block for each
    connected group of such nodes that has something to compute again. Results that nodes outside
    the group read are kept. The last node, which computes the loss, is left out.

    Errors: StrategyError if a glob matches nothing, or if no group has anything to compute again.
    """
    for pattern in patterns:
        if not any(_matches(node, pattern) for node in nodes):
            known = there_are(pattern, [node.name for node in nodes])
            raise StrategyError(f"--recompute-nodes {pattern!r} matches no node{known}")
    active = reached_from(nodes, parameters) - set(parameters)
    # The last node computes the loss, whose gradient is given: nothing could wait for it.
    chosen = [n for n in nodes[:-1] if any(_matches(n, pattern) for pattern in patterns)]
    blocks = [
        block
        for group in _connected(chosen)
        if (block := _block(group, nodes, active, parameters)) is not None
    ]
    if not blocks:
        raise StrategyError(
            f"--recompute-nodes {', '.join(patterns)}: other nodes read every result of these "
            "nodes, so all results are kept; name the nodes after them, too"
        )
    return blocks


def _connected(nodes: Sequence[gs.Node]) -> list[list[gs.Node]]:
    """Divides nodes into groups that tensors connect; the order of nodes stays."""
    makers = {t.name: i for i, node in enumerate(nodes) for t in node.outputs if t.name}
    later = list(range(len(nodes)))

    def last(i: int) -> int:
        """The last node, so far, of the group of node i."""
        while later[i] != i:
            later[i] = i = later[later[i]]
        return i

    for i, node in enumerate(nodes):
        for tensor in node.inputs:
            if tensor.name in makers:
                later[last(makers[tensor.name])] = i
    groups: dict[int, list[gs.Node]] = defaultdict(list)
    for i, node in enumerate(nodes):
        groups[last(i)].append(node)
    return [groups[i] for i in sorted(groups)]


def _block(
    group: list[gs.Node],
    nodes: Sequence[gs.Node],
    active: Collection[str],
    parameters: Collection[str],
) -> Block | None:
    """Returns the block of a group of nodes; None if nodes outside the group read all its results.
    The block is computed again once the gradient of the last result that such nodes read is known;
    that gradient depends on no node of the group.

    nodes       the nodes of the forward pass
    active      names of activations: tensors that depend on parameters
    parameters  names of parameters
    """
    inside = {id(node) for node in group}
    results = [t for node in group for t in node.outputs if t.name]
    names = {t.name for t in results}
    ends = nodes[-1].outputs  # the loss
    outside = {t.name for node in nodes if id(node) not in inside for t in node.inputs}
    outside |= {t.name for t in ends} | {t.name for node in nodes for t, _, _ in captured(node)}
    kept = frozenset(names & outside)
    last = [t for t in results if t.name in kept and t.name in active]
    if kept == names or not last:
        return None
    read = {t.name: t for node in group for t in node.inputs if t.name not in names}
    before = [
        t
        for name, t in read.items()
        if name and name not in parameters and not isinstance(t, gs.Constant)
    ]
    return Block(group, tuple(before), last[-1], kept)


def _single(nodes: Sequence[gs.Node], active: Collection[str]) -> dict[int, gs.Tensor]:
    """Returns, by index of a node, the only activation of the nodes up to it that later nodes read.
    There is no entry where later nodes read none or several."""
    last: dict[str, int] = {}
    for i, node in enumerate(nodes):
        for tensor in node.inputs:
            last[tensor.name] = i
    alive: dict[str, gs.Tensor] = {}
    singles = {}
    for i, node in enumerate(nodes):
        alive = {name: t for name, t in alive.items() if last[name] > i}
        for tensor in node.outputs:
            if tensor.name in active and last.get(tensor.name, -1) > i:
                alive[tensor.name] = tensor
        if len(alive) == 1 and next(iter(alive.values())) in node.outputs:
            (singles[i],) = alive.values()
    return singles


def _bytes(node: gs.Node, active: Collection[str]) -> int:
    """Returns the bytes of the activations that a node computes."""
    tensors = [t for t in node.outputs if t.name in active and t.shape is not None]
    return sum(shape_bytes(t, t.shape) for t in tensors)


def _partition(ends: dict[int, gs.Tensor], total: Sequence[int], count: int) -> list[int]:
    """Returns positions that divide the nodes between the first and the last of `ends` into at most
    `count` blocks of about the same number of bytes. `total` has the bytes before each node."""
    places = list(ends)
    first, last = total[places[0]], total[places[-1]]
    cuts = [places[0]]
    for k in range(1, count):
        wanted = first + (last - first) * k / count
        place = min(places, key=lambda p: abs(total[p] - wanted))
        if place > cuts[-1]:
            cuts.append(place)
    return [*cuts, places[-1]] if places[-1] > cuts[-1] else cuts


def _cost(cuts: Sequence[int], ends: dict[int, gs.Tensor], total: Sequence[int]) -> int:
    """Returns the bytes of the tensors that are kept at the positions `cuts`, plus the bytes of the
    largest block."""
    kept = sum(shape_bytes(ends[c], ends[c].shape) for c in cuts)
    return kept + max((total[b] - total[a] for a, b in pairwise(cuts)), default=0)


def _is_mask_of_rows(tensor: gs.Tensor) -> bool:
    """True for one Boolean per row, a small tensor that stays in memory, so that both passes of a
    mixture of experts read the same decisions of its router."""
    return tensor.dtype == bool and bool(tensor.shape) and tensor.shape[-1] == 1


def recompute(
    graph: gs.Graph, forward: int, blocks: Sequence[Block], gradients: dict[str, Value]
) -> None:
    """Makes the backward pass read copies of the blocks' nodes instead of the forward pass's
    activations.

    forward    the number of nodes of the forward pass; the others are the backward pass
    gradients  the gradient of each block's `after`, by name; once it is known, the block is
               computed again
    """
    backward = list(graph.nodes[forward:])
    first = list(graph.nodes[:forward])
    makers = {id(t): node for node in backward for t in node.outputs}
    added: dict[int, list[gs.Node]] = {}
    for number, block in enumerate(blocks):
        results = [t for node in block.nodes for t in node.outputs]
        masks = {t.name for t in results if _is_mask_of_rows(t)}
        inside = {id(t): t for t in results if t.name not in block.kept | masks}
        readers = [n for n in backward if any(id(t) in inside for t in n.inputs)]
        if not readers:
            continue
        gate, name = f"block.{number}", f"recompute/block.{number}"
        graph.nodes = []
        opened = add_gate(graph, gate, f"{name}/gradient", gradients[block.after.name].tensor)
        again = {
            id(t): add_gate(graph, gate, f"{name}/start{f'.{i}' if i else ''}", t)
            for i, t in enumerate(block.before)
        }
        read = needed(gs.Graph(block.nodes), {t.name for n in readers for t in n.inputs}, masks)
        copies, tensors = clone_nodes(read, f"{name}/", again)
        opener = makers[id(gradients[block.after.name].tensor)]
        added.setdefault(id(opener), []).extend([*graph.nodes, *copies])
        is_opened = False
        for node in backward:
            for i, tensor in enumerate(node.inputs):
                if tensor is gradients[block.after.name].tensor:
                    node.inputs[i] = opened
                elif is_opened and id(tensor) in again:  # as copies do: rings find what both read
                    node.inputs[i] = again[id(tensor)]
                elif id(tensor) in inside and id(tensor) in tensors:
                    node.inputs[i] = tensors[id(tensor)]
            is_opened = is_opened or node is opener
    graph.nodes = first
    for node in backward:
        graph.nodes.append(node)
        graph.nodes.extend(added.get(id(node), ()))
