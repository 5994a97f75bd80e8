"""Writes small networks whose gradients a file does not show, as PyTorch's exporters write them
(torch 2.13), and the gradients that torch computes.

    python models/autograd/export.py

`detach` uses results of detach() beside the tensors themselves; `straight_through` rounds, with the
gradient of the identity; `padding` looks rows up in a table with `padding_idx=3`, which also makes
the scores. Of each, `dynamo` is exported with `optimize=False`, `optimized` without, and `legacy`
with `dynamo=False`. Of the metadata, only torch's calls are left (`fx_node`). `expected.npz` has
the inputs, labels, and gradients of a cross-entropy, and the table of `padding` after three steps
of AdamW with weight decay.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import torch
from torch import nn
from torch.nn import functional as F

HERE = Path(__file__).parent
RATE = 0.1
DECAY = 0.2


class Detach(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.gate = nn.Linear(6, 5), nn.Linear(6, 5)
        self.b, self.c = nn.Linear(5, 3), nn.Linear(10, 3)

    def forward(self, x):  # type: ignore[no-untyped-def]
        h, gate = self.a(x), torch.sigmoid(self.gate(x))
        both = torch.cat([h.detach(), gate], 1)
        return self.b(h * gate.detach()) + self.c(both)


class StraightThrough(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):  # type: ignore[no-untyped-def]
        h = self.a(x)
        return self.b(h + (torch.round(h * 4) / 4 - h).detach())


class Padding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.a = nn.Embedding(7, 4, padding_idx=3), nn.Linear(4, 4)
        with torch.no_grad():
            self.table.weight[3] = torch.randn(4)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return F.linear(self.a(self.table(x).mean(1)), self.table.weight)


def main() -> None:
    torch.manual_seed(0)
    ids = torch.tensor([[3, 1, 3], [0, 2, 2], [3, 3, 3], [5, 6, 3]])
    made = {
        "detach": (Detach(), torch.randn(4, 6), torch.tensor([0, 2, 1, 2])),
        "straight_through": (StraightThrough(), torch.randn(4, 6), torch.tensor([0, 2, 1, 2])),
        "padding": (Padding(), ids, torch.tensor([1, 3, 6, 0])),
    }
    expected: dict[str, torch.Tensor] = {}
    for name, (network, x, labels) in made.items():
        for exporter in ("dynamo", "optimized", "legacy"):
            export(network, x, HERE / f"{name}.{exporter}.onnx", exporter)
        F.cross_entropy(network(x), labels).backward()
        expected |= {f"{name}.x": x, f"{name}.labels": labels}
        expected |= {f"{name}.{n}.grad": p.grad for n, p in network.named_parameters()}
    network, x, labels = made["padding"]
    optimizer = torch.optim.AdamW(network.parameters(), RATE, weight_decay=DECAY)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(network(x), labels).backward()
        optimizer.step()
    expected["padding.trained"] = network.table.weight
    arrays = {name: tensor.detach().numpy() for name, tensor in expected.items()}
    np.savez_compressed(HERE / "expected.npz", **arrays)


def export(network: nn.Module, x: torch.Tensor, file: Path, exporter: str) -> None:
    """Writes a file, with nothing in its metadata but torch's calls."""
    how = (
        {
            "dynamo": False,
            "opset_version": 18,
            "training": torch.onnx.TrainingMode.TRAINING,
            "do_constant_folding": False,
        }
        if exporter == "legacy"
        else {"dynamo": True, "optimize": exporter == "optimized", "external_data": False}
    )
    torch.onnx.export(
        network.train(), (x,), file, input_names=["x"], output_names=["y"], verbose=False, **how
    )
    model = onnx.load(file)
    for holder in (*model.graph.node, *model.graph.input, *model.graph.output):
        holder.doc_string = ""
        kept = [p for p in holder.metadata_props if p.key.endswith("fx_node")]
        del holder.metadata_props[:]
        holder.metadata_props.extend(kept)
    for value in model.graph.value_info:
        del value.metadata_props[:]
    del model.metadata_props[:]
    onnx.save(model, file)


if __name__ == "__main__":
    main()
