"""What torch.export wrote into a file's metadata: the kinds of a network's tensors, and the call of
torch from which a node was made."""

from __future__ import annotations

import re
from dataclasses import dataclass

import onnx_graphsurgeon as gs
from onnx import GraphProto

_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_ENTRY = re.compile(r"^\S+: (PARAMETER|BUFFER|CONSTANT_TENSOR) target='([^']+)'", re.MULTILINE)
PARAMETER = "PARAMETER"
_NODE = "pkg.torch.onnx.fx_node"
_CALL = re.compile(
    r"\[target=torch\.ops\.aten\.(\w+)\.\w+\]\(args = \((.*)\), kwargs = ", re.DOTALL
)
_DETACHED = re.compile(r"detach_?(_\d+)?$")
"""Matches the names that torch.export gives to results of detach()."""
_PADDING = {"embedding": 2, "embedding_bag": 8}
"""The position of the argument `padding_idx`; -1 or None is none."""


@dataclass(frozen=True)
class Call:
    """A call of torch: the name of an op of ATen, and its arguments as text."""

    op: str
    arguments: str

    @property
    def tensors(self) -> list[str]:
        """The names of the tensors among the arguments, in order."""
        return re.findall(r"%(\w+)", self.arguments)

    @property
    def is_detach(self) -> bool:
        """True if the call cuts its result off from the gradient."""
        return self.op in ("detach", "detach_")

    @property
    def detached(self) -> list[int]:
        """The positions among `tensors` of those that an earlier call has cut off."""
        return [i for i, name in enumerate(self.tensors) if _DETACHED.match(name)]

    @property
    def padding_row(self) -> int | None:
        """The row that a lookup does not train; None if there is none."""
        given = self.arguments.split(", ")
        text = "".join(given[at : at + 1]) if (at := _PADDING.get(self.op)) is not None else ""
        return int(text) if text.isdigit() else None

    @property
    def scales_by_frequency(self) -> bool:
        """True if a lookup divides the gradient of a row by how often a batch has it."""
        return self.op == "embedding" and self.arguments.split(", ")[3:4] == ["True"]


def call_of(node: gs.Node) -> Call | None:
    """The call of torch from which a node was made; None if the file does not say it."""
    source = vars(node).get("onnx_source")
    for entry in source.metadata_props if source is not None else ():
        if entry.key == _NODE and (found := _CALL.search(entry.value)):
            return Call(found[1], found[2])
    return None


def exported_kinds(graph: GraphProto) -> dict[str, str]:
    """PARAMETER, BUFFER or CONSTANT_TENSOR by name; empty if the exporter wrote no signature."""
    for entry in graph.metadata_props:
        if entry.key == _SIGNATURE:
            return {name: kind for kind, name in _ENTRY.findall(entry.value)}
    return {}
