"""Gradients of every parameter of the models exported for training are those of PyTorch's autograd,
every element of them.

Each network is built anew, and gets the weights of the file.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import onnx
import pytest
from committed import MODELS, TRAINING
from model_gradients import bounds, run_gradients
from onnx import numpy_helper

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def training():
    """The module of models/ that builds networks and has their gradients computed."""
    sys.path.insert(0, str(MODELS))
    import training

    yield training
    sys.path.remove(str(MODELS))


@pytest.mark.parametrize("model", TRAINING)
def test_gradients(training: Any, model: str) -> None:
    from architectures import ARCHITECTURES

    architecture = ARCHITECTURES[model.split(".")[0]]
    case = training.build_for_training(architecture)
    weights = {
        t.name: numpy_helper.to_array(t) for t in onnx.load(MODELS / model).graph.initializer
    }
    for name, parameter in case.network.named_parameters():
        parameter.data = torch.from_numpy(weights[f"network.{name}"].copy())
    batch = training.steady_batch(architecture, case)
    feeds = {k: v.numpy() for k, v in (batch.inputs | {"target": batch.target}).items()}
    loss, found = run_gradients(MODELS / model, architecture.loss, output_of(case, batch), feeds)
    for dtype in (torch.float64, torch.float32):
        expected, wanted = training.gradients(architecture, case, batch, dtype)
        assert loss == pytest.approx(expected, rel=1e-5)
        assert sorted(found) == sorted(f"network.{name}" for name in wanted)
        most = bounds({name: float(value.abs().max()) for name, value in wanted.items()})
        for name, value in wanted.items():
            gradient = found[f"network.{name}"]
            np.testing.assert_allclose(gradient, value.numpy(), 0, most[name], err_msg=name)


def output_of(case: Any, batch: Any) -> str:
    """The name of the output that the loss is of."""
    with torch.no_grad():
        return str(next(iter(case.network(**case.arrange(batch.inputs)))))
