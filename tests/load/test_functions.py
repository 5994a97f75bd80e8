"""onnxruntime runs a function by the opset of the model, whichever the function imports."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser
import pytest
from tiny_models import X, agree, write

import onnxpar


def called(opset: int, own: int, body: str) -> onnx.ModelProto:
    """A model of an opset that calls a function which imports another."""
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}, "loc" : 1]> m (float[6,4] x) => '
        f'(float[6,4] y) {{ y = loc.f (x) }} <domain: "loc", opset_import: ["" : {own}]> '
        f"f (a) => (o) {{ {body} }}"
    )


@pytest.mark.parametrize("opsets", [(18, 11), (11, 18), (18, 17), (18, 18)])
@pytest.mark.parametrize("body", ["o = Softmax <axis = 0> (a)", "b = Relu (a) o = Add (a, b)"])
def test_functions_run_by_the_opset_of_the_model(
    body: str, opsets: tuple[int, int], tmp_path: Path
) -> None:
    agree(called(*opsets, body), tmp_path, {"x": X})


@pytest.mark.parametrize(
    ("opset", "own", "body"),
    [
        (18, 11, "b = ReduceMax <axes = [0]> (a) o = Add (a, b)"),
        (18, 6, "o = Clip <max = 0.5> (a)"),
        (17, 18, "o = Mish (a)"),
        (10, 11, "m = Constant <value = float {0.5}> () o = Clip (a, m)"),
    ],
)
def test_nodes_that_the_opset_of_the_model_lacks_are_refused_by_name(
    opset: int, own: int, body: str, tmp_path: Path
) -> None:
    path = write(called(opset, own, body), tmp_path)
    with pytest.raises(onnxpar.ModelError, match=f"function loc.f is of opset {own}, but the"):
        onnxpar.plan(path, devices=2)
