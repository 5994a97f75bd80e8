"""What a model to export consists of: a network, its inputs, its sizes and its variants."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

Config = dict[str, Any]
Exporter = Literal["dynamo", "legacy"]
Shapes = Literal["static", "dynamic", "training"]
Loss = Literal["softmax-cross-entropy", "mse", "bce"]
Variant = tuple[Exporter, Shapes]

EVERY_VARIANT: tuple[Variant, ...] = (
    ("dynamo", "static"),
    ("dynamo", "dynamic"),
    ("legacy", "static"),
    ("legacy", "dynamic"),
)
TRAINING: Variant = ("legacy", "training")
DYNAMO_STATIC: tuple[Variant, ...] = (("dynamo", "static"),)
STATIC: tuple[Variant, ...] = (("dynamo", "static"), ("legacy", "static"))


@dataclass(frozen=True)
class Input:
    """What to feed to one input: its dimensions (a name is a symbol) and its values.

    `bound` makes it integers below that, from all over the range; `mask` makes it ones, with
    trailing zeros in later rows; otherwise it holds normal floats.
    """

    dims: tuple[int | str, ...]
    bound: int = 0
    mask: bool = False

    def symbols(self) -> dict[int, str]:
        """Return the named dimensions by their position."""
        return {axis: dim for axis, dim in enumerate(self.dims) if isinstance(dim, str)}

    def sample(self, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
        """Return random values, with the sizes of the named dimensions taken from `sizes`."""
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in self.dims]
        if self.mask:
            kept = shape[1] - torch.arange(shape[0]) % max(shape[1] // 2, 1)
            return (torch.arange(shape[1]) < kept[:, None]).long()
        if self.bound:
            count = math.prod(shape)
            strata = torch.randperm(count, generator=generator)
            places = (strata + torch.rand(count, generator=generator)) / count
            return (places * self.bound).long().reshape(shape)
        return torch.randn(shape, generator=generator)


def as_keywords(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Pass every input under its own name."""
    return dict(flat)


@dataclass(frozen=True)
class Case:
    """One network and its inputs by name; `arrange` turns those into the keywords of `forward`."""

    network: nn.Module
    inputs: dict[str, Input]
    arrange: Callable[[Mapping[str, Any]], dict[str, Any]] = as_keywords


@dataclass(frozen=True)
class Architecture:
    """How to build a model, small (committed) or full-size, and in which variants.

    `training` is how the small one is changed to be exported for training, and None where it is
    not; `loss` is what its first output is compared by, `rate` the learning rate at which it falls.
    """

    name: str
    build: Callable[..., Case]
    small: Config
    full: Config
    variants: tuple[Variant, ...] = EVERY_VARIANT
    dtype: torch.dtype = torch.float32
    fails: Mapping[Variant, str] = field(default_factory=dict)
    training: Config | None = None
    loss: Loss = "softmax-cross-entropy"
    rate: float = 0.01


def tokens(bound: int, *dims: int | str) -> Input:
    """Integers in [0, bound)."""
    return Input(dims, bound=bound)


def floats(*dims: int | str) -> Input:
    """Normal floats."""
    return Input(dims)


def mask(*dims: int | str) -> Input:
    """1 where a token counts, 0 where it is padding on the right."""
    return Input(dims, mask=True)
