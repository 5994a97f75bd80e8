"""Rules of ops that sample images, and that put them together from blocks."""

import numpy as np
import pytest
from numpy import array

from onnxpar.testing.case import Case

IMAGE = (2, 3, 5, 6)
RNG = np.random.default_rng(0)
POINTS = RNG.uniform(-1, 1, (2, 4, 3, 2)).astype(np.float32)
REGIONS = array([[0, 0, 4, 4], [1, 1, 3, 4], [0, 2, 4, 3], [2, 0, 4, 2]], np.float32)
OF_IMAGE = array([0, 1, 1, 0])
OFFSETS = RNG.uniform(-1, 1, (2, 8, 4, 5)).astype(np.float32)
PLACES = array([0, 3, 9, 14]).reshape(2, 2) + 16 * np.arange(6).reshape(2, 3, 1, 1)

CASES = [
    (
        Case("GridSample", [IMAGE, POINTS], fed=[1]),
        "n c i0 i1, n o0 o1 k -> n c o0 o1 {whole: i0 i1 k}",
    ),
    (
        Case("AffineGrid", [(3, 2, 3), array([3, 2, 4, 5])]),
        "n r t, _ -> n o0 o1 k {whole: r t o0 o1 k}",
    ),
    (
        Case(
            "RoiAlign",
            [IMAGE, REGIONS, OF_IMAGE],
            {"output_height": 2, "output_width": 3},
            fed=[1, 2],
        ),
        "n c h w, r k, r -> r c y x {whole: n h w k y x}",
    ),
    (
        Case(
            "MaxRoiPool",
            [IMAGE, np.concatenate([OF_IMAGE[:, None], REGIONS], 1).astype(np.float32)],
            {"pooled_shape": [2, 2]},
            fed=[1],
        ),
        "n c h w, r k -> r c y x {whole: n h w k y x}",
    ),
    (
        Case("DeformConv", [(2, 4, 5, 6), (6, 4, 2, 2), OFFSETS], fed=[2]),
        "n c h w, o c u v, n e y x -> n o y x {sum: c, whole: h w y x u v e}",
    ),
    (
        Case(
            "DeformConv",
            [(2, 4, 5, 6), (6, 2, 2, 2), OFFSETS, (6,), np.abs(OFFSETS[:, :4])],
            {"group": 2},
            fed=[2, 4],
        ),
        "n (g c) h w, (g o) c u v, n e y x, (g o), n f y x -> n (g o) y x"
        " {sum: c, whole: h w y x u v e f}",
    ),
    (
        Case("MaxUnpool", [(2, 3, 2, 2), PLACES], {"kernel_shape": [2, 2], "strides": [2, 2]}, [1]),
        "n c h0 h1, n c h0 h1 -> n c y0 y1 {sum: h0, sum: h1, whole: y0 y1}",
    ),
    (
        Case(
            "MaxUnpool",
            [(2, 3, 2, 2), PLACES, array([2, 3, 4, 4])],
            {"kernel_shape": [2, 2], "strides": [2, 2]},
            [1],
        ),
        "n c h0 h1, n c h0 h1, _ -> n c y0 y1 {sum: h0, sum: h1, whole: y0 y1}",
    ),
    (
        Case("Col2Im", [(2, 12, 9), array([4, 4]), array([2, 2])]),
        "n (c k) l, _, _ -> n c o0 o1 {sum: l, whole: k o0 o1}",
    ),
    (
        Case("CenterCropPad", [IMAGE, array([3, 8])], {"axes": [2, 3]}),
        "d0 d1 d2 d3, _ -> d0 d1 y2 y3"
        " {communicating: d2 d3, co-sharded: d2 y2, co-sharded: d3 y3}",
    ),
    (
        Case("CenterCropPad", [(5, 6), array([5, 3])]),
        "d0 d1, _ -> d0 y1 {communicating: d1, co-sharded: d1 y1}",
    ),
    (
        Case("CenterCropPad", [(5, 2), array([2, 9])]),
        "d0 d1, _ -> y0 y1 {communicating: d0 d1, co-sharded: d0 y0, co-sharded: d1 y1}",
    ),
    (Case("Det", [(4, 3, 3)]), "b0 m n -> b0 {whole: m n}"),
    (Case("Det", [(3, 3)]), "m n -> () {whole: m n}"),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)
