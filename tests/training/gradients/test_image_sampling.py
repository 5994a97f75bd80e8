"""Gradients of ops that sample images and put them together from blocks."""

import numpy as np
import pytest
from numpy import array

from onnxpar.base.errors import ModelError
from onnxpar.testing.case import Case
from onnxpar.testing.gradient_proof import prove_gradient

RNG = np.random.default_rng(11)
POINTS = RNG.uniform(-1.4, 1.4, (2, 3, 2, 2))
ROIS = array([[0.5, 1.2, 4.1, 3.9], [-3.0, -2.0, 9.0, 8.0], [2.0, 2.0, 2.3, 2.2]])
OWNERS = array([1, 0, 1])


def sampled(mode, padding, aligned, shape=(2, 2, 4, 5), points=POINTS, **more):
    attrs = {"mode": mode, "padding_mode": padding, "align_corners": aligned}
    return Case("GridSample", [shape, points], attrs, fed=[1], **more)


def regions(rois=ROIS, fed=(), **attrs):
    operands = [(2, 2, 5, 6), rois, OWNERS[: len(rois)]]
    return Case("RoiAlign", operands, {"output_height": 2, "output_width": 3, **attrs}, fed=fed)


def deformed(shape, kernel, masked=True, biased=True, **attrs):
    """A DeformConv of which points lie within and around the images, none on an element."""
    rank = len(shape) - 2
    pads, strides = attrs.get("pads", [0] * 4), attrs.get("strides", [1] * rank)
    dilations = attrs.get("dilations", [1] * rank)
    out = [
        (s + pads[i] + pads[i + rank] - (kernel[i + 2] - 1) * dilations[i] - 1) // strides[i] + 1
        for i, s in enumerate(shape[2:])
    ]
    taps = attrs.get("offset_group", 1) * kernel[2] * kernel[3]
    offsets = np.random.default_rng(5).uniform(-1.6, 1.6, (shape[0], 2 * taps, *out))
    operands = [shape, kernel, offsets, kernel[:1] if biased else None]
    operands += [(shape[0], taps, *out)] if masked else []
    return Case("DeformConv", operands, attrs, fed=[2], opset=22)


CASES = [
    *(
        sampled(mode, padding, aligned)
        for mode in ("linear", "nearest", "cubic")
        for padding in ("zeros", "border", "reflection")
        for aligned in (0, 1)
    ),
    sampled("linear", "reflection", 0, (2, 1, 3, 1), POINTS * 3),
    sampled("linear", "reflection", 1, (2, 1, 1, 3), POINTS * 3),
    sampled("linear", "border", 1, (1, 1, 2, 3, 4), RNG.uniform(-1.2, 1.2, (1, 2, 1, 2, 3))),
    sampled("linear", "zeros", 0, (2, 0, 4, 5)),
    *(Case("AffineGrid", [(2, 2, 3), array([2, 1, 3, 4])], {"align_corners": a}) for a in (0, 1)),
    Case("AffineGrid", [(1, 2, 3), array([1, 2, 1, 3])], {"align_corners": 1}),
    *(
        Case("AffineGrid", [(2, 3, 4), array([2, 1, 2, 3, 2])], {"align_corners": a})
        for a in (0, 1)
    ),
    regions(sampling_ratio=2, fed=[1, 2]),
    regions(sampling_ratio=3, coordinate_transformation_mode="output_half_pixel", fed=[1]),
    regions(spatial_scale=0.7, fed=[2]),
    regions(coordinate_transformation_mode="output_half_pixel"),
    regions(ROIS[2:]),
    regions(ROIS[:0], sampling_ratio=2, fed=[1, 2]),
    Case("Col2Im", [(2, 12, 4), array([3, 4]), array([2, 2])], {"strides": [1, 2]}),
    Case(
        "Col2Im",
        [(1, 12, 6), array([4, 5]), array([3, 2])],
        {"pads": [1, 0, 1, 1], "dilations": [2, 3], "strides": [1, 1]},
    ),
    Case("Col2Im", [(2, 6, 3), array([5]), array([3])]),
    Case(
        "MaxUnpool",
        [(1, 2, 2, 2), array([1, 7, 8, 14, 16, 23, 25, 30]).reshape(1, 2, 2, 2)],
        {"kernel_shape": [2, 2], "strides": [2, 2]},
        fed=[1],
    ),
    deformed((2, 2, 4, 5), (3, 2, 2, 2)),
    deformed(
        (1, 4, 4, 4), (4, 2, 2, 3), offset_group=2, group=2, strides=[2, 1], pads=[1, 0, 0, 2]
    ),
    deformed((2, 4, 5, 4), (2, 4, 2, 2), False, False, offset_group=2, dilations=[2, 1]),
    deformed((1, 4, 4, 4), (4, 1, 1, 1), False, group=4),
    deformed((1, 4, 3, 3), (2, 2, 2, 2), True, False, group=2, offset_group=4),
    deformed((0, 2, 3, 3), (2, 2, 2, 2)),
]


@pytest.mark.matrix(3)
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, [c.op, *c.attrs.values()])))
def test_gradient(prove, case):
    wrt = [0] if case.op == "RoiAlign" or case.attrs.get("mode") == "nearest" else None
    prove(case, wrt=wrt)


@pytest.mark.parametrize(
    "case", [sampled("bilinear", "zeros", 0, opset=18), sampled("bicubic", "border", 1, opset=18)]
)
def test_names_of_modes_before_opset_20(prove_linear, case):
    prove_linear(case, wrt=[0])


def test_nearest_neighbour_has_no_slope(prove):
    prove(sampled("nearest", "border", 0), wrt=[1])


@pytest.mark.parametrize("case", [regions(mode="max"), regions(fed=[1])])
def test_regions_without_a_gradient(case):
    with pytest.raises(ModelError, match="no gradient"):
        prove_gradient(case, wrt=[0])
