"""The optimizers against torch.optim (2.13, float64, three steps)."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from onnxpar import hvd
from onnxpar.base.errors import InputError

START = [0.5, -1.25, 2.0]
GRADS = [[0.1, -0.2, 0.3], [-0.4, 0.5, 0.05], [0.25, 0.0, -1.0]]
TORCH: dict[str, tuple[hvd.Optimizer, list[float]]] = {
    "sgd": (hvd.SGD(0.1), [0.505, -1.28, 2.065]),
    "momentum": (
        hvd.SGD(0.1, momentum=0.9, dampening=0.2, weight_decay=0.01),
        [0.51119163328, -1.2655458864, 1.98114173952],
    ),
    "nesterov": (
        hvd.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        [0.5224509619804999, -1.3067014492462499, 2.057536586512],
    ),
    "adam": (
        hvd.Adam(0.1, weight_decay=0.01),
        [0.4569915377848702, -1.2221869825496898, 1.85958217181609],
    ),
    "adamw": (
        hvd.AdamW(0.1, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.05),
        [0.45495635454136574, -1.2174880280629368, 1.8483701343535355],
    ),
}


@pytest.mark.parametrize("name", TORCH)
def test_steps_are_those_of_torch(name: str) -> None:
    kind, expected = TORCH[name]
    optimizer = copy.deepcopy(kind)
    param, frozen = np.array(START), np.ones(2)
    for grad in GRADS:
        optimizer.step({"w": param, "frozen": frozen}, {"w": np.array(grad)})
    np.testing.assert_allclose(param, expected, rtol=1e-13)
    assert (frozen == 1).all()


@pytest.mark.parametrize("name", TORCH)
def test_state_goes_on_where_it_was_saved(name: str) -> None:
    first, expected = copy.deepcopy(TORCH[name][0]), TORCH[name][1]
    param = np.array(START)
    first.step({"w": param}, {"w": np.array(GRADS[0])})
    second = type(first)(lr=99.0)
    second.load_state_dict(first.state_dict())
    for grad in GRADS[1:]:
        first.step({"w": param.copy()}, {"w": np.array(grad) + 1})  # what it does now is its own
        second.step({"w": param}, {"w": np.array(grad)})
    np.testing.assert_allclose(param, expected, rtol=1e-13)


def test_saved_state_is_a_copy() -> None:
    optimizer, param = hvd.SGD(0.1, momentum=0.9), np.array(START)
    optimizer.step({"w": param}, {"w": np.array(GRADS[0])})
    saved = optimizer.state_dict()
    for _ in range(2):  # once behind state_dict, once behind load_state_dict
        optimizer.step({"w": param}, {"w": np.array(GRADS[1])})
        np.testing.assert_array_equal(saved["state"]["w"]["momentum_buffer"], GRADS[0])
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("name", TORCH)
def test_parameters_keep_their_dtype(name: str) -> None:
    param = np.array(START, np.float32)
    before = param
    optimizer = copy.deepcopy(TORCH[name][0])
    optimizer.step({"w": param}, {"w": np.array(GRADS[0], np.float32)})
    assert param is before and param.dtype == np.float32
    arrays = [a for s in optimizer.state.values() for a in s.values() if isinstance(a, np.ndarray)]
    assert {array.dtype for array in arrays} <= {np.dtype(np.float32)}


def test_gradients_without_their_parameter() -> None:
    params = {"w": np.ones(3)}
    with pytest.raises(
        InputError, match="the gradient 'v' has no parameter of this name; the parameters are w"
    ):
        hvd.SGD(0.1).step(params, {"v": np.ones(3)})
    with pytest.raises(InputError, match=r"'w' has shape \[3\], but its gradient has \[1\]"):
        hvd.SGD(0.1).step(params, {"w": np.ones(1)})
    assert (params["w"] == 1).all()


def test_the_state_of_another_kind() -> None:
    with pytest.raises(InputError, match="this is not the state of Adam: it has"):
        hvd.Adam(0.1).load_state_dict(hvd.SGD(0.1).state_dict())
