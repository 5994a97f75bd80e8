"""The distributed optimizer: what one process would do with all gradients."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from onnxpar import hvd
from onnxpar.base.errors import InputError

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


@pytest.mark.matrix
@pytest.mark.usefixtures("medium")
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


def test_synchronize_ends_the_passes_of_an_update() -> None:
    """It reduces what `step` has added up, too, as Horovod's reduces `param.grad`."""

    def body() -> list[float]:
        params = {"w": np.zeros(2), "only first": np.zeros(1)}
        optimizer = hvd.DistributedOptimizer(hvd.SGD(1.0), backward_passes_per_step=2)
        own = 1.0 + hvd.rank()
        for _ in range(2):
            first = {"w": np.full(2, own), "only first": np.ones(1)}
            assert not optimizer.step(params, first)
            reduced = optimizer.synchronize({"w": np.full(2, 10 * own)})
            assert reduced["w"].tolist() == [16.5, 16.5]
            with optimizer.skip_synchronize():
                assert optimizer.step(params, reduced)
            optimizer.zero_grad()
        return [*params["w"].tolist(), *params["only first"].tolist()]

    assert hvd.run_on_threads(body, 2) == [[-33.0, -33.0, -2.0]] * 2


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


@pytest.mark.usefixtures("medium")
def test_gradients_that_differ_are_named_on_every_rank() -> None:
    def body() -> None:
        params = {"w": np.ones((2, 3) if hvd.rank() == 0 else (3, 2))}
        optimizer = hvd.DistributedOptimizer(hvd.SGD(0.1))
        message = r"gradients: rank 0 has 'w' float64\[2, 3\], but rank 1 has 'w' float64\[3, 2\]"
        with pytest.raises(InputError, match=message):
            optimizer.step(params, {"w": np.ones(params["w"].shape)})

    hvd.run_on_threads(body, 3)


def test_what_is_refused() -> None:
    def body() -> None:
        with pytest.raises(InputError, match="backward_passes_per_step=0 must be at least 1"):
            hvd.DistributedOptimizer(hvd.SGD(0.1), backward_passes_per_step=0)
        optimizer = hvd.DistributedOptimizer(hvd.SGD(0.1))
        with pytest.raises(InputError, match="the gradient of 'n': an array of bool"):
            optimizer.step({"n": np.ones(3)}, {"n": np.ones(3, bool)})
        with pytest.raises(InputError, match="the gradient 'v' has no parameter"):
            optimizer.step({"w": np.ones(3)}, {"v": np.ones(3)})

    hvd.run_on_threads(body, 1)


def test_the_learning_rate() -> None:
    def body() -> float:
        optimizer = hvd.DistributedOptimizer(hvd.SGD(hvd.scale_learning_rate(0.1)))
        optimizer.lr /= 2
        return optimizer.optimizer.lr

    assert hvd.run_on_threads(body, 4) == [0.2] * 4


def params_after(optimizer_of: object, ranks: int, steps: int = 3) -> list[Arrays]:
    """The parameters of each rank after steps with gradients of its own."""

    def body() -> Arrays:
        params = draw([0])
        optimizer = optimizer_of(params)  # type: ignore[operator]
        for step in range(steps):
            optimizer.step(params, draw([1 + step, hvd.rank()]))
        return params

    return hvd.run_on_threads(body, ranks)


def test_named_parameters_need_no_gradient_on_every_rank() -> None:
    """A gradient that a rank does not have counts as 0, as in Horovod."""

    def body() -> Arrays:
        params = draw([0])
        named = list(params.items()) if hvd.rank() else params
        optimizer = hvd.DistributedOptimizer(hvd.SGD(1.0), named)
        grads = draw([1, hvd.rank()])
        if hvd.rank() == 1:
            del grads["w2"]
        optimizer.step(grads)
        return params

    mean = divided(added([draw([1, 0]), draw([1, 1])]), 2)
    mean["w2"] = draw([1, 0])["w2"] / 2
    for params in hvd.run_on_threads(body, 2):
        assert_close(params, {name: value - mean[name] for name, value in draw([0]).items()})


def test_a_divisor_before_the_sum() -> None:
    plain = params_after(lambda _: hvd.DistributedOptimizer(hvd.SGD(1.0)), 3)
    divided_before = params_after(
        lambda _: hvd.DistributedOptimizer(hvd.SGD(1.0), gradient_predivide_factor=3.0), 3
    )
    for one, other in zip(plain, divided_before, strict=True):
        assert_close(one, other)


@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("groups", [1, 3, [["w1", "b1"], ["scale"]], "arrays"])
def test_groups_change_nothing_but_the_messages(groups: object) -> None:
    def grouped(params: Arrays) -> hvd.DistributedOptimizer:
        chosen = [[params["w2"], params["w1"]]] if groups == "arrays" else groups
        return hvd.DistributedOptimizer(hvd.SGD(1.0), params.items(), groups=chosen)  # type: ignore[arg-type]

    plain = params_after(lambda _: hvd.DistributedOptimizer(hvd.SGD(1.0)), 2)
    for one, other in zip(plain, params_after(grouped, 2), strict=True):
        for name in SHAPES:
            np.testing.assert_array_equal(one[name], other[name])


