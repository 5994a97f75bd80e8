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
    network = Network(training, model)
    network.check(training.steady_batch(network.architecture, network.case))


@pytest.mark.parametrize("model", [m for m in TRAINING if m.split(".")[0] in ("gpt2", "llama")])
def test_gradients_where_padding_stands_first(training: Any, model: str) -> None:
    """Such a token has nothing to look at."""
    network = Network(training, model)
    batch = training.steady_batch(network.architecture, network.case)
    mask = batch.inputs["attention_mask"].flip(1)
    assert not mask[-1, 0]
    network.check(training.Batch(batch.inputs | {"attention_mask": mask}, batch.target))


class Network:
    """A network in PyTorch with the weights of a file."""

    def __init__(self, training: Any, model: str) -> None:
        from architectures import ARCHITECTURES

        self.training, self.path = training, MODELS / model
        self.architecture = ARCHITECTURES[model.split(".")[0]]
        self.case = training.build_for_training(self.architecture)
        stored = {t.name: t for t in onnx.load(self.path).graph.initializer}
        for name, parameter in self.case.network.named_parameters():
            weight = numpy_helper.to_array(stored[f"network.{name}"])
            parameter.data = torch.from_numpy(weight.copy())

    def check(self, batch: Any) -> None:
        """Fails where a gradient is not that of autograd, in either precision."""
        feeds = {k: v.numpy() for k, v in (batch.inputs | {"target": batch.target}).items()}
        with torch.no_grad():
            output = next(iter(self.case.network(**self.case.arrange(batch.inputs))))
        loss, found = run_gradients(self.path, self.architecture.loss, output, feeds)
        for dtype in (torch.float64, torch.float32):
            expected, wanted = self.training.gradients(self.architecture, self.case, batch, dtype)
            assert loss == pytest.approx(expected, rel=1e-5)
            assert sorted(found) == sorted(f"network.{name}" for name in wanted)
            most = bounds({name: float(value.abs().max()) for name, value in wanted.items()})
            for name, value in wanted.items():
                gradient = found[f"network.{name}"]
                np.testing.assert_allclose(gradient, value.numpy(), 0, most[name], err_msg=name)
