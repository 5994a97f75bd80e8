"""The node that reads what is split, and what its rule says of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from peer.splits import Split

from onnxpar.graph.subgraphs import captured
from onnxpar.rules.notation import expr_vars
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.graph_factors import GraphFactors

IN_SUBGRAPH = "what a subgraph reads of the graph around it is whole"


@dataclass(frozen=True)
class Reader:
    """The first node that reads an input which is split, and why its rule wants that whole; no
    node where the input is passed on or dropped."""

    op: OpFactors | None
    reason: str = ""
    reads_data: bool = True

    @staticmethod
    def of(split: Split, factors: GraphFactors) -> Reader:
        """Of the nodes of a graph, in its order; one that reads no more than a type or a shape only
        where there is no other."""
        return max(_readers(dict(split.places), factors), key=_reads_data, default=Reader(None))

    @property
    def name(self) -> str:
        """The op with its domain."""
        if self.op is None:
            return "(no reader)"
        domain = self.op.node.domain
        return (
            f"{domain}.{self.op.node.op}"
            if domain not in (None, "", "ai.onnx")
            else (str(self.op.node.op))
        )


def _readers(places: Mapping[str, int], factors: GraphFactors) -> Iterator[Reader]:
    """The nodes that read inputs which are split along these dimensions."""
    for op in factors.ops:
        mine = [(i, places[t.name]) for i, t in enumerate(op.node.inputs) if t.name in places]
        if mine:
            reasons = [whole_reason(op, index, dim) for index, dim in mine]
            data = any(op.rule.inputs[i : i + 1] not in ((), (None,)) for i, _ in mine)
            yield Reader(op, "; ".join(dict.fromkeys(r for r in reasons if r)), data)
        elif any(tensor.name in places for tensor, _, _ in captured(op.node)):
            yield Reader(op, IN_SUBGRAPH)


def _reads_data(reader: Reader) -> bool:
    return reader.reads_data


def whole_reason(op: OpFactors, index: int, dim: int) -> str:
    """Why a dimension of an operand must be whole; empty where it need not or nobody says why."""
    spec = op.rule.inputs[index] if index < len(op.rule.inputs) else None
    if spec is None:
        return ""
    reasons = (op.whole[v] for v in expr_vars(spec[dim]) if v in op.whole)
    return "; ".join(dict.fromkeys(reasons))
