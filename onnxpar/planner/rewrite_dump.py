"""Writes a model as text after each rewrite of the loader, or of a training step, for --dump."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import onnx_graphsurgeon as gs

from onnxpar.base.write_file import new_file, writing
from onnxpar.graph.loaded_text import loaded_text
from onnxpar.graph.reshards import is_reshard, reshard_of
from onnxpar.graph.subgraphs import all_nodes, constants
from onnxpar.graph.write_model import export_model
from onnxpar.planner.typed_json import encode

LOADING, STEP = "00-load", "01-step"
"""Folders for these texts: of the loader's rewrites, and of those of a training step."""
RESHARD = "onnxpar"
"""In a written model, the attribute of a reshard node that holds its axes and layouts, as JSON."""


class RewriteDump:
    """Call it after each rewrite: it writes the model to a numbered file in a folder, if the
    rewrite has changed it. Errors: OnnxparError if a file cannot be written."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._count, self._last = folder, 0, ""
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob("[0-9][0-9]-*.onnxtxt"):
                old.unlink()

    def __call__(self, name: str, graph: onnx.ModelProto | gs.Graph) -> None:
        if isinstance(graph, gs.Graph):
            with exportable(graph):
                graph = export_model(graph, onnx.ModelProto(), {})
        text = loaded_text(graph)
        if text == self._last:
            return
        file = self.folder / f"{self._count:02d}-{name}.onnxtxt"
        with new_file(file) as written:
            written.write_text(text, encoding="utf-8")
        self._count, self._last = self._count + 1, text


@contextmanager
def exportable(graph: gs.Graph) -> Iterator[gs.Graph]:
    """A block in which the attributes of reshards are such that an ONNX model can have them;
    afterwards they are as before."""
    nodes = [(node, node.attrs) for node in all_nodes(graph)]
    values = [(tensor, tensor._values) for tensor in constants(graph)]
    domains = graph.import_domains
    graph.import_domains = None if domains is None else list(domains)  # export adds to it
    for node, attrs in nodes:
        node.attrs = type(attrs)(attrs)
        if is_reshard(node):
            node.attrs = {RESHARD: json.dumps(encode(reshard_of(node)))}
    try:
        yield graph
    finally:
        graph.import_domains = domains
        for node, attrs in nodes:
            node.attrs = attrs
        for tensor, value in values:
            tensor._values = value
