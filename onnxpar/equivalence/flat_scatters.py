"""Proves rows that are added to zeros where ranks do so in one dimension: what is added to row i
goes to the places from i * width on, and a negative i still counts from the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from onnx import TensorProto

from onnxpar.base.arrays import Array
from onnxpar.equivalence.held import Held, Partial, Relations
from onnxpar.equivalence.lemma import NotShown
from onnxpar.equivalence.program import Node, Shape
from onnxpar.equivalence.ranks import RankNode, Ranks
from onnxpar.equivalence.spans import Families


class FlatScatters:
    """Relates results of a ScatterElements that adds whole rows to zeros."""

    def __init__(self, ranks: Ranks, families: Families, relations: Relations) -> None:
        self.ranks, self.families, self.relations = ranks, families, relations

    def relate(
        self, node: Node, numbers: str, shapes: Sequence[Shape], candidates: Sequence[RankNode]
    ) -> list[Held]:
        """What tensors of ranks are, of the result of a ScatterElements along the first dimension.

        numbers     the tensor of the model with the row to which each row of updates is added
        shapes      those of the operands
        candidates  nodes of ranks that may come from it
        """
        found = []
        for local in candidates:
            if local.first.kind == node.kind and local.is_alike:
                with suppress(NotShown):
                    found += self._related(node, numbers, shapes, local)
        return found

    def _related(
        self, node: Node, numbers: str, shapes: Sequence[Shape], local: RankNode
    ) -> list[Held]:
        programs, shape = self.ranks.programs, shapes[0]
        width, (zeros, places, updates) = math.prod(shape[1:]), local.first.inputs
        if {*local.attrs("axis", programs)} != {0} or {*local.attrs("reduction", programs)} != {
            "add"
        }:
            raise NotShown("it does not add to rows")
        values = self.ranks.constants(zeros) or [np.ones(1)]
        if any(v.shape != (math.prod(shape),) or not is_zero(v) for v in values):
            raise NotShown("it adds to something else")
        column = self._before(places, "Reshape", np.array([-1]))
        column = self._before(column, "Add", np.arange(width))
        column = self._before(column, "Mul", np.array(width))
        column = self._before(column, "Reshape", np.array([-1, 1]))
        cast = self.ranks.makers.get(column)
        if cast is None or cast.first.kind != ("", "Cast") or not cast.is_alike:
            raise NotShown("places may be too large for their type")
        if {*cast.attrs("to", programs)} != {int(TensorProto.INT64)}:
            raise NotShown("places may be too large for their type")
        rows = self._before(updates, "Reshape", np.array([-1]))
        result = self._behind(local.first.outputs[0], np.array(shape))
        found = []
        for index in self.relations.of(numbers, cast.first.inputs[0]):
            for held in self.relations.of(node.inputs[2], rows):
                tokens = held.dims[0]
                others = zip(held.dims[1:], shapes[2][1:], strict=True)
                is_same = index.dims[0] is tokens and all(
                    family.is_whole(n) for family, n in others
                )
                is_column = all(family.is_whole(1) for family in index.dims[1:])
                if not (is_same and is_column) or index.partial or held.partial:
                    continue
                count = shapes[2][0]
                part = () if tokens.is_whole(count) else (Partial("sum", tokens, count),)
                whole = tuple(map(self.families.whole, shape))
                found.append(Held(node.outputs[0], result, whole, part))
        return found

    def _before(self, name: str, op: str, second: Array) -> str:
        """The first operand of the node that makes a tensor, whose second is this constant on all
        ranks. NotShown if it is another node."""
        local = self.ranks.makers.get(name)
        if local is None or not self._is(local, op, second):
            raise NotShown(f"{name!r} is no result of this {op}")
        return local.first.inputs[0]

    def _behind(self, name: str, shape: Array) -> str:
        """A tensor that has the elements of another in this shape. NotShown if there is none."""
        for reader in self.ranks.readers.get(name, ()):
            if reader.first.inputs[0] == name and self._is(reader, "Reshape", shape):
                return reader.first.outputs[0]
        raise NotShown("its result stays flat")

    def _is(self, local: RankNode, op: str, second: Array) -> bool:
        if local.first.kind != ("", op) or not local.is_alike or len(local.first.inputs) != 2:
            return False
        values = self.ranks.constants(local.first.inputs[1])
        return values is not None and all(np.array_equal(value, second) for value in values)


def is_zero(value: Array) -> bool:
    """True if all elements are zero; takes no time if they are one number, repeated."""
    return not (value.flat[:1] if not any(value.strides) else value).any()
