"""Trains models/llm/docs_llama with onnxpar: a Llama of 1.4 million parameters that has read this
project's own pages and docstrings (docs_text.py).

    pip install -e '.[torch,llm]' safetensors
    python models/docs_llama.py train         # over 2 ranks, in the folder build/docs_llama
    pip install onnxruntime-genai==0.18.0
    python models/docs_llama.py write         # models/llm/docs_llama, as language_models.py does

`train` makes the text, a tokenizer, and steps in ONNX; onnxpar trains them, and evaluates them on
the sections that are held out. torch only exports the network and draws its first weights. `write`
has torch evaluate the trained weights, too, and onnxruntime-genai's builder write the folder.

All text comes first, and its loss falls for the text that is held out, too. Then come the pages
alone, so often that the model knows them by heart: a model this small has sentences to say only if
they are not its own.
"""

from __future__ import annotations

import csv
import json
import math
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docs_text
import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from onnxpar.trainer.loss_curve import figure_of

HERE = Path(__file__).parent
FOLDER = HERE / "llm" / "docs_llama"
BUILD = HERE.parent / "build" / "docs_llama"
CURVE = HERE / "docs_llama.csv"
PICTURE = HERE.parent / "docs" / "images" / "docs-llama.svg"
LENGTH = 256
BATCH = 8
RANKS = 2
WARMUP = 100
SHOWN = 25
"""The curve has a mean over as many steps."""


@dataclass(frozen=True)
class Stage:
    """A run of training: its text, how far windows are apart, what is dropped, and the rate."""

    name: str
    of_pages: bool
    apart: int
    dropped: float
    epochs: int
    rate: float


STAGES = (
    Stage("all", of_pages=False, apart=LENGTH // 2, dropped=0.1, epochs=8, rate=2e-3),
    Stage("pages", of_pages=True, apart=1, dropped=0, epochs=8, rate=3e-3),
)
CONFIG = LlamaConfig(
    vocab_size=docs_text.VOCABULARY,
    hidden_size=160,
    intermediate_size=416,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=32,
    max_position_embeddings=LENGTH,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=docs_text.END,
    pad_token_id=2,
)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}## {{ m.content }}\n\n"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
"""A chat asks for sections: a message is a heading, and the answer what stands below it."""
PROMPTS = (
    "A sharded model",
    "The search",
    "If a rank dies,",
    "## Checkpoints\n\n",
    "A partial sum",  # no text begins so: the model makes up words of its own
)
NEW = 128
CLEAR = 1e-3
"""How far the likeliest token's logit is above the next one, so that rounding chooses none."""
TOLERANCE = 1e-4
"""Between losses of onnxpar and of torch."""


def run(folder: Path, *command: str | Path) -> None:
    """Runs a command in a folder."""
    print("$", *command, flush=True)
    subprocess.run([str(word) for word in command], cwd=folder, check=True)


