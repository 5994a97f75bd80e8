"""What comparisons with PyTorch's autograd share."""

import numpy as np
import pytest

from onnxpar.testing.gradient_proof import Gradient


@pytest.fixture
def agree():
    """Compares a case's gradients in float32 on onnxruntime with those of a function in PyTorch's
    float64, which gets the operands `wrt` as tensors and gives the results."""
    torch = pytest.importorskip("torch")

    def check(case, function, wrt=(0,), results=1, tolerance=1e-5):
        gradient = Gradient(case, np.float32, wrt, results)
        leaves = [torch.tensor(case.values[f"x{i}"]).double().requires_grad_() for i in wrt]
        made = function(*leaves)
        made = made if isinstance(made, tuple) else (made,)
        seeds = [gradient.seeds()[y] for y in (f"dy{i}" for i in range(results))]
        total = sum(
            (m * torch.from_numpy(s).double()).sum() for m, s in zip(made, seeds, strict=True)
        )
        expected = torch.autograd.grad(total, leaves)
        found = gradient.run()
        for i, value in zip(wrt, expected, strict=True):
            value = value.numpy()
            bound = tolerance * max(np.abs(value).max(initial=0), 1e-3)
            np.testing.assert_allclose(found[f"d{i}"], value, rtol=0, atol=bound, err_msg=f"d{i}")

    return check
