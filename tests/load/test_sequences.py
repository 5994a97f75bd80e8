"""Sequences that a graph only takes apart again are Splits to the compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import NodeProto, helper
from tiny_models import INT, X, agree, model, port, write

from onnxpar.load.load import load


def node(op: str, inputs: str, output: str, **attrs: Any) -> NodeProto:
    return helper.make_node(op, inputs.split(), [output], **attrs)


def taken_apart(*readers: NodeProto, outputs: int = 1, **attrs: Any) -> Any:
    """A model that splits relu(x), 6 by 4, by `by`, and reads the sequence s."""
    split = "h by" if "by" in attrs else "h"
    nodes = [
        node("Relu", "x", "h"),
        node("SplitToSequence", split, "s", **{k: v for k, v in attrs.items() if k != "by"}),
        *readers,
    ]
    weights = {f"at{i}": np.array(i) for i in range(-2, 3)} | {"list": np.array([1])}
    if "by" in attrs:
        weights["by"] = np.array(attrs["by"])
    results = [port(f"y{i}", None) for i in range(outputs)]
    return model(nodes, [port("x", [6, 4]), port("any", [], INT)], results, weights)


def picks(*places: int) -> list[NodeProto]:
    return [node("SequenceAt", f"s at{place}", f"y{i}") for i, place in enumerate(places)]


SPLIT = {
    "equal parts": taken_apart(*picks(0, 1), outputs=2, axis=1, by=2),
    "a smaller last part": taken_apart(*picks(1, 0, -2), outputs=3, axis=-1, by=3),
    "rows, four and two": taken_apart(*picks(1, 0), outputs=2, axis=0, by=4),
    "given sizes": taken_apart(*picks(-1, 1), outputs=2, axis=1, by=[1, 2, 1]),
    "one twice, some never": taken_apart(*picks(1, 1), outputs=2, axis=1, by=1),
    "unbound": taken_apart(*picks(1, -1), outputs=2, axis=-1, keepdims=0),
    "unbound, dimensions kept": taken_apart(*picks(2), axis=0, keepdims=1),
}
KEPT = {
    "a place that is fed": taken_apart(node("SequenceAt", "s any", "y0"), axis=1, by=2),
    "a place in a list": taken_apart(node("SequenceAt", "s list", "y0"), axis=1, by=2),
    "joined": taken_apart(node("ConcatFromSequence", "s", "y0", axis=0), axis=1, by=2),
}


def ops(path: Path) -> set[str]:
    return {n.op for n in load(path).graph.nodes}


@pytest.mark.matrix
@pytest.mark.parametrize("case", SPLIT)
def test_split(tmp_path: Path, case: str) -> None:
    agree(SPLIT[case], tmp_path, {"x": X, "any": np.array(0)})
    found = ops(tmp_path / "m.onnx")
    assert "Split" in found and not found & {"SplitToSequence", "SequenceAt"}


@pytest.mark.parametrize("case", KEPT)
def test_kept(tmp_path: Path, case: str) -> None:
    agree(KEPT[case], tmp_path, {"x": X, "any": np.array(1)})
    assert "SplitToSequence" in ops(write(KEPT[case], tmp_path))


@pytest.mark.parametrize("place", [1, -2])
def test_a_constant_picks_a_tensor_of_a_list(tmp_path: Path, place: int) -> None:
    """As exporters write the place: by a Constant node."""
    nodes = [
        node("Relu", "x", "h"),
        node("Neg", "x", "g"),
        node("SequenceConstruct", "h g", "s"),
        node("Constant", "", "at", value_int=place),
        node("SequenceAt", "s at", "y0"),
        node("ConcatFromSequence", "s", "y1", axis=1, new_axis=1),
    ]
    case = model(nodes, [port("x", [6, 4])], [port("y0", None), port("y1", None)])
    agree(case, tmp_path, {"x": X})
    assert not ops(tmp_path / "m.onnx") & {"SequenceAt", "SequenceConstruct", "ConcatFromSequence"}
