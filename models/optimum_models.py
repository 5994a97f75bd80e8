"""Writes models/llm/gpt2_optimum: a small GPT-2 with random weights, as Hugging Face Optimum writes
it, and the tokens that PyTorch generates.

    pip install 'onnxpar[optimum]'
    python models/optimum_models.py

The tokenizer is that of models/llm/llama.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from optimum.exporters.onnx import onnx_export_from_model
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

HERE = Path(__file__).parent / "llm"
PROMPTS = ("The sharding compiler for ONNX.", "def run(self):\n    return", "x")
NEW = 128


def main() -> None:
    """Writes the folder."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=320,
        n_positions=512,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=1,
    )
    network = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.35)
    folder = HERE / "gpt2_optimum"
    shutil.rmtree(folder, ignore_errors=True)
    onnx_export_from_model(network, folder, task="text-generation-with-past", do_validation=False)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(HERE / "llama")
    tokenizer.save_pretrained(folder)
    tokens = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        mask = torch.ones_like(ids)
        options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
        tokens[prompt] = network.generate(ids, **options)[0, ids.shape[1] :].tolist()
    (folder / "expected.json").write_text(json.dumps(tokens) + "\n")


if __name__ == "__main__":
    main()
