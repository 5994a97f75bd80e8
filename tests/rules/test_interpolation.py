"""A Resize to the nearest elements reads those that onnxruntime reads, also where two are about
equally near."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxpar.rules.interpolation import F, Scaling, taps

SIZES = (*range(1, 9), 10, 12, 14)
SCALES = (0.3, 0.6, 0.7, 1.1, 1.3, 1.6, 1.7, 1.8, 2.2)
REGION = (0.1, 0.85)
TRANSFORMATIONS = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_half_pixel_for_nn",
    "tf_crop_and_resize",
)


def resizing(attributes: dict[str, str], by: str) -> ort.InferenceSession:
    """A session of one Resize of a vector, by `scales` or by `sizes`."""
    vector, given = helper.make_tensor_value_info, "scales" if by == "scales" else ""
    last = [by] if by == "sizes" else []
    node = helper.make_node("Resize", ["x", "roi", given or "none", *last], ["y"], **attributes)
    types = {"scales": TensorProto.FLOAT, "sizes": TensorProto.INT64}
    graph = helper.make_graph(
        [node],
        "resize",
        [vector("x", TensorProto.FLOAT, ["n"]), vector(by, types[by], [1])],
        [vector("y", TensorProto.FLOAT, None)],
        [
            numpy_helper.from_array(np.array(REGION, F), "roi"),
            numpy_helper.from_array(np.zeros(0, F), "none"),
        ],
    )
    opset = helper.make_opsetid("", 19)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=8)
    return ort.InferenceSession(model.SerializeToString())


@pytest.mark.parametrize("mode", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_the_nearest_elements(transformation: str, mode: str) -> None:
    attributes = {"coordinate_transformation_mode": transformation, "nearest_mode": mode}
    region = REGION if transformation == "tf_crop_and_resize" else (0.0, 1.0)
    for by, values in (("sizes", SIZES), ("scales", SCALES)):
        session = resizing(attributes, by)
        for size in SIZES:
            x = np.arange(size, dtype=F)
            for value in values:
                out = value if by == "sizes" else int(F(size) * F(value))
                if out in (0, size):
                    continue
                dtype = np.int64 if by == "sizes" else F
                (wanted,) = session.run(None, {"x": x, by: np.array([value], dtype)})
                scale = float(F(out) / F(size)) if by == "sizes" else float(F(value))
                found = taps(Scaling(size, out, scale, "nearest", attributes, region))
                read = np.where(found.outside, 0, found.index[:, 0])
                assert read.tolist() == wanted.tolist(), (size, value)
