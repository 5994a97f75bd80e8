"""Networks in training, and the gradients that torch gives their parameters."""

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from building import SEED, SIZES, build, run_torch, sample_inputs
from cases import Architecture, Case, Loss
from onnx import ModelProto, numpy_helper
from torch import Tensor, nn
from torch.nn import functional

SAMPLES = 8
"""How many elements of each gradient are kept, besides the largest."""
JOLT, STEADY = 1e-6, 1e-4
"""Where weights are moved by this much of themselves, gradients move by less than that."""
ROUNDED = 2e-5
"""How far gradients in float32 may be from those in float64."""
FEW = (1, 2)
"""How many rows of a batch are trained on, too."""
TRAINED_ON_FEW = ("gpt2", "llama", "bert", "vit", "resnet", "dlrm", "moe", "lstm")
"""Models that are."""
STEPS = 50
"""How many steps of gradient descent are taken, all on the same batch."""


@dataclass(frozen=True)
class Batch:
    """What one training step is fed: inputs by name, and what the first output should be."""

    inputs: dict[str, Tensor]
    target: Tensor


def build_for_training(model: Architecture) -> Case:
    """Return the model's case with batch-norm in training mode and no dropout."""
    assert model.training is not None
    case = build(model, model.small | model.training)
    for module in case.network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train()
            # With most of a ReLU's inputs above zero: a deep network of batch-norms and few
            # samples blows up rounding errors a thousandfold otherwise.
            module.bias.data += 0.75
        elif isinstance(module, nn.Embedding):
            module.padding_idx = None  # whose row gets no gradient: ONNX cannot say that
    return case


def draw(model: Architecture, case: Case, seed: int) -> Batch:
    """Return a batch; its floats are sixteenths, which take little space in a file."""
    inputs = sample_inputs(case, SIZES, seed)
    inputs = {k: (v * 16).round() / 16 if v.is_floating_point() else v for k, v in inputs.items()}
    made = next(iter(run_torch(copy.deepcopy(case), inputs).values()))
    generator = torch.Generator().manual_seed(seed)
    if model.loss == "mse":
        return Batch(inputs, (torch.randn(made.shape, generator=generator) * 16).round() / 16)
    if model.loss == "bce":
        return Batch(inputs, torch.randint(2, made.shape, generator=generator).float())
    return Batch(inputs, torch.randint(made.shape[-1], made.shape[:-1], generator=generator))


