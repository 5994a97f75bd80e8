"""Writes losses.json: values and gradients of PyTorch 2.13's losses (run by hand)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

SHAPES = {"flat": (6, 5), "spatial": (2, 5, 2, 3)}
WEIGHTS = [0.5, 2, 1, 0, 1.25]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def drawn() -> dict[str, dict[str, np.ndarray]]:
    draw = np.random.default_rng(3)
    found = {}
    for name, shape in SHAPES.items():
        labels = draw.integers(0, 5, (shape[0], *shape[2:]))
        labels.reshape(-1)[[1, 4]] = -100
        found[name] = {
            "y": 2 * draw.standard_normal(shape).round(2),
            "labels": labels,
            "target": draw.standard_normal(shape).round(2),
            "part": draw.random(shape).round(1),
        }
    return found


def by_label(**options: Any) -> Loss:
    if options["weight"] is not None:
        options["weight"] = torch.tensor(options["weight"], dtype=torch.float64)
    return lambda y, labels: F.cross_entropy(y, labels, **options)


def nll(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(y.log_softmax(1), labels, torch.tensor(WEIGHTS, dtype=torch.float64))


def kl(reduction: str) -> Loss:
    return lambda y, part: F.kl_div(y.log_softmax(1), part, reduction=reduction)


def bce(weight: list[float]) -> Loss:
    factor = torch.tensor(weight, dtype=torch.float64)
    return lambda y, part: F.binary_cross_entropy_with_logits(y, part, pos_weight=factor)


CASES: list[tuple[str, str, dict[str, Any], str, Loss]] = [
    (
        shape,
        "softmax-cross-entropy",
        {**smoothing, **weights},
        "labels",
        by_label(**smoothing, weight=weights.get("class_weights")),
    )
    for shape in SHAPES
    for smoothing in ({}, {"label_smoothing": 0.2}, {"label_smoothing": 1.0})
    for weights in ({}, {"class_weights": WEIGHTS})
] + [
    ("flat", "nll", {"class_weights": WEIGHTS}, "labels", nll),
    ("flat", "l1", {}, "target", F.l1_loss),
    ("flat", "huber", {}, "target", F.huber_loss),
    ("flat", "huber", {"delta": 0.3}, "target", lambda y, t: F.huber_loss(y, t, delta=0.3)),
    ("flat", "smooth-l1", {}, "target", F.smooth_l1_loss),
    ("spatial", "smooth-l1", {"delta": 3}, "target", lambda y, t: F.smooth_l1_loss(y, t, beta=3)),
    ("flat", "kl", {}, "part", kl("batchmean")),
    ("flat", "kl-mean", {}, "part", kl("mean")),
    ("spatial", "kl", {}, "part", kl("batchmean")),
    ("flat", "bce", {"pos_weight": [3]}, "part", bce([3])),
    ("flat", "bce", {"pos_weight": [1, 0, 2, 0.5, 3]}, "part", bce([1, 0, 2, 0.5, 3])),
    ("spatial", "bce", {"pos_weight": [1, 0, 2]}, "part", bce([1, 0, 2])),
]


def main() -> None:
    cases = []
    for shape, loss, how, kind, function in CASES:
        given = drawn()[shape]
        y = torch.tensor(given["y"], requires_grad=True)
        value = function(y, torch.tensor(given[kind]))
        value.backward()
        case = {"shape": shape, "loss": loss, "how": how, "target": kind}
        cases.append(case | {"value": value.item(), "grad": y.grad.numpy().round(12).tolist()})
    inputs = {name: {k: a.tolist() for k, a in each.items()} for name, each in drawn().items()}
    text = json.dumps({"inputs": inputs, "cases": cases})
    Path(__file__).with_name("losses.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
