"""Infers a graph with open sizes at several bindings in step.

A node is folded away where all bindings agree, or where its results are sizes: whole numbers that
are polynomials of the symbols. They become constants that differ between the bindings, and in the
end small computations on the sizes that a run has. Whatever else depends on sizes stays a node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TypeProto

from onnxpar.shapes import Walk
from onnxpar.symbols import Polynomial, fit

MOST = 64
"""Elements of a tensor of sizes."""

_EXACT = frozenset(
    [
        "Shape",
        "Size",
        "Constant",
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Neg",
        "Concat",
        "Gather",
        "GatherElements",
        "GatherND",
        "Slice",
        "Squeeze",
        "Unsqueeze",
        "Cast",
        "CastLike",
        "Identity",
        "Reshape",
        "Flatten",
        "ReduceProd",
        "ReduceSum",
        "Split",
        "Expand",
        "Tile",
        "Transpose",
        "ConstantOfShape",
        "ScatterND",
        "ScatterElements",
        "Where",
        "Max",
        "Min",
        "Equal",
        "Less",
        "Greater",
    ]
)
"""Ops whose results are polynomials where their operands are, with exceptions: see `_is_exact`."""
_SAME = frozenset(("Max", "Min"))
_COMPARE = frozenset(("Equal", "Less", "Greater"))


class Lockstep:
    """Walks over one graph, one for each binding. `variables` are the symbols' values there."""

    def __init__(
        self,
        model: onnx.ModelProto,
        inputs: Sequence[Mapping[str, TypeProto]],
        variables: Mapping[str, Sequence[int]],
    ) -> None:
        self.model = model
        self.variables = variables
        self.walks = [Walk(model, types) for types in inputs]
        self.kept: list[NodeProto] = []
        self.varies: set[str] = set()

    def run(self) -> None:
        """Goes through all nodes."""
        for node in self.model.graph.node:
            self._step(node)

    def _step(self, node: NodeProto) -> None:
        found = [walk.evaluate(node) for walk in self.walks]
        results = [f for f in found if f is not None]
        exact = self._is_exact(node)
        if len(results) == len(found) and exact and self._are_sizes(results):
            for walk, values in zip(self.walks, results, strict=True):
                walk.fold(node, values)
            if not _agree(results):
                self.varies.update(node.output)
            return
        self.kept.append(node)
        if any(name in self.varies for name in node.input):
            self.varies.update(node.output)
        small = all(np.size(v) <= MOST and np.ndim(v) <= 1 for r in results for v in r)
        for walk, values_ in zip(self.walks, found, strict=True):
            if len(results) == len(found) and small:
                walk.know(node, values_ or [])
            else:
                walk.infer(node)

    def _is_exact(self, node: NodeProto) -> bool:
        """Whether equal results at all bindings are so at any, and fitting ones fit at any."""
        operands = [n for n in node.input if n]
        if not any(n in self.varies for n in operands):
            return True
        if node.op_type not in _EXACT:
            return False
        values = [[walk.values.get(n) for n in operands] for walk in self.walks]
        if any(v is None for row in values for v in row):
            return node.op_type in ("Shape", "Size")
        if node.op_type == "Div":
            return all(_divides(a, b) for a, b in values)
        if node.op_type in _SAME:
            return all(_agree([[row[0]], [v]]) for row in values for v in row[1:])
        if node.op_type in _COMPARE:  # a size is never negative
            return all(_apart(a, b) or _apart(b, a) for a, b in values)
        return True

    def _are_sizes(self, results: Sequence[Sequence[Any]]) -> bool:
        """Whether the results agree or are polynomials of the symbols."""
        if _agree(results):
            return True
        for arrays in zip(*results, strict=True):
            first = np.asarray(arrays[0])
            if first.size > MOST or not np.issubdtype(first.dtype, np.integer):
                return False
            if any(np.shape(a) != first.shape for a in arrays):
                return False
            columns = np.stack([np.asarray(a).reshape(-1) for a in arrays], 1).tolist()
            if any(fit(column, self.variables) is None for column in columns):
                return False
        return True

    def size(self, name: str, axis: int) -> Polynomial | None:
        """A dimension of a tensor as a polynomial, None where it is none or not known."""
        shapes = [walk.shape(name) for walk in self.walks]
        if any(s is None or axis >= len(s) for s in shapes):
            return None
        return fit([s[axis] for s in shapes if s is not None], self.variables)


def _agree(results: Sequence[Sequence[Any]]) -> bool:
    return all(
        np.array_equal(a, b) and np.asarray(a).dtype == np.asarray(b).dtype
        for other in results[1:]
        for a, b in zip(results[0], other, strict=True)
    )


def _divides(a: Any, b: Any) -> bool:
    return bool((np.asarray(b) != 0).all() and (np.asarray(a) % np.asarray(b) == 0).all())


def _apart(sizes: Any, bound: Any) -> bool:
    return bool((np.asarray(sizes) >= 0).all() and (np.asarray(bound) < 0).all())
