"""Rewrites onnxruntime's errors on a rank for users: with the names that nodes have in the unsplit
model, and a note if numbers refer to a shard."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from onnxpar.base.custom_ops import remedy
from onnxpar.runtime.ranks.log import NODE_FAILED, describe

if TYPE_CHECKING:  # ranks need onnx only after a failure
    import onnx

_OUT_OF_RANGE = re.compile(r"out of (data )?bounds|out of range|invalid ind", re.I)
_NODE_REFUSED = re.compile(r".*Node ?\((.*?)\) Op \((\w+)\) (.*)", re.DOTALL)


def failure_text(error: Exception, file: Path, rank: int, ranks: int) -> str:
    """Returns the text for an error of a run: for a failed node, the op, the node's name in the
    unsplit model, and onnxruntime's message. `file` is the ONNX file of the rank."""
    text = describe(error)
    match = NODE_FAILED.search(str(error))
    if match is None or ranks == 1:
        return text
    op, name, message = match.groups()
    if message.startswith(op):  # a collective, whose messages have global names
        return text
    origins = _origins(file)
    origin = origins.get(name, name)
    lowered = {global_name for own, global_name in origins.items() if own != global_name}
    if origin in lowered and _OUT_OF_RANGE.search(message):  # indices into a shard of a table
        return f"{op} {origin!r}: an index is out of range"
    note = (
        f" (sizes and indices are those of rank {rank}'s shard)"
        if re.search(r"\d", message)
        else ""
    )
    return f"{op} {origin!r}: {message}{note}"


def load_text(error: Exception, file: Path) -> str:
    """Returns the text for an error of opening a rank's graph: the innermost node that
    onnxruntime's message names, by its name in the unsplit model, and the message; if files are
    damaged, the message and the remedy."""
    match = _NODE_REFUSED.search(str(error))
    if match is not None and not is_damaged(file):
        name, op, message = match.groups()
        return f"onnxruntime does not load {op} '{_origins(file).get(name, name)}': {message}"
    text = f"onnxruntime does not load {file.name}: {error}"
    if is_damaged(file):
        return f"{text}; the folder is damaged: write it again with `onnxpar shard`"
    return text + remedy(text)


def is_damaged(file: Path) -> bool:
    """True if an ONNX file or one of its files of weights is missing, cut off or unreadable."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(str(file), load_external_data=False)
        for tensor in model.graph.initializer:
            place = {entry.key: entry.value for entry in tensor.external_data}
            if place.get("location"):
                end = int(place.get("offset", 0)) + int(place.get("length", 0))
                if (file.parent / place["location"]).stat().st_size < end:
                    return True
    except (OSError, DecodeError, ValueError):
        return True
    return not model.HasField("graph")


def _origins(file: Path) -> dict[str, str]:
    """Returns {name of a node in a rank's graph: name of the node of the unsplit model from which
    it comes}; empty if the file cannot be read."""
    import onnx

    try:
        model = onnx.load(str(file), load_external_data=False)
    except Exception:  # without global names, the error is still reported
        return {}
    return dict(_named(model.graph))


def _named(graph: onnx.GraphProto) -> list[tuple[str, str]]:
    """The pairs for `_origins`, also of nodes in bodies."""
    from onnxpar.graph.origin import origin_of

    names = [(node.name, origin_of(node)) for node in graph.node]
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                names += _named(attribute.g)
    return names