def test_a_process_set_reduces_alone() -> None:
    def body() -> Arrays:
        params, pair = draw([0]), hvd.add_process_set([0, 2])
        optimizer = hvd.DistributedOptimizer(hvd.SGD(1.0), process_set=pair)
        optimizer.step(params, draw([1, hvd.rank()]))
        return params

    found = hvd.run_on_threads(body, 3)
    mean = divided(added([draw([1, 0]), draw([1, 2])]), 2)
    for rank, grads in ((0, mean), (1, draw([1, 1])), (2, mean)):
        assert_close(found[rank], {n: v - grads[n] for n, v in draw([0]).items()})


def test_adasum_combines_the_updates_of_the_ranks() -> None:
    """Of Adam: each rank's own update, from its own state, then Adasum of the differences."""
    rate, start = 0.1, draw([0])
    alone = []
    for rank in range(2):
        params = {name: value.copy() for name, value in start.items()}
        hvd.Adam(rate).step(params, draw([1, rank]))
        alone.append({name: params[name] - start[name] for name in SHAPES})
    expected = {}
    for name in SHAPES:
        a, b = alone[0][name], alone[1][name]
        dot = np.sum(a * b)
        left, right = 1 - dot / (2 * np.sum(a * a)), 1 - dot / (2 * np.sum(b * b))
        expected[name] = start[name] + left * a + right * b
    found = params_after(lambda _: hvd.DistributedOptimizer(hvd.Adam(rate), op=hvd.Adasum), 2, 1)
    for params in found:
        assert_close(params, expected)


def test_clipping_as_in_horovods_documentation() -> None:
    def body() -> Arrays:
        params = draw([0])
        optimizer = hvd.DistributedOptimizer(hvd.SGD(1.0), params)
        clipped = optimizer.synchronize(draw([1, hvd.rank()]))
        for grad in clipped.values():
            np.clip(grad, -0.1, 0.1, out=grad)
        with optimizer.skip_synchronize():
            optimizer.step(clipped)
        return params

    mean = divided(added([draw([1, 0]), draw([1, 1])]), 2)
    expected = {n: v - np.clip(mean[n], -0.1, 0.1) for n, v in draw([0]).items()}
    for params in hvd.run_on_threads(body, 2):
        assert_close(params, expected)


@pytest.mark.matrix
@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("passes", [1, 2])
def test_sparse_gradients_are_the_dense_ones(as_dense: bool, momentum: float, passes: int) -> None:
    def slices(step: int, rank: int) -> hvd.IndexedSlices:
        values = np.random.default_rng([step, rank]).standard_normal((3, 2))
        return hvd.IndexedSlices(values, np.array([rank, 4, rank]))

    def body(dense: bool) -> np.ndarray:
        params = {"table": np.ones((6, 2)), "w": np.ones(2)}
        optimizer = hvd.DistributedOptimizer(
            hvd.SGD(0.5, momentum=momentum),
            sparse_as_dense=as_dense,
            backward_passes_per_step=passes,
        )
        for step in range(4):
            rows = slices(step, hvd.rank())
            optimizer.step(
                params, {"table": rows.dense((6, 2)) if dense else rows, "w": np.ones(2)}
            )
        return params["table"]

    expected = hvd.run_on_threads(lambda: body(True), 2)[0]
    for found in hvd.run_on_threads(lambda: body(False), 2):
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_options_that_exclude_each_other() -> None:
    def body() -> None:
        for how, message in [
            ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "needs op=hvd.Average"),
            ({"gc_type": "1bit"}, "gc_type='1bit' is unknown; choose none, float16"),
            (
                {"gc_type": "float16", "compression": hvd.Compression.bf16},
                "compression and gc_type exclude each other",
            ),
            ({"gc_type": "2bit", "op": hvd.Max}, "needs op=hvd.Average or op=hvd.Sum"),
            ({"gc_type": "2bit", "threshold": 0.0}, "threshold=0.0 must be a positive number"),
            ({"fusion_threshold": -1}, "fusion_threshold=-1 must be at least 0"),
        ]:
            with pytest.raises(InputError, match=message):
                hvd.DistributedOptimizer(hvd.SGD(0.1), **how)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="needs named_parameters"):
            hvd.DistributedOptimizer(hvd.SGD(0.1)).step({"w": np.ones(1)})
        grads = {"w": np.ones(1)}
        optimizer = hvd.DistributedOptimizer(hvd.SGD(0.1), grads, groups=[[np.ones(1)]])
        with pytest.raises(InputError, match="list names of parameters, or arrays of"):
            optimizer.step(grads)

    hvd.run_on_threads(body, 1)


def test_the_fusion_threshold_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "64 MB")
    with pytest.raises(InputError, match="HOROVOD_FUSION_THRESHOLD='64 MB' must be a number"):
        hvd.DistributedOptimizer(hvd.SGD(0.1))
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
    assert hvd.DistributedOptimizer(hvd.SGD(0.1))._reducer.threshold == 0
