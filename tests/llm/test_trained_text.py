"""The language model that onnxpar has trained on this project's pages (models/docs_llama.py) writes
what PyTorch writes with the same weights: sentences."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import numpy as np
import pytest
from committed import MODELS
from sharded import sharded

from onnxpar.llm.generator import Generator

FOLDER = MODELS / "llm" / "docs_llama"
EXPECTED: dict[str, list[int]] = json.loads((FOLDER / "expected.json").read_bytes())
NEW = 128


@pytest.fixture(scope="module")
def generator() -> Iterator[Generator]:
    with Generator(sharded(FOLDER, devices=2, preset="tensor-parallel"), timeout=30) as made:
        yield made


def test_two_ranks_write_what_torch_writes(generator: Generator) -> None:
    found = generator.generate(list(EXPECTED), max_new_tokens=NEW)
    assert [each.tokens for each in found] == list(EXPECTED.values())


def test_it_has_learned_to_write(generator: Generator) -> None:
    """Of a random model, a token has the probability 1 / 1536."""
    for prompt in EXPECTED:
        (found,) = generator.generate(prompt, max_new_tokens=32)
        assert np.exp(np.mean(found.logprobs)) > 0.2, found.text
        assert len(re.findall(r"\b[a-z]{2,}\b", found.text)) > 8, found.text


def test_an_answer_to_a_chat_ends_by_itself_or_before_a_stop_string(generator: Generator) -> None:
    chat = [{"role": "user", "content": "Checkpoints"}]  # a heading of a page
    (whole,) = generator.generate(chat, max_new_tokens=NEW)
    (same,) = generator.generate("## Checkpoints\n\n", max_new_tokens=NEW)
    assert whole.text == same.text and "</s>" not in whole.text
    sentence, rest = whole.text.split(". ", 1)
    (cut,) = generator.generate(chat, max_new_tokens=NEW, stop_strings=". ")
    assert cut.text == sentence and cut.reason == "stop" and rest
