"""Writes margins.json: losses and gradients of ArcFace and CosFace in PyTorch 2.13 (run by hand).

The formulas are those of InsightFace's arcface_torch: normalized embeddings times normalized class
centres, clamped to [-1, 1], a margin at the label's class, a scale, and the cross-entropy.
"""

import json
import math
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy, linear, normalize

CASES = [("arcface", None, None), ("cosface", None, None), ("arcface", 0.3, 8), ("cosface", 0.1, 4)]
FILTERED = [("arcface", 0.3, 8, 0.4), ("cosface", 0.1, 4, 0.2)]
"""With InsightFace's interclass_filtering_threshold."""


def arcface(cosine: torch.Tensor, margin: float) -> torch.Tensor:
    moved = cosine * math.cos(margin) - torch.sqrt(1 - cosine**2) * math.sin(margin)
    easier = cosine - math.sin(math.pi - margin) * margin
    return torch.where(cosine > math.cos(math.pi - margin), moved, easier)


def cosface(cosine: torch.Tensor, margin: float) -> torch.Tensor:
    return cosine - margin


def main() -> None:
    """The embedding of sample 4 is nearly opposite to its centre: there ArcFace changes formula."""
    draw = np.random.default_rng(7)
    embeddings = draw.standard_normal((6, 5)).round(2)
    centres = draw.standard_normal((8, 5)).round(2)
    labels = [1, 7, 3, 3, 0, 5]
    embeddings[4] = (-centres[0] + 0.1 * embeddings[4]).round(2)
    embeddings[1] = (centres[7] + 0.3 * embeddings[1]).round(2)
    inputs = {"e": embeddings.tolist(), "w": centres.tolist(), "labels": labels}
    cases = []
    for kind, margin, scale, threshold in [*((*case, None) for case in CASES), *FILTERED]:
        e, w = (torch.tensor(x, requires_grad=True) for x in (embeddings, centres))
        cosines = linear(normalize(e), normalize(w)).clamp(-1, 1)
        rows = torch.arange(len(labels))
        own = cosines[rows, labels]
        if kind == "arcface":
            changed = arcface(own, 0.5 if margin is None else margin)
        else:
            changed = cosface(own, 0.4 if margin is None else margin)
        logits = cosines.clone()
        if threshold is not None:
            with torch.no_grad():
                dirty = (cosines > threshold).double()
                dirty[rows, labels] = 0
            assert dirty.sum() >= 3
            logits = (1 - dirty) * logits
        logits[rows, labels] = changed
        loss = cross_entropy(logits * (scale or 64), torch.tensor(labels))
        loss.backward()
        case = {"loss": kind, "margin": margin, "scale": scale, "value": loss.item()}
        case |= {} if threshold is None else {"threshold": threshold}
        cases.append(case | {"e.grad": e.grad.tolist(), "w.grad": w.grad.tolist()})
    text = json.dumps({"inputs": inputs, "cases": cases})
    Path(__file__).with_name("margins.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
