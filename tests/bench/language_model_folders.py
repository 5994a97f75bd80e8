"""Language models of usual shapes with random weights, as onnxruntime-genai's builder writes them.

    python tests/bench/language_model_folders.py SHAPE DTYPE FOLDER

As a program it needs torch, transformers and onnxruntime-genai; bench_language_models.py calls it
with the Python that has them.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONTEXT = 2048
SPREAD, SHARE = 1.5, 0.2
"""Standard deviation of what a product makes of numbers around one, and of what a layer adds, as a
share of it: so little that roundings do not grow from layer to layer."""
SPECIAL = ("<s>", "</s>", "<pad>")
"""Their ids are 0, 1 and 2. They are never the likeliest token, so that no text ends."""
WHOLE, LAST = "whole", "last"
"""Folders of the same model: with logits of all tokens, or of the last token alone. onnxpar takes
the first, and computes logits where it needs them; other systems would compute them for all tokens
of a prompt, which takes long, and gigabytes for a batch."""
OPTIONS = {WHOLE: [], LAST: ["prune_lm_head=true"]}


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama."""

    layers: int
    width: int
    hidden: int
    heads: int
    key_heads: int
    vocabulary: int = 32000
    is_tied: bool = False

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of so many tokens, in float32."""
        return 2 * 4 * self.layers * self.key_heads * (self.width // self.heads) * tokens


SHAPES = {
    "0.2B": Shape(12, 1024, 2816, 16, 4),
    "0.5B": Shape(24, 896, 4864, 14, 2, 151936, is_tied=True),  # Qwen2.5-0.5B
    "1.1B": Shape(22, 2048, 5632, 32, 4),  # TinyLlama
}


def network(shape: Shape) -> Any:
    """A Llama of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.width,
            intermediate_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.key_heads,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=shape.is_tied,
            **{f"{name}_token_id": i for i, name in enumerate(("bos", "eos", "pad"))},
        )
    )
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim > 1:
                spread = SPREAD * parameter.shape[1] ** -0.5
                adds = "o_proj" in name or "down_proj" in name
                parameter.normal_(0, spread * SHARE if adds else spread)
        made.get_input_embeddings().weight.mul_(shape.width**0.5)
        made.lm_head.weight[: len(SPECIAL)] = 0
    return made


def write(shape: Shape, dtype: str, folder: Path) -> None:
    """Writes both folders of a model."""
    from onnxruntime_genai.models.builder import create_model, parse_extra_options

    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        source, built = Path(name) / "source", Path(name) / "built"
        network(shape).save_pretrained(source)
        write_tokenizer(source)
        for part, options in OPTIONS.items():
            blocks = ["block_size=32"] if dtype == "int4" else []
            given = (None, str(source), str(built / part), dtype, "cpu", f"{name}/cache")
            create_model(*given, **parse_extra_options(*given, [*options, *blocks]))
        built.rename(folder)


def write_tokenizer(folder: Path) -> None:
    """Writes the smallest tokenizer that the builder takes; prompts are token ids."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(SPECIAL)}, []))
    named = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)


if __name__ == "__main__":
    write(SHAPES[sys.argv[1]], sys.argv[2], Path(sys.argv[3]))
