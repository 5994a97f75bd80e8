"""Gradients of normalizations as PyTorch's."""

import numpy as np
import pytest

from onnxpar.testing.case import Case

torch = pytest.importorskip("torch")
F = torch.nn.functional

FAR = np.random.default_rng(0).normal(30, 2, (6, 4, 5, 3))
"""Elements whose mean is much larger than their deviation."""
MEAN, VARIANCE = np.linspace(29, 31, 4), np.linspace(0.5, 2, 4)
CLOSE = 3e-5


@pytest.mark.parametrize("training", [False, True])
def test_batch(agree, training):
    operands = [FAR, (4,), (4,), MEAN, VARIANCE]
    attrs = {"training_mode": int(training)}
    outputs = 3 if training else 1
    case = Case("BatchNormalization", operands, attrs, fed=[0, 3, 4], outputs=outputs)

    def normalized(x, scale, bias):
        mean, variance = (torch.from_numpy(s).float().double() for s in (MEAN, VARIANCE))
        return F.batch_norm(x, mean, variance, scale, bias, training, 0.1, 1e-5)

    agree(case, normalized, wrt=[0, 1, 2], tolerance=CLOSE)


def test_layer(agree):
    case = Case("LayerNormalization", [FAR, (5, 3), (5, 3)], {"axis": 2}, fed=[0])
    agree(case, lambda x, s, b: F.layer_norm(x, (5, 3), s, b), wrt=[0, 1, 2], tolerance=CLOSE)


def test_layer_with_its_moments(agree):
    x = FAR - 30
    case = Case("LayerNormalization", [x, (5, 3)], {"axis": 2}, fed=[0], outputs=3)

    def normalized(x, scale):
        mean, variance = x.mean((2, 3), keepdim=True), x.var((2, 3), correction=0, keepdim=True)
        return F.layer_norm(x, (5, 3), scale), mean, (variance + 1e-5).rsqrt()

    agree(case, normalized, wrt=[0, 1], results=3, tolerance=CLOSE)


def test_root_mean_square(agree):
    case = Case("RMSNormalization", [FAR, (3,)], {"epsilon": 1e-6}, fed=[0], opset=23)
    agree(case, lambda x, s: F.rms_norm(x, (3,), s, 1e-6), wrt=[0, 1], tolerance=CLOSE)


def test_instance(agree):
    case = Case("InstanceNormalization", [FAR, (4,), (4,)], fed=[0])
    agree(
        case,
        lambda x, s, b: F.instance_norm(x, weight=s, bias=b),
        wrt=[0, 1, 2],
        tolerance=CLOSE,
    )


def test_group(agree):
    case = Case("GroupNormalization", [FAR, (4,), (4,)], {"num_groups": 2}, fed=[0], opset=21)
    agree(case, lambda x, s, b: F.group_norm(x, 2, s, b), wrt=[0, 1, 2], tolerance=CLOSE)


@pytest.mark.parametrize("power", [1, 2])
def test_norm(agree, power):
    case = Case("LpNormalization", [(3, 4, 2)], {"p": power, "axis": 1})
    agree(case, lambda x: F.normalize(x, p=power, dim=1))
