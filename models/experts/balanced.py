"""Writes a mixture that learns to balance its experts, and what torch makes of it in a few steps.

    python models/experts/balanced.py

The model is a Mixtral of transformers 5.23.0 in training; its loss is cross-entropy plus
`router_aux_loss_coef` times the load-balancing loss of Switch Transformers, which is also an
output. Exported by torch 2.13.0 on a CPU. The file .npz has a batch, the losses before each step of
gradient descent, and the gradients of the first, computed by torch in float64.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
import transformers as hf
from export import SIZES
from torch import Tensor, nn

NAME = "mixtral.balanced.training"
HERE = Path(__file__).parent
STEPS, RATE = 5, 0.03
COEFFICIENT = 0.5
"""Large, so that a wrong gradient of the balancing loss would be seen."""


class Balanced(nn.Module):
    """The loss of a language model as a function of ids and of the tokens that follow."""

    def __init__(self) -> None:
        super().__init__()
        sizes = SIZES | {"num_local_experts": 4, "router_aux_loss_coef": COEFFICIENT}
        config = hf.MixtralConfig(**(sizes | {"num_hidden_layers": 2}), output_router_logits=True)
        torch.manual_seed(0)
        self.network = hf.MixtralForCausalLM(config)
        for weight in self.network.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, 0, weight.shape[-1] ** -0.5)
        self.network.config._experts_implementation = "batched_mm"

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        made = self.network(input_ids=input_ids, attention_mask=torch.ones_like(input_ids))
        loss = nn.functional.cross_entropy(made.logits.flatten(0, 1), labels.flatten())
        return loss + COEFFICIENT * made.aux_loss, made.aux_loss


def descend(model: Balanced, feeds: dict[str, Tensor]) -> dict[str, Any]:
    """Takes steps of gradient descent; returns losses and the first gradients."""
    model = model.double()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    told: dict[str, Any] = {"losses": [], "balancing": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, balancing = model(**feeds)
        loss.backward()
        if step == 0:
            grads = {f"gradient.{n}": p.grad.numpy().copy() for n, p in model.named_parameters()}
            told |= grads
        optimizer.step()
        told["losses"].append(loss.item())
        told["balancing"].append(balancing.item())
    return told


def main() -> None:
    model = Balanced()
    ids = torch.randint(48, (4, 6), generator=torch.Generator().manual_seed(1))
    feeds = {"input_ids": ids, "labels": ids.roll(-1, 1)}
    path = HERE / f"{NAME}.onnx"
    torch.onnx.export(
        model, tuple(feeds.values()), path, input_names=list(feeds), opset_version=18,
        output_names=["loss", "balancing"], dynamo=False, do_constant_folding=False,
        training=torch.onnx.TrainingMode.TRAINING,
    )  # fmt: skip
    proto = onnx.load(path)
    del proto.graph.value_info[:]
    onnx.save(proto, path)
    arrays = {name: value.numpy() for name, value in feeds.items()}
    found = ort.InferenceSession(path).run(None, arrays)
    with torch.no_grad():
        assert np.allclose(found, [value.numpy() for value in model(**feeds)], rtol=1e-6)
    told = descend(model, feeds)
    kept = {k: np.float32(v) for k, v in told.items()} | {f"feed.{k}": v for k, v in arrays.items()}
    np.savez_compressed(HERE / f"{NAME}.npz", **kept, rate=RATE)
    print(told["losses"], told["balancing"])
    print(path.stat().st_size, (HERE / f"{NAME}.npz").stat().st_size)


if __name__ == "__main__":
    main()
