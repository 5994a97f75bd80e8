"""Gradients of normalizations."""

import numpy as np
import pytest
from numpy import array

from onnxpar.testing.case import Case
from onnxpar.testing.gradient_proof import Gradient

X = (3, 4, 2, 3)
VARIANCE = np.linspace(0.5, 2, 4)
FROZEN = [X, (4,), (4,), (4,), VARIANCE]

CASES = [
    *(
        Case("LayerNormalization", [X, shape, shape], {"axis": axis})
        for axis, shape in ((-1, (3,)), (2, (2, 3)), (-3, (4, 2, 3)))
    ),
    Case("LayerNormalization", [X, (3,)], {"epsilon": 0.5}),
    Case("LayerNormalization", [X, (3,), (3,)], outputs=3),
    Case("LayerNormalization", [(0, 3), (3,), (3,)]),
    *(
        Case("RMSNormalization", [X, shape], {"axis": axis, "epsilon": 0.1}, opset=23)
        for axis, shape in ((-1, (3,)), (1, (4, 2, 3)), (2, (3,)))
    ),
    Case("BatchNormalization", FROZEN, {"epsilon": 0.1}, fed=[4]),
    Case("BatchNormalization", [(3, 4), *FROZEN[1:]], fed=[4]),
    Case("BatchNormalization", [(0, 4, 2), *FROZEN[1:]], fed=[4]),
    *(
        Case("InstanceNormalization", [x, (4,), (4,)], {"epsilon": 0.1})
        for x in (X, (2, 4, 3), (1, 4, 2, 2, 2))
    ),
    Case("GroupNormalization", [X, (4,), (4,)], {"num_groups": 2, "stash_type": 11}, opset=21),
    Case(
        "GroupNormalization",
        [(2, 6, 3), (6,), (6,)],
        {"num_groups": 3, "epsilon": 0.2, "stash_type": 11},
        opset=21,
    ),
    Case("GroupNormalization", [X, (2,), (2,)], {"num_groups": 2}, opset=18),
    Case("GroupNormalization", [X, (1,), (1,)], {"num_groups": 1}, opset=18),
    *(
        Case("LpNormalization", [X], {"p": p, "axis": axis})
        for p, axis in ((1, -1), (1, 1), (2, -1), (2, 0))
    ),
    Case("MeanVarianceNormalization", [X]),
    Case("MeanVarianceNormalization", [(3, 2, 4)], {"axes": [-1, 0]}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.op)
def test_gradient(prove, case):
    prove(case)


@pytest.mark.parametrize("shape", [X, (5, 4), (2, 4, 3)])
def test_batch_statistics(prove, shape):
    """In training; what the running statistics are moved by has no gradient."""
    operands = [shape, (4,), (4,), (4,), VARIANCE]
    case = Case(
        "BatchNormalization", operands, {"training_mode": 1, "epsilon": 0.1}, fed=[4], outputs=3
    )
    prove(case, wrt=[0, 1, 2])


@pytest.mark.parametrize("power", [1, 2])
def test_a_norm_of_zeros_has_no_gradient(power):
    case = Case("LpNormalization", [array([[0.0, 0.0], [0.0, 2.0]])], {"p": power}, fed=[0])
    found = Gradient(case, np.float32, None, 1).run()["d0"]
    np.testing.assert_array_equal(found[0], [0, 0])
    assert found[1, 0] != 0


@pytest.mark.parametrize(
    ("op", "attrs", "opset"),
    [
        ("LayerNormalization", {}, 20),
        ("RMSNormalization", {}, 23),
        ("BatchNormalization", {"training_mode": 1}, 20),
        ("InstanceNormalization", {}, 20),
        ("GroupNormalization", {"num_groups": 2}, 21),
    ],
)
def test_half_precision(op, attrs, opset):
    """As good as its type can hold, also of numbers whose squares it cannot."""
    x = np.random.default_rng(0).normal(0, 1000, (4, 4, 4)).round()
    count = {"BatchNormalization": 4, "RMSNormalization": 1}.get(op, 2)
    operands = [x, *[(4,)] * min(count, 3)]
    if count == 4:
        operands += [VARIANCE]
    case = Case(op, operands, attrs, fed=[0, 4], outputs=3 if count == 4 else 1, opset=opset)
    half, single = (Gradient(case, t, [0, 1], 1).run() for t in (np.float16, np.float32))
    for name, value in single.items():
        assert half[name].dtype == np.float16
        np.testing.assert_allclose(half[name], value, rtol=0, atol=5e-3 * np.abs(value).max())


@pytest.mark.parametrize("around", [(2, 3, 4), (3, 4)])
@pytest.mark.parametrize("biased", [False, True])
def test_of_a_sum(around, biased):
    """onnxruntime's ops that normalise x + skip + bias, and give the sum, too."""
    x, skip, scale, shift, bias = (
        np.random.default_rng(i).standard_normal(shape)
        for i, shape in enumerate([(2, 3, 4), around, (4,), (4,), (4,)])
    )
    total = x + skip + (bias if biased else 0)
    for op, operands, plain in (
        ("SkipLayerNormalization", [x, skip, scale, shift, bias], "LayerNormalization"),
        ("SkipSimplifiedLayerNormalization", [x, skip, scale, bias], "RMSNormalization"),
    ):
        given = operands if biased else operands[:-1]
        parts = [total, *operands[2:-1]]
        fed = range(len(given))
        attrs = {"epsilon": 0.1}
        fused = Gradient(
            Case(op, given, attrs, fed, outputs=4, domain="com.microsoft"), np.float32, None, 4
        )
        alone = Gradient(
            Case(plain, parts, attrs, range(len(parts)), opset=23), np.float32, None, 1
        )
        found, expected = fused.run(), alone.run()
        through = expected["d0"] + fused.seeds()["dy3"]
        close = {"d0": through, "d1": through if skip.ndim == 3 else through.sum(0)}
        close |= {f"d{i + 1}": expected[f"d{i}"] for i in range(1, len(parts))}
        if biased:
            close[f"d{len(given) - 1}"] = through.sum((0, 1))
        assert close.keys() == found.keys()
        for name, value in close.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