class Logits(torch.nn.Module):
    """The network as the exporter wants it: token ids in, logits out. Llama has no dropout of its
    own: a part of what each branch adds is left out here."""

    def __init__(self, dropped: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        options: dict[str, Any] = {"attn_implementation": "eager"}
        self.network = LlamaForCausalLM._from_config(CONFIG, **options)

        def drop(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(output, dropped, training=True)

        for layer in self.network.model.layers if dropped else ():
            for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
                module.register_forward_hook(drop)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.network(input_ids=input_ids, use_cache=False).logits


def parted() -> tuple[list[str], list[str]]:
    """The sections for training, and those that are held out."""
    texts = docs_text.sections()
    held_out = [text for text in texts if docs_text.is_held_out(text)]
    return [text for text in texts if not docs_text.is_held_out(text)], held_out


def train() -> None:
    """Writes texts, steps, checkpoints and weights to BUILD, and the curve of the loss."""
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    texts, held_out = parted()
    tokenizer = docs_text.tokenizer_of(texts)
    tokenizer.save(str(BUILD / "tokenizer.json"))
    tokens = docs_text.paragraphs(tokenizer, held_out)
    np.savez(BUILD / "eval.npz", **docs_text.windows_side_by_side(tokens, LENGTH))
    for before, stage in zip((None, *STAGES), STAGES, strict=False):
        learn(stage, texts, tokenizer, before)
    write_curve()


def learn(stage: Stage, texts: list[str], tokenizer: Tokenizer, before: Stage | None) -> None:
    """Runs a stage in a folder of its name, from the weights of the one before."""
    folder = BUILD / stage.name
    folder.mkdir()
    parts = [text for text in texts if docs_text.is_of_pages(text) or not stage.of_pages]
    tokens = docs_text.paragraphs(tokenizer, parts)
    np.savez(folder / "train.npz", **docs_text.windows_at_paragraphs(tokens, LENGTH, stage.apart))
    torch.onnx.export(
        Logits(stage.dropped),
        (torch.zeros((BATCH, LENGTH), dtype=torch.int64),),
        folder / "network.onnx",
        input_names=["input_ids"],
        output_names=["logits"],
        dynamo=True,
        optimize=False,
        external_data=False,
        verbose=False,
    )
    run(
        folder,
        *("onnxpar", "grad", "network.onnx", "--loss", "softmax-cross-entropy"),
        *("--optimizer", "adamw", "--weight-decay", "0.1", "--beta2", "0.95"),
        *("--clip-norm", "1", "-o", "step.onnx"),
        *(("--weights", BUILD / before.name / "weights") if before else ()),
    )
    run(
        folder,
        *("onnxpar", "shard", "step.onnx", "--devices", str(RANKS)),
        *("--preset", "zero2", "-o", "step.par"),
    )
    run(
        folder,
        *("onnxpar", "train", "step.par", "--data", "train.npz", "--eval", "../eval.npz"),
        *("--epochs", str(stage.epochs), "--lr", str(stage.rate), "--schedule", "cosine"),
        *("--warmup", str(WARMUP), "--min-lr", str(stage.rate / 20)),
        *("--checkpoint", "run", "--keep", "1"),
    )
    run(folder, "onnxpar", "checkpoint", "weights", "run", "-o", "weights")


def metrics(stage: Stage) -> list[dict[str, float]]:
    """What onnxpar has written of each step and each evaluation of a stage."""
    return [json.loads(line) for line in (BUILD / stage.name / "log/metrics.jsonl").open()]


def write_curve() -> None:
    """Writes the loss of steps, in means, and of evaluations, to CURVE and PICTURE."""
    shown: list[dict[str, float]] = []
    begin = 0
    for stage in STAGES:
        losses = [row["loss"] for row in metrics(stage) if "loss" in row]
        for end in range(SHOWN, len(losses) + 1, SHOWN):
            mean = round(float(np.mean(losses[end - SHOWN : end])), 4)
            shown.append({"step": begin + end, "loss": mean})
        evaluated = [row["eval_loss"] for row in metrics(stage) if "eval_loss" in row]
        for epoch, loss in enumerate(evaluated, 1):
            step = begin + epoch * len(losses) // stage.epochs
            shown.append({"step": step, "eval_loss": round(loss, 4)})
        begin += len(losses)
    shown.sort(key=lambda row: row["step"])
    with CURVE.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", "loss", "eval_loss"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(shown)
    figure_of(shown).savefig(PICTURE, metadata={"Date": None})


def trained() -> LlamaForCausalLM:
    """The network in torch, with the weights that onnxpar trained."""
    network = LlamaForCausalLM(CONFIG).eval()
    files = sorted((BUILD / STAGES[-1].name / "weights").glob("*.safetensors"))
    weights = {k: v for file in files for k, v in load_file(file).items()}
    weights = {name.removeprefix("network."): value for name, value in weights.items()}
    missing, unexpected = network.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    network.tie_weights()
    return network


def torch_loss(network: LlamaForCausalLM) -> float:
    """The loss per token of the text that is held out, by torch."""
    data = np.load(BUILD / "eval.npz")
    ids, labels = (torch.from_numpy(data[name]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        logits = network(input_ids=ids).logits.flatten(0, 1).double()
    return float(torch.nn.functional.cross_entropy(logits, labels.flatten()))


def continued(network: LlamaForCausalLM, ids: list[int]) -> list[int]:
    """The likeliest tokens after those given, by torch."""
    made = network.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones((1, len(ids)), dtype=torch.int64),
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    top = torch.stack(made.logits).topk(2).values
    gap = float((top[..., 0] - top[..., 1]).min())
    assert gap > CLEAR, f"two tokens are about as likely: {gap:.1e}"
    tokens: list[int] = made.sequences[0, len(ids) :].tolist()
    return tokens


def write() -> None:
    """Writes FOLDER from what `train` left in BUILD."""
    from onnxruntime_genai.models.builder import create_model, parse_extra_options

    network = trained()
    evaluated = [row["eval_loss"] for row in metrics(STAGES[-1]) if "eval_loss" in row]
    reported, found = evaluated[-1], torch_loss(network)
    assert abs(reported - found) < TOLERANCE, (reported, found)
    tokenizer = Tokenizer.from_file(str(BUILD / "tokenizer.json"))
    _, held_out = parted()
    tokens = sum(map(len, docs_text.paragraphs(tokenizer, held_out))) - 1
    size = sum(len(text.encode()) for text in held_out)
    bits = found * tokens / size / math.log(2)
    print(f"held out, per token: {found:.4f} by torch, {reported:.4f} by onnxpar")
    print(f"in bits per byte: {bits:.3f}")
    shutil.rmtree(FOLDER, ignore_errors=True)
    with tempfile.TemporaryDirectory() as source, tempfile.TemporaryDirectory() as cache:
        network.save_pretrained(source)
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
        )
        fast.chat_template = TEMPLATE
        fast.save_pretrained(source)
        given = (None, source, str(FOLDER), "fp32", "cpu", cache)
        create_model(*given, **parse_extra_options(*given, []))
    made = {prompt: continued(network, tokenizer.encode(prompt).ids) for prompt in PROMPTS}
    (FOLDER / "expected.json").write_text(json.dumps(made) + "\n")
    for prompt, each in made.items():
        print("---", prompt + tokenizer.decode(each, skip_special_tokens=False), sep="\n")


if __name__ == "__main__":
    for name in sys.argv[1:] or ("train", "write"):
        {"train": train, "write": write}[name]()
