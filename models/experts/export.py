"""Writes mixtures of experts as Hugging Face's models are exported, with small random weights.

    python models/experts/export.py loop        # transformers 4.48.3: an expert is a module
    python models/experts/export.py stacked     # transformers 5.23.0: experts are one parameter

Both with torch 2.13.0, onnx 1.23.2 and onnxscript 0.7.2 on a CPU. Every file is compared
with torch.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime as ort
import torch
import transformers as hf
from torch import Tensor, nn

HERE = Path(__file__).parent
SIZES = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "vocab_size": 48,
    "max_position_embeddings": 64,
    "use_cache": False,
}
SCOPE = "/network/model/layers.0/"
BULKY = (  # metadata that is as large as the rest of a small file
    "namespace",
    "pkg.torch.onnx.class_hierarchy",
    "pkg.torch.onnx.fx_node",
    "pkg.torch.onnx.stack_trace",
)


class Logits(nn.Module):
    """A language model as a function of ids."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: Tensor) -> Tensor:
        mask = torch.ones_like(input_ids)
        return self.network(input_ids=input_ids, attention_mask=mask).logits


def network(name: str, way: str | None, **sizes: Any) -> Logits:
    """A model of transformers, whose experts compute in one of its ways."""
    config = getattr(hf, f"{name}Config")(**(SIZES | sizes))
    torch.manual_seed(0)
    made = getattr(hf, f"{name}ForCausalLM")(config).eval()
    for weight in made.parameters():  # so that experts and their choice matter
        if weight.ndim > 1:
            nn.init.normal_(weight, 0, 2 * weight.shape[-1] ** -0.5)
    if way is not None:
        made.config._experts_implementation = way
    return Logits(made)


def export(name: str, model: Logits, exporter: str, is_open: bool = False) -> None:
    """Writes a model, and compares it with torch."""
    ids = torch.arange(48).reshape(4, 12)  # every expert has a token
    path = HERE / f"{name}.onnx"
    sizes = {0: "batch", 1: "seq"}
    if exporter == "dynamo":
        shapes = {axis: torch.export.Dim(size) for axis, size in sizes.items()}
        program = torch.onnx.export(
            model, (ids,), input_names=["input_ids"], output_names=["logits"],
            dynamic_shapes=(shapes,) if is_open else None, dynamo=True, verbose=False,
        )  # fmt: skip
        for node in program.model.graph.all_nodes():
            for key in BULKY:
                node.metadata_props.pop(key, None)
        program.save(path, external_data=False)
    elif exporter == "hf":
        from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

        feeds = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        program = OnnxExporter().export(model.network, feeds, OnnxConfig(dynamic=False)).program
        for node in program.graph.all_nodes():
            for key in BULKY:
                node.metadata_props.pop(key, None)
        onnx_ir.save(program, path)
    else:
        torch.onnx.export(
            model, (ids,), path, input_names=["input_ids"], output_names=["logits"],
            dynamic_axes={"input_ids": sizes} if is_open else None, opset_version=18, dynamo=False,
        )  # fmt: skip
    proto = onnx.load(path)
    del proto.graph.value_info[:]
    shorten(proto)
    onnx.save(proto, path)
    session = ort.InferenceSession(path)
    feeds = {"input_ids": ids.numpy(), "attention_mask": np.ones((4, 12), np.int64)}
    (found,) = session.run(None, {port.name: feeds[port.name] for port in session.get_inputs()})
    with torch.no_grad():
        assert np.abs(found - model(ids).numpy()).max() < 1e-5
    print(path.name, path.stat().st_size)


class Scripted(nn.Module):
    """A mixture as TorchScript compiles it: an If for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.w1 = nn.Parameter(torch.randn(4, 8, 12) / 2)
        self.w2 = nn.Parameter(torch.randn(4, 12, 8) / 2)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(torch.softmax(self.gate(x), -1), 2, -1)
        mask = nn.functional.one_hot(ids, 4).permute(2, 1, 0)
        y = torch.zeros_like(x)
        for expert in range(4):
            pairs = torch.nonzero(mask[expert])
            slot, token = pairs[:, 0], pairs[:, 1]
            if token.numel() > 0:
                rows = torch.relu(x[token] @ self.w1[expert]) @ self.w2[expert]
                y = y.index_add(0, token, rows * weights[token, slot].unsqueeze(-1))
        return y


def export_scripted() -> None:
    """Writes the mixture with an If for each expert."""
    torch.manual_seed(0)
    x = torch.randn(6, 8)
    torch.onnx.export(
        torch.jit.script(Scripted().eval()), (x,), HERE / "mixture.scripted.onnx", dynamo=False,
        input_names=["x"], output_names=["y"], opset_version=18,
    )  # fmt: skip


def shorten(proto: onnx.ModelProto) -> None:
    """Drops the scope of the layer from names, which is half of a file."""
    for node in proto.graph.node:
        node.name = node.name.replace(SCOPE, "/")
        for names in (node.input, node.output):
            names[:] = [name.replace(SCOPE, "/") for name in names]


def main(which: str) -> None:
    if which == "loop":
        mixtral = network("Mixtral", None, num_local_experts=4)
        export("mixtral.loop.dynamo", mixtral, "dynamo", is_open=True)
        export("mixtral.loop.legacy", mixtral, "legacy")
        return
    qwen = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    oss = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    oss |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    export("qwen3_moe.eager.legacy", network("Qwen3Moe", "eager", **qwen), "legacy")
    export("gpt_oss.batched_mm.legacy", network("GptOss", "batched_mm", **oss), "legacy")
    export_scripted()
    batched = network("Qwen3Moe", "batched_mm", **qwen)
    export("qwen3_moe.batched_mm.dynamo", batched, "dynamo", is_open=True)
    export("qwen3_moe.grouped_mm.hf", network("Qwen3Moe", "grouped_mm", **qwen), "hf")


if __name__ == "__main__":
    with torch.no_grad():
        main(sys.argv[1])