def loss_of(kind: Loss, made: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss."""
    if kind == "mse":
        return functional.mse_loss(made, target)
    if kind == "bce":
        return functional.binary_cross_entropy(made, target)
    return functional.cross_entropy(made.flatten(0, -2), target.flatten())


def gradients(
    model: Architecture, case: Case, batch: Batch, dtype: torch.dtype, jolt: float = 0
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and each parameter's gradient, None where it has none, computed in `dtype`.

    With `jolt` the weights are moved by about so much of themselves before.
    """

    moved = moved_case(case, dtype, jolt)
    loss = batch_loss(model, moved, batch, dtype)
    loss.backward()
    found = {name: weight.grad for name, weight in moved.network.named_parameters()}
    return loss.item(), {name: value for name, value in found.items() if value is not None}


def train(
    model: Architecture, case: Case, batch: Batch, dtype: torch.dtype, jolt: float = 0
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the loss before each of many steps, and what they make of the parameters."""
    moved = moved_case(case, dtype, jolt)
    optimizer = torch.optim.SGD(moved.network.parameters(), model.rate)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = batch_loss(model, moved, batch, dtype)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: weight.detach() for name, weight in moved.network.named_parameters()}


def moved_case(case: Case, dtype: torch.dtype, jolt: float) -> Case:
    """Return a copy in `dtype`, its weights moved by about so much of themselves."""
    moved = copy.deepcopy(case)
    moved.network.to(dtype)
    generator = torch.Generator().manual_seed(SEED)
    for weight in moved.network.parameters():
        weight.data *= 1 + jolt * torch.randn(weight.shape, generator=generator, dtype=dtype)
    return moved


def batch_loss(model: Architecture, case: Case, batch: Batch, dtype: torch.dtype) -> Tensor:
    """Return the mean loss of a batch, computed in `dtype`."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    inputs = {name: cast(value) for name, value in batch.inputs.items()}
    made = next(iter(case.network(**case.arrange(inputs)).values()))
    return loss_of(model.loss, made, cast(batch.target))


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest error, relative to its gradient's largest element, or to a thousandth of
    the model's where that is more."""
    least = 1e-3 * max(float(value.abs().max()) for value in wanted.values())
    return max(
        float((found[name] - value).abs().max()) / max(float(value.abs().max()), least)
        for name, value in wanted.items()
    )


def steady_batch(model: Architecture, case: Case) -> Batch:
    """Return the first batch on which rounding matters little: no ReLU is about to switch, no
    expert about to be chosen instead of another."""

    def is_steady(batch: Batch) -> bool:
        _, still = gradients(model, case, batch, torch.float64)
        _, moved = gradients(model, case, batch, torch.float64, JOLT)
        _, rounded = gradients(model, case, batch, torch.float32)
        return distance(moved, still) < STEADY and distance(rounded, still) < ROUNDED

    batches = (draw(model, case, seed) for seed in itertools.count(SEED))
    return next(batch for batch in batches if is_steady(batch))


def write_expected(
    model: Architecture,
    case: Case,
    batch: Batch,
    path: Path,
    constants: Mapping[str, np.ndarray[Any, Any]] = MappingProxyType({}),
) -> None:
    """Write a batch, its loss, and of every gradient some elements and the magnitude; then the
    losses of many steps, and the same elements of every parameter after them; and `constants`.

    Floats of the batch are sixteenths, and so exact in float16. `places` are flat positions, the
    gradient's largest element's first; `mean` is that of absolute values, `largest` the parameter's
    largest one.
    """
    loss, found = gradients(model, case, batch, torch.float64)
    losses, trained = train(model, case, batch, torch.float64)
    generator = np.random.RandomState(SEED)
    values = {name: value.numpy().ravel() for name, value in found.items()}
    places = {
        name: [int(np.abs(v).argmax()), *generator.choice(np.flatnonzero(v), SAMPLES)]
        for name, v in values.items()
    }
    feeds = batch.inputs | {"target": batch.target}
    arrays = {
        f"feed.{name}": (value.half() if value.is_floating_point() else value).numpy()
        for name, value in feeds.items()
    }
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(
        path,
        kind=np.array(model.loss),
        output=np.array(next(iter(run_torch(copy.deepcopy(case), batch.inputs)))),
        loss=np.array(loss),
        names=np.array(list(values)),
        places=np.array(list(places.values()), np.int32),
        values=np.array([v[places[n]] for n, v in values.items()], np.float32),
        mean=np.array([np.abs(v).mean() for v in values.values()], np.float32),
        rate=np.array(model.rate),
        losses=np.array(losses),
        trained=np.array([trained[n].numpy().ravel()[places[n]] for n in values]),
        largest=np.array([float(trained[n].abs().max()) for n in values]),
        **arrays,
        **{f"constant.{name}": value for name, value in constants.items()},
    )


def changed_constants(model: ModelProto, other: ModelProto) -> dict[str, np.ndarray[Any, Any]]:
    """Return the constants of `other` that differ from those of the same name in `model`, of which
    all else must be equal."""
    assert [n.op_type for n in model.graph.node] == [n.op_type for n in other.graph.node]
    found = {}
    for node, same in zip(model.graph.node, other.graph.node, strict=True):
        if node.op_type == "Constant":
            value = numpy_helper.to_array(same.attribute[0].t)
            if not np.array_equal(numpy_helper.to_array(node.attribute[0].t), value):
                found[same.output[0]] = value
        else:
            assert node == same, f"{node.op_type} {node.name}"
    return found
