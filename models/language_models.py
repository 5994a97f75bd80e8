"""Writes the folders of models/llm: small language models with random weights, as
onnxruntime-genai's builder writes them, and the tokens that onnxruntime-genai generates.

    pip install torch==2.13.0 transformers==5.24.0 onnxruntime-genai==0.18.0
    python models/language_models.py [NAME ...]

Weights are so large that the likeliest token is seldom close to the next one.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import onnxruntime_genai as genai
import torch
from onnxruntime_genai.models.builder import create_model, parse_extra_options
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

HERE = Path(__file__).parent / "llm"
COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
HEADS = {"head_dim": 16}
CONFIGS = {
    "llama": (LlamaConfig(**COMMON, **HEADS, tie_word_embeddings=True), "fp32"),
    "llama_int4": (LlamaConfig(**COMMON, **HEADS), "int4"),
    "qwen3": (Qwen3Config(**COMMON, **HEADS), "fp32"),
    "phi3": (
        Phi3Config(**COMMON | {"hidden_size": 64}, original_max_position_embeddings=512),
        "fp32",
    ),
    "gemma2": (
        Gemma2Config(**COMMON, **HEADS, sliding_window=16, query_pre_attn_scalar=16),
        "fp32",
    ),
    "gpt_oss": (
        GptOssConfig(**COMMON, **HEADS, num_local_experts=4, sliding_window=16),
        "fp32",
    ),
    "mistral": (MistralConfig(**COMMON, **HEADS, sliding_window=None), "fp32"),
}
"""Configuration and precision of each folder."""
PROMPTS = ("The sharding compiler for ONNX.", "def run(self):\n    return", "x")
NEW = 128
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """Writes a byte-level tokenizer that was trained on this file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=COMMON["vocab_size"],
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(Path(__file__).read_text().splitlines(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def write(name: str) -> None:
    """Writes one folder."""
    config, precision = CONFIGS[name]
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.35)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as source, tempfile.TemporaryDirectory() as cache:
        network.save_pretrained(source)
        write_tokenizer(Path(source))
        given = (None, source, str(folder), precision, "cpu", cache)
        create_model(*given, **parse_extra_options(*given, []))
    tokens = {prompt: generated(folder, prompt) for prompt in PROMPTS}
    (folder / "expected.json").write_text(json.dumps(tokens) + "\n")


def generated(folder: Path, prompt: str) -> list[int]:
    """The tokens that onnxruntime-genai generates."""
    model = genai.Model(str(folder))
    ids = genai.Tokenizer(model).encode(prompt)
    params = genai.GeneratorParams(model)
    params.set_search_options(max_length=len(ids) + NEW, do_sample=False)
    generator = genai.Generator(model, params)
    generator.append_tokens(ids)
    tokens = []
    while not generator.is_done():
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
    return tokens


if __name__ == "__main__":
    for each in sys.argv[1:] or CONFIGS:
        write(each)
