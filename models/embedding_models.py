"""Writes the folders of models/embed: a small BERT and a small reranker with random weights, as
Hugging Face and sentence-transformers lay them out, and what PyTorch computes of a few texts.

    pip install torch==2.13.0 transformers==5.24.0 onnx
    python models/embedding_models.py

The vocabulary is that of models/llm/llama. expected.json of `bert` has, for each pooling, the
embeddings of its texts, which only `mean` normalizes; that of `reranker` has scores.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedTokenizerFast,
)

HERE = Path(__file__).parent / "embed"
TEXTS = (
    "The sharding compiler for ONNX.",
    "x",
    "def run(self):\n    return",
    "Größe: many texts of different lengths wait, and are gathered into batches of similar ones.",
    "",
)
QUERY = "What does a compiler do?"
LONGEST = 128
CONFIG: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LONGEST,
    "pad_token_id": 2,
}
POOLING = {
    "word_embedding_dimension": 32,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": True,
    "pooling_mode_max_tokens": False,
}
MODULES = [
    {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
    for i, (path, kind) in enumerate(
        [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    )
]


class Outputs(torch.nn.Module):
    """A network with the inputs of its file, and one output."""

    def __init__(self, network: Any, output: str) -> None:
        super().__init__()
        self.network, self.output = network, output

    def forward(self, ids: Any, mask: Any, types: Any) -> Any:
        """Computes the output."""
        found = self.network(input_ids=ids, attention_mask=mask, token_type_ids=types)
        return getattr(found, self.output)


def write_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Writes llama's tokenizer with the tokens around texts and pairs that BERT has. Its limits,
    which truncate and pad, are those of sentence-transformers' files."""
    tokenizer = Tokenizer.from_file(str(HERE.parent / "llm" / "llama" / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", 0), ("</s>", 1)],
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=LONGEST,
    )
    fast.save_pretrained(folder)
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16, pad_id=2, pad_token="<pad>")
    tokenizer.save(str(folder / "tokenizer.json"))
    return fast


def network_of(kind: Any) -> Any:
    """A network with random weights."""
    torch.manual_seed(0)
    config = BertConfig(**CONFIG, num_labels=1)
    network = kind._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.35)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return network


def export(network: Any, output: str, folder: Path) -> None:
    """Writes model.onnx and config.json."""
    names = ["input_ids", "attention_mask", "token_type_ids"]
    ids = torch.randint(3, 320, (2, 7))
    axes = {name: {0: "batch_size", 1: "sequence_length"} for name in names}
    axes[output] = {0: "batch_size"} | ({1: "sequence_length"} if output != "logits" else {})
    torch.onnx.export(
        Outputs(network, output).eval(),
        (ids, torch.ones_like(ids), torch.zeros_like(ids)),
        str(folder / "model.onnx"),
        input_names=names,
        output_names=[output],
        dynamic_axes=axes,
        opset_version=17,
        dynamo=False,
    )
    config = {**network.config.to_dict(), "architectures": [type(network).__name__]}
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


def pooled(network: Any, given: Mapping[str, Any]) -> dict[str, list[float]]:
    """The embeddings of a text, alone, by each pooling."""
    hidden = network(**given).last_hidden_state[0]
    mean = hidden.mean(0)
    found = {
        "mean": mean / mean.norm(),
        "cls": hidden[0],
        "max": hidden.max(0).values,
        "lasttoken": hidden[-1],
    }
    return {name: value.tolist() for name, value in found.items()}


def write_json(file: Path, value: object) -> None:
    """Writes JSON."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(value, ensure_ascii=False) + "\n")


def new_folder(name: str) -> Path:
    """An empty folder."""
    shutil.rmtree(HERE / name, ignore_errors=True)
    (HERE / name).mkdir(parents=True)
    return HERE / name


def tokens(tokenizer: Any, *texts: str) -> dict[str, Any]:
    """What a network is fed of a text or a pair."""
    found: Sequence[str] = ("input_ids", "attention_mask", "token_type_ids")
    made = tokenizer(*texts, return_tensors="pt", return_token_type_ids=True)
    return {name: made[name] for name in found}


@torch.no_grad()
def main() -> None:
    """Writes both folders."""
    folder, network = new_folder("bert"), network_of(BertModel)
    tokenizer = write_tokenizer(folder)
    export(network, "last_hidden_state", folder)
    write_json(folder / "modules.json", MODULES)
    write_json(folder / "1_Pooling" / "config.json", POOLING)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": LONGEST - 8})
    of_texts = {text: pooled(network, tokens(tokenizer, text)) for text in TEXTS}
    write_json(folder / "expected.json", of_texts)

    folder, network = new_folder("reranker"), network_of(BertForSequenceClassification)
    tokenizer = write_tokenizer(folder)
    export(network, "logits", folder)
    scores = {
        text: network(**tokens(tokenizer, QUERY, text)).logits.sigmoid().item()
        for text in filter(None, TEXTS)  # transformers takes no empty text for one of a pair
    }
    write_json(folder / "expected.json", {"query": QUERY, "scores": scores})


if __name__ == "__main__":
    main()
