"""Makes nodes with unique names, and collects them in a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.origin import note_origin
from onnxpar.graph.per_rank import PerRank
from onnxpar.lowering.lowering_builder import rank_constant


class AddedNodes:
    """Collects, in `nodes`, the nodes that a rank runs in place of the global node `origin`.

    name      a prefix of the names of new nodes and tensors, which are unique
    per_rank  gets the constants that depend on the rank
    """

    def __init__(self, name: str, origin: str, per_rank: PerRank) -> None:
        self.name, self.origin, self.per_rank = name, origin, per_rank
        self.nodes: list[gs.Node] = []
        self.count = 0

    def add(
        self,
        op: str,
        inputs: Sequence[Any],
        dtype: Any,
        output: gs.Tensor | None = None,
        **attrs: Any,
    ) -> gs.Variable:
        """Appends a node, and returns its result: `output`, or a new tensor of this dtype. Operands
        may be numbers or lists of integers, which become int64 constants; so does an attribute
        `axes`."""
        name = f"{self.name}/{op}.{self.count}"
        self.count += 1
        operands = [
            t if isinstance(t, gs.Tensor) else gs.Constant(f"{name}/{i}", np.array(t, np.int64))
            for i, t in enumerate(inputs)
        ]
        if "axes" in attrs:
            operands.append(gs.Constant(f"{name}/axes", np.array(attrs.pop("axes"), np.int64)))
        result = gs.Variable(name, dtype) if output is None else output
        self.note(gs.Node(op, name, attrs, operands, [result]))
        return result

    def constant(
        self, name: str, value: Callable[[int], Any], dtype: Any = np.int64
    ) -> gs.Constant:
        """Returns a constant whose value on a rank is `value(rank)`."""

        def by_rank(rank: int) -> Any:
            return np.array(value(rank), dtype)

        return rank_constant(f"{self.name}/{name}", by_rank(0), by_rank, self.per_rank)

    def note(self, node: gs.Node) -> None:
        """Appends a node that exists already."""
        note_origin([node], self.origin)
        self.nodes.append(node)

    def copy(
        self, node: gs.Node, inputs: Sequence[gs.Tensor], outputs: Sequence[gs.Tensor]
    ) -> None:
        """Appends a copy of a node, with the same name and attributes but other operands and
        results."""
        clone = gs.Node(
            node.op, node.name, dict(node.attrs), list(inputs), list(outputs), node.domain
        )
        clone.onnx_source = vars(node).get("onnx_source")
        self.nodes.append(clone)
