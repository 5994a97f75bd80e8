"""Writes models/llm/t5, bart and whisper: small encoder-decoders with random weights, as Hugging
Face Optimum writes them, and the tokens that PyTorch generates.

    pip install 'onnxpar[optimum]'
    python models/encoder_decoder_models.py [NAME ...]

T5 has a file for the first step and one for the others, BART and Whisper have one for both. The
tokenizers are that of models/llm/llama with other special tokens. The prompts of Whisper are
sounds (`sound`), of which expected.json also has a part of the features.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from optimum.exporters.onnx import onnx_export_from_model
from tokenizers import Tokenizer, processors
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

HERE = Path(__file__).parent / "llm"
PROMPTS = (
    "The sharding compiler for ONNX.",
    "def run(self):\n    return",
    "x",
    "Many texts of different lengths are read together, and each one has its own mask.",
)
NEW = 96
SPECIALS = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|transcribe|>")
SPECIALS += ("<|translate|>", "<|startofprev|>", "<|notimestamps|>")
"""Whisper's, with the ids behind those of the other tokens."""
END, START, ENGLISH, GERMAN, TRANSCRIBE, TRANSLATE, BEFORE, UNTIMED = range(320, 328)
SECONDS = 2
"""The length of Whisper's windows."""
RATE = 16000


def write_tokenizer(folder: Path, ends: bool, specials: tuple[str, ...] = ()) -> Any:
    """Writes llama's tokenizer, which ends each text by a token where `ends`."""
    tokenizer = Tokenizer.from_file(str(HERE / "llama" / "tokenizer.json"))
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", 1)]
        )
    tokenizer.add_special_tokens(list(specials))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token=specials[0] if specials else "</s>",
        pad_token="<pad>",
    )
    fast.save_pretrained(folder)
    return fast


def randomize(network: Any, scale: float) -> Any:
    """Gives a network weights with which the likeliest token is seldom close to the next one."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, scale)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    network.tie_weights()
    return network.eval()


LAYERS: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
"""What BART and Whisper have in common."""


def t5() -> Any:
    """A T5."""
    config = T5Config(
        tie_word_embeddings=False,
        vocab_size=320,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=2,
        pad_token_id=2,
        eos_token_id=1,
    )
    return randomize(T5ForConditionalGeneration(config), 0.35)


def bart() -> Any:
    """A BART, whose configuration forces the first and the last token, as those of summarizers do,
    and forbids others."""
    config = BartConfig(
        tie_word_embeddings=False,
        vocab_size=320,
        **LAYERS,
        max_position_embeddings=256,
        scale_embedding=True,
        decoder_start_token_id=1,
        forced_bos_token_id=0,
        forced_eos_token_id=1,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    network = randomize(BartForConditionalGeneration(config), 0.35)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "encoder_attn" in name and parameter.ndim > 1:
                parameter.mul_(3)  # so that the prompt counts
    settings = network.generation_config
    settings.no_repeat_ngram_size, settings.min_length = 2, 40
    settings.bad_words_ids = [[178], [14, 15]]
    return network


def whisper() -> Any:
    """A Whisper of windows of two seconds."""
    config = WhisperConfig(
        tie_word_embeddings=False,
        vocab_size=328,
        num_mel_bins=80,
        **LAYERS,
        max_source_positions=50 * SECONDS,
        max_target_positions=160,
        decoder_start_token_id=START,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    network = randomize(WhisperForConditionalGeneration(config), 0.35)
    network.generation_config = GenerationConfig(
        decoder_start_token_id=START,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
        prev_sot_token_id=BEFORE,
        no_timestamps_token_id=UNTIMED,
        is_multilingual=True,
        lang_to_id={"<|en|>": ENGLISH, "<|de|>": GERMAN},
        task_to_id={"transcribe": TRANSCRIBE, "translate": TRANSLATE},
        suppress_tokens=[0, 1, 2, 30, 31, START, TRANSCRIBE, TRANSLATE, BEFORE],
        begin_suppress_tokens=[40, END],
        max_length=160,
        return_timestamps=False,
    )
    return network


def sound(seed: int, seconds: float) -> Any:
    """Tones that come and go, in noise; of 16-bit samples."""
    random = np.random.default_rng(seed)
    at = np.arange(int(RATE * seconds)) / RATE
    found = 0.05 * random.standard_normal(len(at))
    for _ in range(6):
        pitch, start, length = random.uniform(80, 4000), random.uniform(0, seconds), 0.4
        found += 0.2 * np.sin(2 * np.pi * pitch * at) * (abs(at - start) < length)
    return np.round(found.clip(-1, 1) * 32767).astype(np.int16)


def export(
    network: Any, folder: Path, task: str, leave_out: tuple[str, ...], **shapes: int
) -> None:
    """Writes what Optimum writes of a network, but some files."""
    shutil.rmtree(folder, ignore_errors=True)
    onnx_export_from_model(network, folder, task=task, do_validation=False, **shapes)
    for name in leave_out:
        (folder / name).unlink()


@torch.no_grad()
def write_text(name: str, network: Any, leave_out: tuple[str, ...]) -> None:
    """Writes a folder of a model that reads text."""
    folder = HERE / name
    tokenizer = write_tokenizer(folder, ends=True)
    tokens = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW}
        found = network.generate(ids, do_sample=False, num_beams=1, **options)
        tokens[prompt] = found[0, 1:].tolist()
    export(network, folder, "text2text-generation-with-past", leave_out)
    write_tokenizer(folder, ends=True)
    (folder / "expected.json").write_text(json.dumps(tokens) + "\n")


@torch.no_grad()
def write_whisper() -> None:
    """Writes the folder of Whisper. Keys of `tokens` are language and task, as far as given."""
    network, folder = whisper(), HERE / "whisper"
    extractor = WhisperFeatureExtractor(chunk_length=SECONDS)
    sounds = [sound(seed, seconds) / 32768 for seed, seconds in ((0, 2), (1, 1.3), (2, 0.4))]
    made: dict[str, Any] = {"features": [], "tokens": {}}
    given = [extractor(s, sampling_rate=RATE, return_tensors="pt").input_features for s in sounds]
    made["features"] = [f[0, ::8, ::20].double().numpy().round(6).tolist() for f in given]
    for options in ({}, {"language": "de"}, {"language": "en", "task": "translate"}):
        key = " ".join(options.values())
        made["tokens"][key] = [
            network.generate(f, max_new_tokens=NEW, do_sample=False, **options)[0].tolist()
            for f in given
        ]
    task = "automatic-speech-recognition-with-past"
    leave_out = ("decoder_model.onnx", "decoder_with_past_model.onnx")
    export(network, folder, task, leave_out, nb_max_frames=100 * SECONDS)
    write_tokenizer(folder, ends=False, specials=SPECIALS)
    extractor.save_pretrained(folder)
    (folder / "expected.json").write_text(json.dumps(made) + "\n")


def main(names: list[str]) -> None:
    """Writes folders."""
    if "t5" in names:
        write_text("t5", t5(), ("decoder_model_merged.onnx",))
    if "bart" in names:
        write_text("bart", bart(), ("decoder_model.onnx", "decoder_with_past_model.onnx"))
    if "whisper" in names:
        write_whisper()


if __name__ == "__main__":
    main(sys.argv[1:] or ["t5", "bart", "whisper"])
