"""Writes small networks with `nn.EmbeddingBag`, as PyTorch's two exporters do (torch 2.13).

    python models/bags/export.py

`equal` has bags of one size: a weighted sum, a mean and a maximum. `offsets` has a weighted sum and
a mean over bags that begin at offsets. `padded` is like `equal`, without weights, and an id does
not count; `uneven` has a maximum, and a mean with such an id, over bags that begin at offsets. The
legacy exporter does not know such ids.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import torch
from torch import nn

HERE = Path(__file__).parent


class Equal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, 6, mode=mode)
            for rows, mode in ((23, "sum"), (17, "mean"), (11, "max"))
        )
        self.top = nn.Linear(18, 2)

    def forward(self, a, b, c, weights):  # type: ignore[no-untyped-def]
        sums, means, most = self.tables
        bags = [sums(a, per_sample_weights=weights), means(b), most(c)]
        return self.top(torch.cat(bags, 1))


class Offsets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, 6, mode=mode) for rows, mode in ((23, "sum"), (17, "mean"))
        )
        self.top = nn.Linear(12, 2)

    def forward(self, a, b, starts, weights):  # type: ignore[no-untyped-def]
        sums, means = self.tables
        bags = [sums(a, starts, per_sample_weights=weights), means(b, starts)]
        return self.top(torch.cat(bags, 1))


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, 6, mode=mode, padding_idx=2)
            for rows, mode in ((23, "sum"), (17, "mean"), (11, "max"))
        )
        self.top = nn.Linear(18, 2)

    def forward(self, a, b, c):  # type: ignore[no-untyped-def]
        sums, means, most = self.tables
        return self.top(torch.cat([sums(a), means(b), most(c)], 1))


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            [
                nn.EmbeddingBag(23, 6, mode="max"),
                nn.EmbeddingBag(17, 6, mode="mean", padding_idx=2),
            ]
        )
        self.top = nn.Linear(12, 2)

    def forward(self, a, b, starts):  # type: ignore[no-untyped-def]
        most, means = self.tables
        return self.top(torch.cat([most(a, starts), means(b, starts)], 1))


def main() -> None:
    torch.manual_seed(0)
    ids = [torch.randint(0, rows, (4, 3)) for rows in (23, 17, 11)]
    flat = [torch.randint(0, rows, (10,)) for rows in (23, 17)]
    starts = torch.tensor([0, 3, 3, 7])
    networks = {
        "equal": (Equal(), (*ids, torch.rand(4, 3)), ["a", "b", "c", "weights"]),
        "offsets": (Offsets(), (*flat, starts, torch.rand(10)), ["a", "b", "starts", "weights"]),
        "padded": (Padded(), tuple(ids), ["a", "b", "c"]),
        "uneven": (Uneven(), (*flat, starts), ["a", "b", "starts"]),
    }
    for name, (network, arguments, inputs) in networks.items():
        for exporter in ("legacy", "dynamo") if name in ("equal", "offsets") else ("dynamo",):
            file = HERE / f"{name}.{exporter}.onnx"
            is_new = exporter == "dynamo"
            how = {} if is_new else {"opset_version": 17}
            torch.onnx.export(
                network.eval(), arguments, file, input_names=inputs, dynamo=is_new, **how,
                **({"external_data": False} if is_new else {}),
            )  # fmt: skip
            onnx.save(slim(onnx.load(file)), file)


def slim(model: onnx.ModelProto) -> onnx.ModelProto:
    """Leaves out where nodes come from."""

    def strip(graph: onnx.GraphProto) -> None:
        del graph.metadata_props[:]
        for one in (*graph.node, *graph.input, *graph.output, *graph.value_info):
            one.doc_string = ""
            del one.metadata_props[:]
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    strip(attribute.g)

    strip(model.graph)
    del model.metadata_props[:]
    return model


if __name__ == "__main__":
    main()
