"""The kinds that torch.export gave to the tensors of a network, from the metadata of the graph."""

from __future__ import annotations

import re

from onnx import GraphProto

_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_ENTRY = re.compile(r"^\S+: (PARAMETER|BUFFER|CONSTANT_TENSOR) target='([^']+)'", re.MULTILINE)
PARAMETER = "PARAMETER"


def exported_kinds(graph: GraphProto) -> dict[str, str]:
    """PARAMETER, BUFFER or CONSTANT_TENSOR by name; empty if the exporter wrote no signature."""
    for entry in graph.metadata_props:
        if entry.key == _SIGNATURE:
            return {name: kind for kind, name in _ENTRY.findall(entry.value)}
    return {}
