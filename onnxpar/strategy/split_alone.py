"""Annotations for weights that tensor-parallel leaves whole: no atom that the preset splits is in
them (`weight_cover.py` chooses these atoms)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.layout.mesh import Axes, parts_over
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.shard_bytes import mean_bytes
from onnxpar.sharding.state import FactorSharding, ShardingState
from onnxpar.strategy.covering_leaves import covering_leaves
from onnxpar.strategy.training_presets import SplitTogether


@dataclass(frozen=True)
class CloseOpen:
    """The annotation that ends propagation: activations whose leaves (parts of dimensions) are
    still undecided stay whole."""

    def apply(self, sharding: ShardingState) -> bool:
        """Makes every open leaf (a part of a dimension) of activations whole."""
        for op in sharding.factors.ops:
            for tensor in [*op.node.outputs, *op.node.inputs]:
                if isinstance(tensor, gs.Variable) and tensor.name in sharding.tensors:
                    sharding.close_tensor(tensor.name)
        return False


@dataclass(frozen=True)
class SplitAlone:
    """The annotation that splits a weight which propagation has not reached, for the weight's own
    readers only.

    Either the readers are split with the weight (by the columns of a product), or only its storage
    is split and each run gathers it, whichever moves fewer bytes.
    """

    tensor: str
    axes: Axes

    def apply(self, sharding: ShardingState) -> bool:
        """Splits leaves (parts of dimensions) of the weight, and splits its readers or makes them
        whole. False if the weight is split already, or cannot be."""
        if any(sharding.tensors[self.tensor]):
            return False
        readers = [op for op in sharding.factors.ops if _reads(op, self.tensor)]
        chosen = self._leaves(sharding, readers)
        if not chosen:
            return False
        links = [(o, link) for o in readers for i in chosen for link in _links(o, self.tensor, i)]
        if any(_packs(op, self.tensor) for op in readers):
            return self._split_readers(sharding, links, chosen)
        reader, link = links[0]
        is_one = len(links) == links.count(links[0])
        if is_one and link is not None and _moves_less(sharding, reader, link, self.tensor):
            return sharding.assign_op(reader, link, self.axes) and self._store(sharding, chosen)
        for op, link in links:
            if link is not None:
                sharding.close(op, link)
        sharding.pinned.add(self.tensor)
        return self._store(sharding, chosen)

    def _split_readers(
        self,
        sharding: ShardingState,
        links: Sequence[tuple[OpFactors, int | None]],
        chosen: Sequence[int],
    ) -> bool:
        """Splits a weight that must not be gathered, together with its readers. False, and the
        weight stays whole, if a reader cannot be split.

        links   (reader, its leaf for a chosen leaf of the weight, or None)
        chosen  the leaves (parts of dimensions) of the weight
        """
        distinct = {(op.node.name, link): (op, link) for op, link in links}.values()
        if not all(
            link is not None and sharding.assign_op(op, link, self.axes) for op, link in distinct
        ):
            return False
        return self._store(sharding, chosen)

    def _store(self, sharding: ShardingState, chosen: Sequence[int]) -> bool:
        """Splits the chosen leaves (parts of dimensions) of the weight. False if one of them cannot
        be split."""
        return all([sharding.assign_tensor(self.tensor, i, self.axes) for i in chosen])

    def _leaves(self, sharding: ShardingState, readers: Sequence[OpFactors]) -> list[int]:
        """Returns the leaves (parts of dimensions) of the dimension to split: one that splits
        evenly, or else the longest. If the weight must not be gathered, all its readers must be
        able to split the dimension. Empty if there is no such dimension."""
        is_packed = any(_packs(op, self.tensor) for op in readers)
        factors = sharding.factors.tensors[self.tensor]
        n = parts_over(self.axes)
        choices = []
        for chosen in covering_leaves(factors, n):
            links = [link for op in readers for i in chosen for link in _links(op, self.tensor, i)]
            if is_packed and None in links:
                continue
            sizes = [factors.leaves[i].size for i in chosen]
            choices.append((any(s % n for s in sizes), -sum(sizes), chosen))
        return min(choices, default=(False, 0, []))[2]


@dataclass(frozen=True)
class SplitUpdate:
    """The annotation that splits a parameter of a training step which propagation has not reached,
    together with its optimizer states and its next value; `tensors` begins with the parameter.

    Each run gathers the parameter, as in stage 3 of ZeRO. Activations that were made whole stay
    whole.
    """

    tensors: tuple[str, ...]
    axes: Axes

    def apply(self, sharding: ShardingState) -> bool:
        """Splits the dimension that divides most evenly. False if the parameter is split already,
        or cannot be."""
        if any(sharding.tensors[self.tensors[0]]):
            return False
        return SplitTogether(self.tensors, self.axes).apply(sharding)


def _packs(op: OpFactors, tensor: str) -> bool:
    """True if onnxruntime runs the node differently when this weight is not a constant: it must
    then not be gathered in each run."""
    return any(
        t.name == tensor for i, t in enumerate(op.node.inputs) if i in op.rule.ranks.constants
    )


def _reads(op: OpFactors, tensor: str) -> bool:
    return any(t.name == tensor for t in op.node.inputs)


def _links(op: OpFactors, tensor: str, leaf: int) -> Iterator[int | None]:
    """Yields, for each operand of a node that is this tensor, the node's leaf (a part of a
    dimension) for leaf `leaf` of the tensor; None if the node needs the leaf whole."""
    for operand, links in zip(op.node.inputs, op.inputs, strict=True):
        if operand.name == tensor:
            yield links[leaf]


def _moves_less(sharding: ShardingState, op: OpFactors, link: int, weight: str) -> bool:
    """True if gathering the node's result, split at its leaf (a part of a dimension) `link`, moves
    no more bytes than gathering the weight. False if this split would also need communication
    inside the node."""
    if op.leaves[link].factor in op.rule.communicating:
        return False
    result = op.node.outputs[0]
    stored = next(t for t in op.node.inputs if t.name == weight)
    whole = FactorSharding(tuple(() for _ in sharding.factors.tensors[weight].leaves))
    produced = sharding.operand_sharding(op, op.outputs[0])
    return mean_bytes(result, produced, sharding) <= mean_bytes(stored, whole, sharding)
