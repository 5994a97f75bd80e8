"""Gradients of pools as PyTorch's, equal elements included."""

import numpy as np
import pytest

from onnxpar.testing.case import Case

torch = pytest.importorskip("torch")
F = torch.nn.functional

TIES = np.random.default_rng(0).integers(0, 3, (2, 3, 7, 6)).astype(np.float64)
X = (2, 3, 7, 6)


@pytest.mark.parametrize("by_ceil", [False, True])
@pytest.mark.parametrize(("stride", "pad", "dilation"), [(1, 0, 1), (2, 1, 1), (3, 1, 2)])
def test_maximum(agree, by_ceil, stride, pad, dilation):
    attrs = {"strides": [stride] * 2, "pads": [pad] * 4, "dilations": [dilation] * 2}
    case = Case("MaxPool", [TIES], {"kernel_shape": [3, 2], **attrs, "ceil_mode": int(by_ceil)})
    agree(case, lambda x: F.max_pool2d(x, (3, 2), stride, pad, dilation, by_ceil))


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("by_ceil", [False, True])
@pytest.mark.parametrize(("stride", "pad"), [(1, 0), (2, 1), (3, 1)])
def test_mean(agree, by_ceil, counted, stride, pad):
    attrs = {"strides": [stride] * 2, "pads": [pad] * 4, "ceil_mode": int(by_ceil)}
    attrs |= {"kernel_shape": [3, 2], "count_include_pad": int(counted)}
    case = Case("AveragePool", [X], attrs)
    agree(case, lambda x: F.avg_pool2d(x, (3, 2), stride, pad, by_ceil, counted))


@pytest.mark.parametrize("power", [1, 2, 4])
def test_norm(agree, power):
    x = np.abs(TIES) + 0.5
    case = Case("LpPool", [x], {"kernel_shape": [3, 2], "strides": [2, 2], "p": power})
    agree(case, lambda x: F.lp_pool2d(x, power, (3, 2), 2))


def test_over_all_of_space(agree):
    agree(Case("GlobalMaxPool", [TIES]), lambda x: F.adaptive_max_pool2d(x, 1))
    agree(Case("GlobalAveragePool", [X]), lambda x: F.adaptive_avg_pool2d(x, 1))


def test_local_response(agree):
    case = Case("LRN", [(2, 8, 3, 3)], {"size": 5, "alpha": 0.5, "beta": 0.75, "bias": 2.0})
    agree(case, lambda x: F.local_response_norm(x, 5, 0.5, 0.75, 2.0))
