"""Gradients of ops that resize, crop or pad space."""

import itertools

import numpy as np
import pytest
from numpy import array

from onnxpar.base.errors import ModelError
from onnxpar.testing.case import Case
from onnxpar.testing.gradient_proof import prove_gradient

COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners")
COORDINATES += ("asymmetric",)
NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


def resized(shape, scales=None, sizes=None, roi=None, fed=(), **attrs):
    roi = None if roi is None else array(roi, np.float32)
    scales = None if scales is None else array(scales, np.float32)
    operands = [shape, roi, scales] + ([] if sizes is None else [array(sizes, np.int64)])
    attrs = {k: v for k, v in attrs.items() if v is not None}
    return Case("Resize", operands, attrs, fed=fed)


def coordinates(how):
    return {"coordinate_transformation_mode": how}


CASES = [
    *(
        resized((1, 2, 3, 5), sizes=sizes, mode=mode, **coordinates(how))
        for how, mode in itertools.product(COORDINATES, ("linear", "cubic"))
        for sizes in ([1, 2, 7, 4], [1, 2, 1, 8])
    ),
    *(
        resized((1, 1, 4, 5), [1, 1, 1.6, 0.7], mode="nearest", nearest_mode=n, **coordinates(how))
        for how, n in itertools.product(COORDINATES, NEAREST)
    ),
    resized((1, 2, 3, 2), [1, 1, 2, 3], **coordinates("asymmetric"), nearest_mode="floor"),
    resized((1, 1, 4, 4), [1, 1, 2, 2], mode="linear"),
    resized((2, 3), [2, 1.5], mode="linear"),
    resized((1, 1, 2, 3, 4), [1, 1, 2, 0.7, 1.5], mode="linear"),
    resized((2, 4, 3, 2), [1.5, 2], mode="linear", axes=[-3, 2]),
    resized((1, 1, 4, 6), sizes=[7, 8], axes=[2, 3], keep_aspect_ratio_policy="not_larger"),
    resized(
        (1, 1, 4, 6),
        sizes=[7, 8],
        axes=[2, 3],
        mode="linear",
        keep_aspect_ratio_policy="not_smaller",
    ),
    *(resized((1, 1, 8, 6), [1, 1, 0.4, 1.5], mode=m, antialias=1) for m in ("linear", "cubic")),
    resized((1, 1, 8, 6), [1, 1, 0.6, 0.5], mode="cubic", antialias=1, exclude_outside=1),
    resized((1, 1, 4, 5), [1, 1, 1.5, 2], mode="cubic", exclude_outside=1, cubic_coeff_a=-0.5),
    *(
        resized(
            (1, 1, 4, 5),
            sizes=[1, 1, 6, 3],
            roi=[0, 0, 0.4, -0.2, 1, 1, 0.9, 1.3],
            mode=mode,
            extrapolation_value=3.0,
            **coordinates("tf_crop_and_resize"),
        )
        for mode in ("linear", "nearest", "cubic")
    ),
    resized((2, 3), [1, 1], mode="linear"),
    Case("CenterCropPad", [(4, 5, 3), array([7, 2, 3])]),
    Case("CenterCropPad", [(5, 4, 3), array([2, 7, 8])]),
    Case("CenterCropPad", [(2, 5, 4), array([2, 9])], {"axes": [-2, 2]}),
    Case("CenterCropPad", [(2, 5, 4), array([0])], {"axes": [1]}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.attrs.values())))
def test_gradient(prove_linear, case):
    prove_linear(case, wrt=[0])


def test_scales_that_only_a_run_can_tell():
    case = resized((1, 1, 4, 4), [1, 1, 2, 2], fed=[2])
    with pytest.raises(ModelError, match="its scales or its region are not constant"):
        prove_gradient(case, wrt=[0])
