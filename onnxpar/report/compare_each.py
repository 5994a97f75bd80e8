"""Finds the first tensor, in the order of the graph, in which a sharded model differs from the
unsplit one (`check --each`)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from onnxpar.base.arrays import Array
from onnxpar.base.errors import ModelError
from onnxpar.report.compare import (
    TOLERANCES,
    Closeness,
    Comparison,
    Report,
    compare_arrays,
    is_far,
    judged,
)
from onnxpar.report.sensitivity import movements, read_model
from onnxpar.report.unsplit import Unsplit
from onnxpar.runtime.session.session import Session

SLICE_BYTES = 256 << 20
"""Tensors of at most this many bytes are compared at a time, because the results of both models are
in memory."""


@dataclass(frozen=True)
class EachReport(Report):
    """The comparison of the outputs, and the first tensor that differs (None: none does).

    compared  the number of compared tensors
    node      the op and name of the node that computes the first tensor that differs
    """

    compared: int = 0
    first: Comparison | None = None
    node: str = ""

    @property
    def ok(self) -> bool:
        """True if all tensors are within their tolerances."""
        return self.first is None and super().ok

    def text(self) -> str:
        """Returns the table of the outputs, and a line about the first tensor that differs."""
        count = f"{self.compared} tensors that both models have were compared in the model's order"
        if self.first is None:
            return f"{super().text()}\n{count}: all agree"
        row = self.first
        how = row.fault or f"error {row.error:.1e}, allowed {row.tolerance:.0e}"
        return (
            f"{super().text()}\n{count}\n"
            f"the first that differs is {row.name!r} of {self.node}: "
            f"{row.dtype} {list(row.shape)}, {how}"
        )


def inner_tensors(model: str | os.PathLike[str]) -> list[str]:
    """Returns the names of the results of a model's nodes, in order; without its outputs, and
    without results in bodies of If, Loop and Scan. Errors: ModelError."""
    graph = read_model(model).graph
    own = {port.name for port in graph.output}
    return [name for name in _results(graph) if name not in own]


def _results(graph: onnx.GraphProto) -> dict[str, str]:
    """Returns the results of nodes in order, each with the op and name of its node: {"y": "MatMul
    'fc1'"}."""
    return {
        name: f"{node.op_type} {node.name!r}" if node.name else node.op_type
        for node in graph.node
        for name in node.output
        if name
    }


def compare_each(
    model: str | os.PathLike[str],
    session: Session,
    feeds: Mapping[str, Any],
    close: Closeness | None = None,
) -> EachReport:
    """Compares every output of the session, among which are inner tensors, in the order of the
    model's graph.

    Both models run several times, so that at most SLICE_BYTES of results are in memory at a time.
    Errors: ModelError if the unsplit model does not load; InputError; RankError.
    """
    session.check_feeds(feeds)
    proto = read_model(model)
    own = [port.name for port in proto.graph.output]
    nodes = _results(proto.graph)
    places = {name: i for i, name in enumerate(nodes)}
    ports = sorted(session.get_outputs(), key=lambda port: places.get(port.name, len(places)))
    for port in ports:
        if port.name not in own:
            proto.graph.output.append(onnx.ValueInfoProto(name=port.name))
    unsplit = Unsplit(proto.SerializeToString(), Path(model).parent)
    rows: list[Comparison] = []
    far: dict[str, Array] = {}
    for names in _slices([port.name for port in ports], session.output_shapes(feeds)):
        try:
            wanted = unsplit.run(feeds, names)
        except ModelError as error:
            raise session.blame(error, feeds) from error
        sharded = dict(zip(names, session.run(names, feeds), strict=True))
        rows += [compare_arrays(n, sharded[n], wanted[n], TOLERANCES, close) for n in names]
        far |= {row.name: wanted[row.name] for row in rows[-len(names) :] if is_far(row)}
    moved: Mapping[str, float] = {}
    if far and close is None:
        moved = movements(proto.SerializeToString(), feeds, far, Path(model).parent)
        rows = [judged(row, moved) for row in rows]
    first = next((row for row in rows if not row.ok), None)
    node = "" if first is None else nodes.get(first.name, "the model")
    by_name = {row.name: row for row in rows}
    outputs = tuple(by_name[n] for n in own if n in by_name)
    return EachReport(outputs, None, len(rows), first, node, moved=moved)


def _slices(
    outputs: Sequence[str], shapes: Mapping[str, Sequence[int | None]]
) -> Iterator[list[str]]:
    """Divides outputs into groups to compare at a time: of at most SLICE_BYTES in all, or of a
    single output."""
    names: list[str] = []
    held = 0
    for name in outputs:
        size = 8 * math.prod(1 if s is None else s for s in shapes[name])
        if names and held + size > SLICE_BYTES:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    if names:
        yield names
