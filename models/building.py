"""Networks with seeded weights, and batches to run them on."""

from collections.abc import Mapping

import torch
from cases import Architecture, Case, Config
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

SEED = 20
SIZES = {"batch": 4, "seq": 16, "target": 12, "past": 15}
OTHER_SIZES = {"batch": 3, "seq": 11, "target": 7, "past": 5}


def build(model: Architecture, config: Config) -> Case:
    """Return the model's case with seeded weights, in evaluation mode."""
    case = model.build(**config)
    generator = torch.Generator().manual_seed(SEED)
    case.network.eval()
    set_weights(case.network, generator)
    set_statistics(case, generator)
    case.network.to(model.dtype)
    return case


def set_statistics(case: Case, generator: torch.Generator) -> None:
    """Let every batch-norm scale by what it sees in one batch: else a deep signal fades away."""

    def keep(norm: nn.BatchNorm2d, inputs: tuple[Tensor]) -> None:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        # Over all channels together: a nearly dead one would be blown up, rounding errors and all.
        size = inputs[0].square().mean()
        norm.running_mean.normal_(0, 0.3, generator=generator).mul_(size.sqrt())
        norm.running_var.uniform_(0.5, 2, generator=generator).mul_(size)

    norms = [module for module in case.network.modules() if isinstance(module, nn.BatchNorm2d)]
    hooks = [norm.register_forward_pre_hook(keep) for norm in norms]
    run_torch(case, sample_inputs(case, SIZES))
    for hook in hooks:
        hook.remove()


def set_weights(network: nn.Module, generator: torch.Generator) -> None:
    """Draw every weight so that activations stay near 1 and no bias or norm is neutral."""
    for module in network.modules():
        for name, weight in module.named_parameters(recurse=False):
            mean, deviation = weight_distribution(module, name, weight)
            weight.data.normal_(mean, deviation, generator=generator)


def weight_distribution(module: nn.Module, name: str, weight: Tensor) -> tuple[float, float]:
    """Return the mean and the standard deviation to draw a weight with."""
    linear = isinstance(module, nn.Linear | nn.Conv2d | nn.ConvTranspose2d | Conv1D)
    if weight.ndim < 2:
        return (0, 0.5 if linear else 0.3) if "bias" in name else (1, 0.3)
    if isinstance(module, nn.Embedding):
        return 0, 2 * weight.shape[1] ** -0.5
    if isinstance(module, nn.ConvTranspose2d | Conv1D):
        return 0, weight.shape[0] ** -0.5
    return 0, (weight[0].numel() if linear else weight.shape[-1]) ** -0.5


def sample_inputs(case: Case, sizes: Mapping[str, int], seed: int = SEED) -> dict[str, Tensor]:
    """Return one batch of inputs by name, its floats in the network's precision."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(case.network.parameters()).dtype
    batch = {name: spec.sample(sizes, generator) for name, spec in case.inputs.items()}
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


def run_torch(case: Case, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the network's outputs by its own names for them."""
    with torch.no_grad():
        return dict(case.network(**case.arrange(inputs)).items())
