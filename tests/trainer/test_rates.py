"""Learning rates by step, against transformers and PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxpar.base.errors import InputError
from onnxpar.trainer.rates import Rate, Schedule


def rates(steps: int, kind: str, warmup: int = 0, **how: Any) -> list[float]:
    rate = Rate(2.0, steps, Schedule(kind, warmup, **how))
    return [rate.at(step) for step in range(steps)]


def test_rates() -> None:
    assert rates(3, "constant") == [2, 2, 2]
    assert rates(4, "linear") == [2, 1.5, 1, 0.5]
    np.testing.assert_allclose(rates(4, "cosine"), 1 + np.cos(np.pi * np.arange(4) / 4))
    assert rates(5, "constant", 4) == [0.5, 1, 1.5, 2, 2]
    assert rates(6, "linear", 2) == [1, 2, 2, 1.5, 1, 0.5]
    np.testing.assert_allclose(
        rates(6, "cosine", 2), [1, 2, *(1 + np.cos(np.pi * np.arange(4) / 4))]
    )
    assert rates(3, "cosine", 3) == pytest.approx([2 / 3, 4 / 3, 2])


TRANSFORMERS: dict[str, tuple[dict[str, Any], list[float]]] = {
    "linear": ({"kind": "linear"}, [2.0, 1.6666667, 1.3333333, 1.0, 0.66666667, 0.33333333]),
    "cosine": ({"kind": "cosine"}, [2.0, 1.8660254, 1.5, 1.0, 0.5, 0.1339746]),
    "cosine to a rate": (
        {"kind": "cosine", "min_lr": 0.5},
        [2.0, 1.8995191, 1.625, 1.25, 0.875, 0.60048095],
    ),
    "polynomial": (
        {"kind": "polynomial", "power": 2.0, "min_lr": 0.5},
        [2.0, 1.5416667, 1.1666667, 0.875, 0.66666667, 0.54166667],
    ),
    "inverse-sqrt": (
        {"kind": "inverse-sqrt"},
        [2.0, 1.6329932, 1.4142136, 1.2649111, 1.1547005, 1.069045],
    ),
    "wsd": ({"kind": "wsd", "decay_steps": 3, "min_lr": 0.5}, [2.0, 2.0, 2.0, 2.0, 1.625, 0.875]),
    "step": ({"kind": "step", "step_size": 2, "gamma": 0.5}, [2.0, 2.0, 1.0, 1.0, 0.5, 0.5]),
}
"""What transformers' schedules and PyTorch's StepLR give from step 2 on, in a run of 8 steps with 2
of warm-up and a peak of 2; by rates_in_transformers.py."""


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_rates_of_transformers(name: str) -> None:
    how, expected = TRANSFORMERS[name]
    found = rates(8, warmup=2, **how)
    np.testing.assert_allclose(found[:2], [1, 2])
    np.testing.assert_allclose(found[2:], expected, rtol=1e-6)


def test_an_inverse_root_without_warmup() -> None:
    """transformers falls over 10,000 steps then."""
    rate = Rate(2.0, 40_001, Schedule("inverse-sqrt", min_lr=1.0))
    assert [rate.at(step) for step in (0, 30_000, 40_000)] == [2, 1, 1]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (["steps"], "--schedule 'steps': give one of constant, linear, cosine, polynomial"),
        (["constant", 11], "--warmup 11: the run has 10 steps; give a number from 0 to 10"),
        (["constant", -1], "--warmup -1: give a number of steps, or 0 for none"),
        (["constant", 0, 0.01], "--min-lr 0.01: a constant rate does not fall"),
        (["linear", 0, 0.2], "--min-lr 0.2: give a number from 0 to --lr, 0.1"),
        (["linear", 0, -0.2], "--min-lr -0.2: give a number from 0 to --lr, 0.1"),
        (["linear", 0, 0, 2.0], "--lr-power 2.0: it is for --schedule polynomial"),
        (["polynomial", 0, 0, -1.0], "--lr-power -1.0: must be 0 or more"),
        (["step"], "--schedule step: give --lr-step-size, a number of steps"),
        (["step", 0, 0, None, 0], "--lr-step-size 0: must be 1 or more"),
        (["wsd"], "--schedule wsd: give --decay-steps"),
        (["wsd", 5, 0, None, None, None, 6], "--decay-steps 6: the run has 5 steps after warm-up"),
    ],
)
def test_rates_that_do_not_fit(how: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Rate(0.1, 10, Schedule(*how))
