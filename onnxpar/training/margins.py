"""Margin softmax losses: ArcFace and CosFace.

The scores are cosines: products of normalized embeddings with normalized class centres. At the
class of the label, the loss makes the cosine smaller by a margin; then it multiplies all cosines by
a scale and takes the softmax cross-entropy. Both losses follow InsightFace (arcface_torch).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnxpar.base.errors import StrategyError
from onnxpar.training.gradients.value import Value

SCALE = 64.0
"""The default factor of the cosines; InsightFace calls it s."""
FILTER = "--interclass-filtering-threshold"
"""The option for `Margin.threshold`, with InsightFace's name."""
_TINY = 1e-12
"""The least square of a sine, so that its root has a gradient; above 0, no float32 is less."""


def _arcface(cosine: Value, margin: float) -> Value:
    """Returns cos(angle + margin). Beyond an angle of pi - margin, where this would rise again,
    returns the cosine minus sin(margin) * margin (Deng et al., 2019)."""
    sine = (1.0 - cosine * cosine).op("Max", _TINY).sqrt()
    moved = cosine * math.cos(margin) - sine * math.sin(margin)
    limit = math.cos(math.pi - margin)
    return (cosine > limit).where(moved, cosine - math.sin(math.pi - margin) * margin)


def _cosface(cosine: Value, margin: float) -> Value:
    """Returns the cosine minus the margin (Wang et al., 2018)."""
    return cosine - margin


@dataclass(frozen=True)
class _Kind:
    """A kind of margin.

    change   a function from a label's cosine and the margin to the new cosine
    default  the default margin
    bound    margins must be below it
    """

    change: Callable[[Value, float], Value]
    default: float
    bound: float


_KINDS: Mapping[str, _Kind] = {
    "arcface": _Kind(_arcface, 0.5, math.pi),
    "cosface": _Kind(_cosface, 0.4, math.inf),
}
MARGINS = tuple(_KINDS)
"""The losses that have a margin."""


@dataclass(frozen=True)
class Margin:
    """The numbers of a margin softmax; None for the default of the loss.

    margin     arcface adds it to the angle of the label's class, cosface subtracts it from the
               cosine
    scale      the factor of all cosines
    threshold  cosines of other classes above it become 0, because such a sample may have a wrong
               label
    """

    margin: float | None = None
    scale: float | None = None
    threshold: float | None = None

    def check(self, loss: str) -> None:
        """Checks the numbers for a loss. Errors: StrategyError."""
        numbers = {"--margin": self.margin, "--logit-scale": self.scale, FILTER: self.threshold}
        if loss not in _KINDS:
            for option, value in numbers.items():
                if value is not None:
                    raise StrategyError(
                        f"{option} {value}: the loss {loss!r} has no margin; only "
                        f"{' and '.join(MARGINS)} have; leave {option} out"
                    )
            return
        bound = _KINDS[loss].bound
        if self.margin is not None and not 0 <= self.margin < bound:
            most = "" if bound == math.inf else " and below pi (it is an angle)"
            raise StrategyError(f"--margin {self.margin}: must be 0 or more{most}")
        if self.scale is not None and not 0 < self.scale < math.inf:
            raise StrategyError(f"--logit-scale {self.scale}: must be above 0")
        if self.threshold is not None and not 0 < self.threshold < 1:
            raise StrategyError(
                f"{FILTER} {self.threshold}: must be above 0 and below 1, as it is a cosine; leave "
                "it out to keep all"
            )

    def logits(self, loss: str, cosines: Value, labels: Value) -> Value:
        """Returns the logits of a loss: the scaled cosines, changed by the margin at the labels'
        classes. Classes are dimension 1. If ranks split the classes, they sum one number per
        sample, because only the rank of the label's class has its cosine."""
        kind = _KINDS[loss]
        margin = kind.default if self.margin is None else self.margin
        cosines = cosines.wide().op("Clip", -1.0, 1.0)
        is_label = labels.unsqueeze([1]).equal(_classes(cosines, labels.dtype))
        own = is_label.where(cosines, 0.0).sum([1], keepdims=True)
        if self.threshold is not None:
            cosines = (cosines > self.threshold).where(0.0, cosines)
        changed = is_label.where(kind.change(own, margin), cosines)
        return changed * (SCALE if self.scale is None else self.scale)


DEFAULT_MARGIN = Margin()
"""The numbers that InsightFace uses."""


def _classes(scores: Value, dtype: np.dtype[np.generic]) -> Value:
    """Returns the numbers 0, 1, ... of the classes, which are dimension 1 of `scores`, in a shape
    that broadcasts to `scores`."""
    shape: Sequence[int] = [-1 if a == 1 else 1 for a in range(scores.rank)]
    return scores.builder.arange(scores.shape[1], dtype).reshape(shape)
