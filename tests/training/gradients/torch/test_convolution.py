"""Gradients of convolutions as PyTorch's."""

import pytest

from onnxpar.testing.case import Case

torch = pytest.importorskip("torch")
F = torch.nn.functional


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize(
    ("stride", "dilation", "pad"), [(1, 1, 1), (2, 1, 1), (3, 2, 0), (1, 3, 2)]
)
def test_convolution(agree, group, stride, dilation, pad):
    attrs = {"group": group, "strides": [stride] * 2, "dilations": [dilation] * 2}
    case = Case("Conv", [(3, 4, 9, 8), (8, 4 // group, 3, 2), (8,)], {**attrs, "pads": [pad] * 4})
    agree(case, lambda x, w, b: F.conv2d(x, w, b, stride, pad, dilation, group), wrt=[0, 1, 2])


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize(("stride", "grown", "pad"), [(1, 0, 0), (2, 1, 1), (3, 2, 0)])
def test_transpose(agree, group, stride, grown, pad):
    attrs = {"group": group, "strides": [stride], "output_padding": [grown], "pads": [pad] * 2}
    case = Case("ConvTranspose", [(3, 4, 5), (4, 3, 3), (3 * group,)], attrs)
    agree(
        case,
        lambda x, w, b: F.conv_transpose1d(x, w, b, stride, pad, grown, group),
        wrt=[0, 1, 2],
    )
