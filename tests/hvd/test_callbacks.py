"""Callbacks and the hook, as in loops of one's own; rates by the formulas of Horovod's
documentation."""

from __future__ import annotations

import numpy as np
import pytest

from onnxpar import hvd
from onnxpar.base.errors import InputError
from onnxpar.hvd import callbacks

EPOCHS, STEPS = 4, 5


def rates(callback: callbacks.Callback, momentum: float = 0.0) -> list[tuple[float, float]]:
    """The rate and the momentum of each step of a loop."""
    optimizer = hvd.DistributedOptimizer(hvd.SGD(0.5, momentum=momentum))
    params, seen = {"w": np.ones(1)}, []
    every = callbacks.CallbackList([callback], params, optimizer, STEPS)
    every.on_train_begin()
    for epoch in range(EPOCHS):
        every.on_epoch_begin(epoch)
        for batch in range(STEPS):
            every.on_batch_begin(batch)
            seen.append((optimizer.lr, optimizer.optimizer.momentum))  # type: ignore[attr-defined]
            optimizer.step(params, {"w": np.ones(1)})
            every.on_batch_end(batch)
        logs: dict[str, float] = {}
        every.on_epoch_end(epoch, logs)
        assert logs == {"lr": optimizer.lr}
        assert optimizer.optimizer.momentum == momentum  # type: ignore[attr-defined]
    return seen


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_rate_rises_to_its_value(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    """lr'(epoch) = lr / size * (epoch * (size - 1) / warmup + 1), at the ends of steps."""

    def body() -> list[tuple[float, float]]:
        return rates(callbacks.LearningRateWarmupCallback(0.5, warmup_epochs=2, verbose=1))

    expected = [
        0.5 / ranks * (min(step / STEPS, 2) * (ranks - 1) / 2 + 1)
        for step in range(1, EPOCHS * STEPS + 1)
    ]
    for found in hvd.run_on_threads(body, ranks):
        np.testing.assert_allclose([rate for rate, _ in found], expected, rtol=1e-14)
    printed = capsys.readouterr().out
    assert printed == "\nEpoch 2: finished gradual learning rate warmup to 0.5.\n"


def test_a_schedule_in_steps() -> None:
    def body() -> None:
        schedule = callbacks.LearningRateScheduleCallback
        found = rates(schedule(0.5, lambda epoch: 1 / (1 + epoch)))
        assert [r for r, _ in found] == [0.5 / (1 + e) for e in range(EPOCHS) for _ in range(STEPS)]
        found = rates(schedule(0.5, 0.1, start_epoch=1, end_epoch=3))
        by_epoch = [0.5, 0.5, 0.5 * 0.1, 0.5 * 0.1]  # 0.1 ** (epoch - 1), then left alone
        np.testing.assert_allclose([r for r, _ in found], np.repeat(by_epoch, STEPS))

    hvd.run_on_threads(body, 1)


def test_momentum_follows_a_change_of_the_rate_for_a_step() -> None:
    def body() -> None:
        def multiplier(epoch: float) -> float:
            return 0.5**epoch

        found = rates(callbacks.LearningRateScheduleCallback(0.5, multiplier), momentum=0.8)
        for step, (_, momentum) in enumerate(found):
            changed = step % STEPS == 0 and step > 0
            assert momentum == pytest.approx(0.4 if changed else 0.8)
        kept = callbacks.LearningRateScheduleCallback(0.5, multiplier, momentum_correction=False)
        assert {momentum for _, momentum in rates(kept, momentum=0.8)} == {0.8}

    hvd.run_on_threads(body, 1)


def test_a_rate_by_batches_needs_the_number_of_steps() -> None:
    def body() -> None:
        warmup = callbacks.LearningRateWarmupCallback(0.5)
        every = callbacks.CallbackList([warmup], {}, hvd.SGD(0.5))
        with pytest.raises(InputError, match="LearningRateWarmupCallback needs steps_per_epoch"):
            every.on_train_begin()

    hvd.run_on_threads(body, 1)


def test_metrics_are_averaged() -> None:
    def body() -> dict[str, float]:
        logs = {"loss": float(hvd.rank()), "accuracy": 0.5 + hvd.rank()}
        every = callbacks.CallbackList([callbacks.MetricAverageCallback()], {}, hvd.SGD(0.1))
        every.on_epoch_end(0, logs)
        return logs

    assert hvd.run_on_threads(body, 3) == [{"loss": 1.0, "accuracy": 1.5}] * 3


def test_variables_are_broadcast_once_after_the_first_batch() -> None:
    def body() -> list[float]:
        params = {"w": np.full(1, float(hvd.rank())), "own": np.full(1, float(hvd.rank()))}
        optimizer = hvd.SGD(0.1 + hvd.rank(), momentum=0.9)
        once = callbacks.BroadcastGlobalVariablesCallback(1, local_variables="own")
        every = callbacks.CallbackList([once], params, optimizer)
        optimizer.step(params, {"w": np.full(1, 1.0 + hvd.rank())})
        every.on_batch_end(0)
        found = [*params["w"], optimizer.lr, *optimizer.state["w"]["momentum_buffer"]]
        params["w"][...] = hvd.rank()
        every.on_batch_end(1)
        return [*map(float, found), float(params["w"][0]), float(params["own"][0])]

    first, last = 1.0 - 1.1 * 2.0, [0.0, 1.0, 2.0]
    for rank, found in enumerate(hvd.run_on_threads(body, 3)):
        assert found == pytest.approx([first, 1.1, 2.0, last[rank], rank])


def test_a_hook_before_the_first_step() -> None:
    def body() -> list[float]:
        loop = callbacks.Loop({"w": np.full(1, float(hvd.rank()))}, hvd.SGD(0.1 * hvd.rank()))
        hook = callbacks.BroadcastGlobalVariablesHook(2)
        hook.begin()
        hook.after_create_session(loop, None)
        return [float(loop.params["w"][0]), loop.optimizer.lr]

    assert hvd.run_on_threads(body, 3) == [[2.0, 0.2]] * 3
