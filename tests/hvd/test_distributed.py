"""The distributed optimizer: what one process would do with all gradients."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from onnxpar import hvd
from onnxpar.errors import InputError

SHAPES = {"w1": (4, 3), "b1": (3,), "w2": (3, 2), "scale": ()}
STEPS = 4
Arrays = dict[str, np.ndarray]


def draw(seed: list[int]) -> Arrays:
    random = np.random.default_rng(seed)
    return {name: np.asarray(random.standard_normal(shape)) for name, shape in SHAPES.items()}


def added(grads: list[Arrays]) -> Arrays:
    return {name: np.asarray(sum(grad[name] for grad in grads)) for name in SHAPES}


def divided(grads: Arrays, by: int) -> Arrays:
    return {name: grad / by for name, grad in grads.items()}


def assert_close(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    for name in SHAPES:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("threshold", [0, 100, 64 << 20])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_steps_are_those_of_one_process(ranks: int, threshold: int, op: hvd.ReduceOp) -> None:
    expected, alone = draw([0]), hvd.Adam(0.1)
    for step in range(STEPS):
        total = added([draw([1, step, rank]) for rank in range(ranks)])
        alone.step(expected, divided(total, ranks if op is hvd.Average else 1))

    def body() -> Arrays:
        params = draw([0])
        optimizer = hvd.DistributedOptimizer(hvd.Adam(0.1), op=op, fusion_threshold=threshold)
        for step in range(STEPS):
            grads = draw([1, step, hvd.rank()])
            order = sorted(grads, reverse=hvd.rank() == 1)  # that of a dict does not matter
            assert optimizer.step(params, {name: grads[name] for name in order})
        return params

    found = hvd.run_on_threads(body, ranks)
    for params in found:
        assert_close(params, expected)
        assert all(params[name].tobytes() == found[0][name].tobytes() for name in SHAPES)


def test_gradients_of_several_passes_add_up() -> None:
    expected, alone = draw([0]), hvd.SGD(0.1, momentum=0.9)
    for step in range(2):
        grads = [draw([step, k, rank]) for k in range(3) for rank in range(2)]
        alone.step(expected, divided(added(grads), 2))

    def body() -> Arrays:
        params, grads = draw([0]), draw([9])
        optimizer = hvd.DistributedOptimizer(hvd.SGD(0.1, momentum=0.9), backward_passes_per_step=3)
        for step in range(2):
            stepped = []
            for k in range(3):
                for name, drawn in draw([step, k, hvd.rank()]).items():
                    grads[name][...] = drawn  # a loop may write them where they were
                stepped.append(optimizer.step(params, grads))
            assert stepped == [False, False, True]
        return params

    for params in hvd.run_on_threads(body, 2):
        assert_close(params, expected)


def test_parameters_that_have_no_gradient_at_times() -> None:
    def body() -> Arrays:
        params, optimizer = draw([0]), hvd.DistributedOptimizer(hvd.SGD(1.0))
        for names in (["w1", "b1"], ["w2"], ["w1", "b1"]):
            grads = draw([hvd.rank()])
            optimizer.step(params, {name: grads[name] for name in names})
        return params

    start, mean = draw([0]), divided(added([draw([0]), draw([1])]), 2)
    times = {"w1": 2, "b1": 2, "w2": 1, "scale": 0}
    for params in hvd.run_on_threads(body, 2):
        assert_close(params, {n: start[n] - times[n] * mean[n] for n in SHAPES})


def test_no_state_between_passes() -> None:
    def body() -> None:
        params = draw([0])
        optimizer = hvd.DistributedOptimizer(hvd.SGD(0.1), backward_passes_per_step=2)
        start = optimizer.state_dict()
        optimizer.step(params, draw([1]))
        with pytest.raises(InputError, match="between passes 1 and 2 of 2"):
            optimizer.state_dict()
        optimizer.load_state_dict(start)
        assert not optimizer.step(params, draw([1]))

    hvd.run_on_threads(body, 1)


def test_a_step_of_ones_own() -> None:
    """Clipping by the norm of the reduced gradients."""

    def body() -> Arrays:
        params = draw([0])
        optimizer = hvd.DistributedOptimizer(hvd.SGD(1.0))
        grads = optimizer.synchronize(draw([1, hvd.rank()]))
        norm = np.sqrt(sum(np.sum(grad**2) for grad in grads.values()))
        optimizer.optimizer.step(params, {name: grad / norm for name, grad in grads.items()})
        return params

    mean = divided(added([draw([1, 0]), draw([1, 1])]), 2)
    norm = np.sqrt(sum(np.sum(grad**2) for grad in mean.values()))
    expected = {name: value - mean[name] / norm for name, value in draw([0]).items()}
    for params in hvd.run_on_threads(body, 2):
        assert_close(params, expected)


def test_compressed_gradients() -> None:
    def body() -> Arrays:
        params = draw([0])
        optimizer = hvd.DistributedOptimizer(hvd.SGD(1.0), compression=hvd.Compression.fp16)
        optimizer.step(params, draw([1, hvd.rank()]))
        return params

    mean = divided(added([draw([1, rank]) for rank in range(3)]), 3)
    for params in hvd.run_on_threads(body, 3):
        for name, start in draw([0]).items():
            assert params[name].dtype == np.float64
            np.testing.assert_allclose(params[name], start - mean[name], atol=5e-3)


def test_gradients_that_differ_are_named_on_every_rank() -> None:
    def body() -> None:
        params = {"w": np.ones((2, 3) if hvd.rank() == 0 else (3, 2))}
        optimizer = hvd.DistributedOptimizer(hvd.SGD(0.1))
        message = r"gradients: rank 0 has 'w' float64\[2, 3\] where rank 1 has 'w' float64\[3, 2\]"
        with pytest.raises(InputError, match=message):
            optimizer.step(params, {"w": np.ones(params["w"].shape)})

    hvd.run_on_threads(body, 3)


def test_what_is_refused() -> None:
    def body() -> None:
        with pytest.raises(InputError, match="backward_passes_per_step=0 must be at least 1"):
            hvd.DistributedOptimizer(hvd.SGD(0.1), backward_passes_per_step=0)
        optimizer = hvd.DistributedOptimizer(hvd.SGD(0.1))
        with pytest.raises(InputError, match="the gradient of 'n': an average of int64 values"):
            optimizer.step({"n": np.ones(3)}, {"n": np.ones(3, np.int64)})
        with pytest.raises(InputError, match="the gradient 'v' has no parameter"):
            optimizer.step({"w": np.ones(3)}, {"v": np.ones(3)})

    hvd.run_on_threads(body, 1)


def test_the_learning_rate() -> None:
    def body() -> float:
        optimizer = hvd.DistributedOptimizer(hvd.SGD(hvd.scale_learning_rate(0.1)))
        optimizer.lr /= 2
        return optimizer.optimizer.lr

    assert hvd.run_on_threads(body, 4) == [0.2] * 4
