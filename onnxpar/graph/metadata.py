"""Metadata of nodes (names in the file, layouts), which models keep when they are saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_graphsurgeon as gs
from onnx import NodeProto, ValueInfoProto

_FILE_NAME = "onnxpar.name"
_LAYOUT = "onnxpar.layout"
"""Key of the layouts of a node's or port's tensors as text: viewers such as Netron show it."""
Named = Sequence[tuple[str, str]]
"""(name, text of the layout) of tensors."""


def note_file_name(node: NodeProto) -> None:
    """Records the name that a node has in its file; call this before the node is renamed."""
    note_name_in_file(node, node.name)


def note_name_in_file(node: NodeProto, name: str) -> None:
    """Records a name in the file, unless one is recorded already."""
    if not has_file_name(node):
        node.metadata_props.add(key=_FILE_NAME, value=name)


def has_file_name(node: NodeProto) -> bool:
    """True if `note_file_name` was called for the node."""
    return metadata_of(node, _FILE_NAME) is not None


def node_names(node: gs.Node) -> list[str]:
    """Returns a node's name, and also its name in the file if the loader renamed it."""
    name = metadata_of(node, _FILE_NAME)
    return [node.name, name] if name else [node.name]


def layouts_metadata(operands: Named, results: Named) -> dict[str, str]:
    """Returns metadata with the layouts of a node's tensors: `x [dp, -], w [-, tp] -> y [dp, tp]`,
    or `x [-] sum(tp) -> whole`; empty if no tensor has a layout."""
    sides = [", ".join(f"{n} {layout}" for n, layout in p if layout) for p in (operands, results)]
    return {_LAYOUT: " -> ".join(side or "whole" for side in sides)} if any(sides) else {}


def note_layouts(holder: NodeProto | ValueInfoProto, layouts: Mapping[str, str]) -> None:
    """Replaces the layouts in the metadata of a node, or of a graph input or output. `layouts` has
    texts by tensor."""
    kept = [entry for entry in holder.metadata_props if entry.key != _LAYOUT]
    if isinstance(holder, NodeProto):
        sides = ([(n, layouts.get(n, "")) for n in p if n] for p in (holder.input, holder.output))
        entries = layouts_metadata(*sides)
    else:
        entries = {_LAYOUT: layouts[holder.name]} if holder.name in layouts else {}
    if len(kept) < len(holder.metadata_props):
        del holder.metadata_props[:]
        holder.metadata_props.extend(kept)
    for key, value in entries.items():
        holder.metadata_props.add(key=key, value=value)


def metadata_of(node: gs.Node | NodeProto, key: str) -> str | None:
    """Returns the value of a key in a node's metadata; None if there is none."""
    # getattr would log a warning for a node of graphsurgeon without the attribute
    source = node if isinstance(node, NodeProto) else vars(node).get("onnx_source")
    entries = source.metadata_props if source is not None else ()
    return next((str(entry.value) for entry in entries if entry.key == key), None)
