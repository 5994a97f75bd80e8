"""Rules of ops that resize space."""

import numpy as np
import pytest
from numpy import array
from opsets import since

from onnxpar.testing.case import Case

SINCE_28 = since(28)

X = (2, 4, 3, 6)
NEAREST = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}


def scales(*values: float) -> np.ndarray:
    return array(values, np.float32)


CASES = [
    (
        Case("Resize", [X, None, scales(1, 1, 2, 3)], NEAREST),
        "d0 d1 d2 d3, _, _ -> d0 d1 (d2 r2) (d3 r3) {whole: r2 r3}",
    ),
    (
        Case("Resize", [X, None, None, array([2, 4, 6, 12])], NEAREST),
        "d0 d1 d2 d3, _, _, _ -> d0 d1 (d2 r2) (d3 r3) {whole: r2 r3}",
    ),
    (
        Case("Resize", [X, None, None, array([2, 4, 6, 8])], NEAREST),
        "d0 d1 d2 d3, _, _, _ -> d0 d1 (d2 r2) y3 {communicating: d3, co-sharded: d3 y3, whole: r2}",
    ),
    (
        Case("Resize", [X, None, scales(1, 1, 2, 2)], {"mode": "linear"}),
        "d0 d1 d2 d3, _, _ -> d0 d1 y2 y3 {communicating: d2 d3, co-sharded: d2 y2, co-sharded: d3 y3}",
    ),
    (
        Case("Resize", [X, None, scales(1, 1, 0.7, 1.5)], {"mode": "cubic"}),
        "d0 d1 d2 d3, _, _ -> d0 d1 y2 y3 {communicating: d2 d3, co-sharded: d2 y2, co-sharded: d3 y3}",
    ),
    (
        Case("Resize", [X, None, None, array([5, 9])], {"mode": "linear", "axes": [2, 3]}),
        "d0 d1 d2 d3, _, _, _ -> d0 d1 y2 y3 {communicating: d2 d3, co-sharded: d2 y2, co-sharded: d3 y3}",
    ),
    (
        Case("Resize", [(2, 4, 5, 6), None, scales(1, 1, 1.1, 2)], {"mode": "linear"}),
        "d0 d1 d2 d3, _, _ -> d0 d1 y2 y3 {communicating: d2 d3, co-sharded: d2 y2, co-sharded: d3 y3}",
    ),
    (
        Case(
            "Resize",
            [(1, 2, 5), None, None, array([1, 2, 7])],
            {"coordinate_transformation_mode": "align_corners"},
        ),
        "d0 d1 d2, _, _, _ -> d0 d1 y2 {communicating: d2, co-sharded: d2 y2}",
    ),
    (
        Case(
            "Resize",
            [(1, 2, 8), None, scales(1, 1, 0.6)],
            {"coordinate_transformation_mode": "half_pixel_symmetric", "nearest_mode": "ceil"},
        ),
        "d0 d1 d2, _, _ -> d0 d1 y2 {communicating: d2, co-sharded: d2 y2}",
    ),
    (
        Case(
            "Resize",
            [
                (1, 2, 4, 5),
                array([0, 0, 0.1, -0.2, 1, 1, 0.9, 0.8], np.float32),
                scales(1, 1, 2, 1.5),
            ],
            {
                "mode": "linear",
                "coordinate_transformation_mode": "tf_crop_and_resize",
                "extrapolation_value": 2.0,
            },
        ),
        "d0 d1 d2 d3, _, _ -> d0 d1 y2 y3 {communicating: d2 d3, co-sharded: d2 y2, co-sharded: d3 y3}",
    ),
    (
        Case(
            "Resize",
            [(1, 2, 4, 5), None, None, array([9, 9])],
            {
                "mode": "cubic",
                "exclude_outside": 1,
                "axes": [2, 3],
                "keep_aspect_ratio_policy": "not_larger",
            },
        ),
        "d0 d1 d2 d3, _, _, _ -> d0 d1 y2 y3 {communicating: d2 d3, co-sharded: d2 y2, co-sharded: d3 y3}",
    ),
    (
        Case(
            "Resize", [(1, 2, 4, 8), None, scales(1, 1, 1, 0.5)], {"mode": "linear", "antialias": 1}
        ),
        "d0 d1 d2 d3, _, _ -> d0 d1 d2 y3 {communicating: d3, co-sharded: d3 y3}",
    ),
    (
        Case(
            "Resize",
            [np.arange(40, dtype=np.uint8).reshape(1, 2, 4, 5), None, scales(1, 1, 2, 1)],
            {"mode": "linear"},
            [0],
        ),
        "d0 d1 d2 d3, _, _ -> d0 d1 y2 d3 {whole: d2 y2}",
    ),
    (
        Case(
            "Resize",
            [np.arange(40, dtype=np.float16).reshape(1, 2, 4, 5), None, scales(1, 1, 2, 1)],
            {"mode": "linear"},
            [0],
        ),
        "d0 d1 d2 d3, _, _ -> d0 d1 y2 d3 {communicating: d2, co-sharded: d2 y2}",
    ),
    (
        Case(
            "Resize",
            [(1, 2, 2, 4), None, None, array([7, 16])],
            {"axes": [2, 3], "keep_aspect_ratio_policy": "not_smaller"},
        ),
        "d0 d1 d2 d3, _, _, _ -> d0 d1 y2 y3 {communicating: d2 d3, co-sharded: d2 y2, co-sharded: d3 y3}",
    ),
    (
        Case("DepthToSpace", [(2, 12, 2, 3)], {"blocksize": 2}),
        "n (i j c) h w -> n c (h i) (w j) {whole: i j}",
    ),
    (
        Case("DepthToSpace", [(2, 12, 2, 3)], {"blocksize": 2, "mode": "CRD"}),
        "n (c i j) h w -> n c (h i) (w j) {whole: i j}",
    ),
    (
        Case("SpaceToDepth", [(2, 3, 4, 6)], {"blocksize": 2}),
        "n c (h i) (w j) -> n (i j c) h w {whole: i j}",
    ),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)


@SINCE_28
def test_space_to_depth_with_a_mode(prove_rule):
    case = Case("SpaceToDepth", [(2, 3, 4, 6)], {"blocksize": 2, "mode": "CRD"}, opset=28)
    prove_rule(case, "n c (h i) (w j) -> n (c i j) h w {whole: i j}")
