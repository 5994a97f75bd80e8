"""Gradients of every parameter of the models exported for training are those of PyTorch, which the
script that exports them has written down."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from committed import MODELS, TRAINING
from model_gradients import bounds, run_gradients


@pytest.mark.matrix
@pytest.mark.parametrize("model", TRAINING)
def test_gradients_of_every_parameter(model: str) -> None:
    path = MODELS / model
    expected = np.load(MODELS / "expected" / f"{path.stem}.npz")
    feeds = {k.removeprefix("feed."): expected[k] for k in expected if k.startswith("feed.")}
    feeds = {k: v.astype(np.float32) if v.dtype == np.float16 else v for k, v in feeds.items()}
    loss, found = run_gradients(path, str(expected["kind"]), str(expected["output"]), feeds)
    assert loss == pytest.approx(float(expected["loss"]), rel=1e-5)
    names = [f"network.{name}" for name in expected["names"]]
    assert sorted(found) == sorted(names)
    largest = np.abs(expected["values"][:, 0])
    for name, at, values, mean, bound in zip(
        names,
        expected["places"],
        expected["values"],
        expected["mean"],
        bounds(dict(zip(names, largest, strict=True))).values(),
        strict=True,
    ):
        gradient = found[name].ravel()
        np.testing.assert_allclose(gradient[at], values, rtol=0, atol=bound, err_msg=name)
        assert abs(np.abs(gradient).max() - abs(values[0])) <= bound, name
        assert abs(np.abs(gradient).mean() - mean) <= bound, name


def test_every_model_has_gradients_to_compare_with() -> None:
    assert [f"{Path(model).stem}.npz" for model in TRAINING] == sorted(
        path.name for path in (MODELS / "expected").glob("*.training.npz")
    )
    assert len(TRAINING) >= 14
