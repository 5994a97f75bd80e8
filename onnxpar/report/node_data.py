"""The plan as node data of Google's Model Explorer, which colours the nodes of a model's graph
(`plan --node-data`).

A file has one value for each node: an object by the id of the graph, with `results` by node id. The
adapter for ONNX defines these ids: the node's name, or `<node_3>` for the fourth node without one,
and `[value] NAME` for an input or a weight. Nodes in bodies and functions, and nodes that the
loader has replaced, are left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx

from onnxpar.base.write_file import whole_file, writing
from onnxpar.load.read_file import read_proto
from onnxpar.report.explain import COLLECTIVE, NODE, Explained, Operand, Step
from onnxpar.report.walk import Walk

LAYOUTS, COLLECTIVES = "layouts", "collectives"
MILLISECONDS, SENT, WEIGHTS = "milliseconds", "sent_bytes", "weight_bytes"
COLOURS = ("#7fb2e5", "#f2b27f", "#a3d6a3", "#d9a6d9", "#e8d27a", "#9fd8d8", "#e59c9c", "#b9b3e6")
"""Backgrounds of different texts, in the order in which they first occur."""
_WHOLE = frozenset("[-], ")
"""Layouts that consist of these characters alone are not split."""
GRADIENT = [{"stop": 0, "bgColor": "#ffffff"}, {"stop": 1, "bgColor": "#d9602b"}]
"""Backgrounds for the smallest and the largest number in a file."""
Values = dict[str, dict[str, str | float]]
"""The value of each node, by file and node id."""


def write_node_data(folder: str | os.PathLike[str], explained: Explained, walk: Walk) -> None:
    """Writes the files into a folder, which is created if needed. Errors: OnnxparError."""
    files = node_data(explained, walk, read_proto(walk.model.path).graph)
    with writing(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        with whole_file(Path(folder) / f"{name}.json") as file:
            json.dump(data, file, indent=1)


def node_data(
    explained: Explained, walk: Walk, graph: onnx.GraphProto
) -> dict[str, dict[str, Any]]:
    """Returns the content of each file, by its name without `.json`. `graph` is that of the model's
    file, whose nodes get the values."""
    values: Values = {name: {} for name in (LAYOUTS, COLLECTIVES, MILLISECONDS, SENT, WEIGHTS)}
    steps = {step.name: step for step in explained.steps}
    reshards = {o.name: s for s in explained.steps if s.kind != NODE for o in s.results}
    held = {weight.name: weight.bytes_per_rank for weight in explained.plan.weights}
    in_file = walk.model.file_name
    by_result = {in_file(name): steps.get(node) for name, node in walk.makers.items()}
    ids = {tensor.name: f"[value] {tensor.name}" for tensor in (*graph.input, *graph.initializer)}
    for number, node in enumerate(graph.node):
        key, result = node.name or f"<node_{number}>", next((n for n in node.output if n), "")
        if (step := by_result.get(result)) is not None:
            _tell(values, key, step, reshards, held)
        else:
            ids[result] = key  # it may have become a weight
    for name, layout in _ports(explained).items():
        if in_file(name) in ids:
            key = ids[in_file(name)]
            values[LAYOUTS][key] = layout
            values[WEIGHTS][key] = held.get(name, 0)
    return {name: {graph.name: _graph_data(name, found)} for name, found in values.items()}


def _tell(
    values: Values, key: str, step: Step, reshards: dict[str, Step], held: dict[str, int]
) -> None:
    """Adds the values of the node with id `key`, to which this step of the plan belongs, to
    `values`.

    reshards  the reshards of the plan, by result
    held      bytes of weights on a rank, by name
    """
    before = [s for s in _before(step.operands, reshards) if s.kind == COLLECTIVE]
    texts = (", ".join(o.layout or "-" for o in some) for some in (step.operands, step.results))
    values[LAYOUTS][key] = " -> ".join(texts)
    values[MILLISECONDS][key] = round(step.predicted.total * 1e3, 6)
    values[SENT][key] = step.sent + sum(s.sent for s in before)
    values[WEIGHTS][key] = sum(held.get(o.name, 0) for o in step.operands)
    if before:
        values[COLLECTIVES][key] = ", ".join(s.op for s in before)


def _before(operands: tuple[Operand, ...], reshards: dict[str, Step]) -> Iterator[Step]:
    """Yields the reshards between the nodes that compute these operands and the node that reads
    them."""
    for step in {s.name: s for o in operands if (s := reshards.get(o.name)) is not None}.values():
        yield from _before(step.operands, reshards)
        yield step


def _ports(explained: Explained) -> dict[str, str]:
    """Returns the layouts of inputs and weights, by name, as text."""
    plan = explained.plan
    layouts = {p.name: p.layout.text(plan.mesh) for p in plan.inputs if p.layout is not None}
    return layouts | {weight.name: weight.layout_text for weight in plan.weights}


def _graph_data(name: str, values: dict[str, str | float]) -> dict[str, Any]:
    """Returns a GraphNodeData of Model Explorer: each different layout of results (unless whole) or
    list of collectives has a colour; numbers share a gradient."""
    results: dict[str, dict[str, Any]] = {key: {"value": value} for key, value in values.items()}
    if name not in (LAYOUTS, COLLECTIVES):
        return {"name": name, "results": results, "gradient": GRADIENT}
    colours: dict[str, str] = {}
    for result in results.values():
        layout = result["value"].rpartition(" -> ")[2]
        if not set(layout) <= _WHOLE:
            result["bgColor"] = colours.setdefault(layout, COLOURS[len(colours) % len(COLOURS)])
    return {"name": name, "results": results}
