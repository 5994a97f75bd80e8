"""Optimum's models take a sharded session for onnxruntime's: the same tokens, the same classes.

Needs the extra `optimum`; the models are made and exported here, offline.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

pytest.importorskip("optimum.onnxruntime")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from optimum.exporters.onnx import onnx_export_from_model
from optimum.onnxruntime import ORTModelForCausalLM, ORTModelForSequenceClassification
from transformers import (
    AutoConfig,
    BertConfig,
    BertForSequenceClassification,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import onnxpar
from onnxpar.cli.command_line import main

ENDS = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 1}


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=64, **ENDS))


def llama() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ENDS))


def bert() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 128, "num_labels": 3}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    return BertForSequenceClassification(BertConfig(**sizes, **heads))


def exported(model: Any, folder: Path, task: str) -> Path:
    torch.manual_seed(0)
    onnx_export_from_model(model().eval(), folder, task=task, do_validation=False, opset=17)
    return folder / "model.onnx"


@pytest.fixture(scope="module", params=[gpt2, llama])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param.__name__)
    return exported(request.param, folder, "text-generation-with-past")


@pytest.fixture(scope="module")
def session(decoder: Path) -> Iterator[onnxpar.InferenceSession]:
    par = decoder.with_suffix(".par")
    plan = onnxpar.shard(decoder, par, devices=2, preset="tensor-parallel")
    assert plan.collectives and len(plan.states) == 4
    with onnxpar.InferenceSession(par) as opened:
        yield opened


def causal(decoder: Path, session: Any, use_io_binding: bool) -> Any:
    config = AutoConfig.from_pretrained(decoder.parent)
    generation = GenerationConfig.from_pretrained(decoder.parent)
    return ORTModelForCausalLM(
        config=config,
        session=session,
        generation_config=generation,
        use_io_binding=use_io_binding,
    )


WAYS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.0},
    "beams": {"do_sample": False, "num_beams": 3},
}


@pytest.mark.parametrize("use_io_binding", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_generate(
    way: str, use_io_binding: bool, decoder: Path, session: onnxpar.InferenceSession
) -> None:
    ids = torch.tensor([[5, 17, 99, 3, 42], [7, 7, 8, 9, 10]])
    found = []
    for each in (ort.InferenceSession(decoder), session):
        model = causal(decoder, each, use_io_binding)
        torch.manual_seed(1)
        mask = torch.ones_like(ids)
        length = {"max_new_tokens": 12, "pad_token_id": 1}
        found.append(model.generate(ids, attention_mask=mask, **length, **WAYS[way]))
    assert torch.equal(*found) and found[0].shape[1] > ids.shape[1]


def saved_llama(folder: Path) -> None:
    llama().save_pretrained(folder)


def saved_t5(folder: Path) -> None:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = T5Config(**sizes, vocab_size=128, decoder_start_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(folder)


def saved_bert(folder: Path) -> None:
    bert().save_pretrained(folder)


@pytest.mark.parametrize("save", [saved_llama, saved_t5, saved_bert])
def test_folders_of_transformers(
    save: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They are exported when they are first used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    save(Path("small-1.5"))
    devices = ["small-1.5", "--devices", "2", "--preset", "tensor-parallel"]
    assert main(["shard", *devices]) == 0
    assert "exporting small-1.5" in capsys.readouterr().err
    assert main(["check", *devices]) == 0
    told = capsys.readouterr()
    assert "all outputs agree" in told.out and "exporting" not in told.err
    assert Path("small-1.5.par", "plan.json").is_file()


def test_classes(tmp_path: Path) -> None:
    model = exported(bert, tmp_path, "text-classification")
    par = tmp_path / "model.par"
    assert onnxpar.shard(model, par, devices=2, preset="tensor-parallel").collectives
    config = AutoConfig.from_pretrained(tmp_path)
    ids = torch.randint(2, 128, (3, 7))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["token_type_ids"] = torch.zeros_like(ids)
    with onnxpar.InferenceSession(par) as session:
        mine, other = (
            ORTModelForSequenceClassification(config=config, session=each)(**inputs).logits
            for each in (session, ort.InferenceSession(model))
        )
    assert mine.shape == (3, 3)
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
