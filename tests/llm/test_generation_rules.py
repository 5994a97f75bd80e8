"""Tokens that a configuration forces or forbids, and the tokens with which texts begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from onnxpar.base.errors import InputError, ModelError
from onnxpar.llm.decoder_prompt import Beginning, speech_beginning, start_token, text_beginning
from onnxpar.llm.generation_rules import GenerationRules, RuledText

VOCABULARY = 12
END = 1


def allowed(settings: dict[str, Any], begin: Sequence[int], new: Sequence[int]) -> set[int]:
    """The tokens that may follow, where at most 5 are new."""
    text = RuledText(GenerationRules.of(settings, [END]), VOCABULARY, begin, 5)
    for token in new:
        text.accept(token)
    return set(np.flatnonzero(text.allowed()).tolist())


ALL = set(range(VOCABULARY))


@pytest.mark.parametrize(
    "settings,begin,new,wanted",
    [
        ({}, [2], [], ALL),
        ({"suppress_tokens": [3, 4, 99]}, [2], [5], ALL - {3, 4}),
        ({"begin_suppress_tokens": [3]}, [2], [], ALL - {3}),
        ({"begin_suppress_tokens": [3]}, [2], [5], ALL),
        ({"forced_bos_token_id": 7}, [2], [], {7}),
        ({"forced_bos_token_id": 0}, [2], [], {0}),
        ({"forced_bos_token_id": 7}, [2, 3], [], ALL),
        ({"forced_bos_token_id": 7, "begin_suppress_tokens": [3]}, [2], [7], ALL - {3}),
        ({"forced_eos_token_id": END}, [2], [5, 5, 5, 5], {END}),
        ({"forced_eos_token_id": END}, [2], [5, 5, 5], ALL),
        ({"min_length": 3}, [2], [5], ALL - {END}),
        ({"min_length": 3}, [2], [5, 5], ALL),
        ({"min_new_tokens": 2}, [2], [5], ALL - {END}),
        ({"min_new_tokens": 2}, [2], [5, 5], ALL),
        ({"no_repeat_ngram_size": 2}, [2], [5, 6, 5], ALL - {6}),
        ({"no_repeat_ngram_size": 3}, [2], [5, 6, 5], ALL),
        ({"no_repeat_ngram_size": 3}, [5], [6, 7, 5, 6], ALL - {7}),
        ({"no_repeat_ngram_size": 1}, [2], [5, 6], ALL - {2, 5, 6}),
        ({"no_repeat_ngram_size": 3}, [2], [], ALL),
        ({"bad_words_ids": [[4], [5, 6], [END]]}, [2], [5], ALL - {4, 6}),
        ({"bad_words_ids": [[5, 6, 7]]}, [5], [6], ALL - {7}),
        ({"bad_words_ids": None, "forced_bos_token_id": None}, [2], [], ALL),
    ],
)
def test_what_may_follow(
    settings: dict[str, Any], begin: list[int], new: list[int], wanted: set[int]
) -> None:
    assert allowed(settings, begin, new) == wanted


SPEECH = {
    "decoder_start_token_id": 50,
    "no_timestamps_token_id": 63,
    "lang_to_id": {"<|en|>": 51, "<|de|>": 52},
    "task_to_id": {"transcribe": 58, "translate": 57},
}
FORCED = {"forced_decoder_ids": [[1, None], [2, 58], [3, 63]]}
ENGLISH = {"decoder_start_token_id": 50, "no_timestamps_token_id": 63}


@pytest.mark.parametrize(
    "settings,language,task,wanted",
    [
        (SPEECH, "de", None, [50, 52, 58, 63]),
        (SPEECH, "<|DE|>", "translate", [50, 52, 57, 63]),
        (SPEECH, None, None, [50, 99, 63]),
        (SPEECH, None, "translate", [50, 99, 57, 63]),
        (SPEECH | FORCED, None, None, [50, 99, 58, 63]),
        (SPEECH | FORCED, "en", None, [50, 51, 58, 63]),
        (SPEECH | {"forced_decoder_ids": [[1, 51], [2, 57]]}, None, None, [50, 51, 57, 63]),
        (SPEECH | {"language": "en", "task": "transcribe"}, None, None, [50, 51, 58, 63]),
        (ENGLISH, None, None, [50, 63]),
        (ENGLISH | {"forced_decoder_ids": [[1, 63]]}, None, None, [50, 63]),
    ],
)
def test_how_transcripts_begin(
    settings: dict[str, Any], language: str | None, task: str | None, wanted: list[int]
) -> None:
    """99 stands for the likeliest language."""

    def logits(tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        assert list(tokens) == [50]
        found = np.zeros((2, 64))
        found[:, 5] = 9  # no language
        found[0, 51] = found[1, 52] = 1
        return found

    found = speech_beginning(settings, language, task).of_each(2, logits)
    assert found == [[{99: like}.get(t, t) for t in wanted] for like in (51, 52)]


def test_start_tokens() -> None:
    assert start_token({"bos_token_id": 4}) == 4
    assert text_beginning({"decoder_start_token_id": 0, "bos_token_id": 4}) == Beginning((0,))
    with pytest.raises(ModelError, match="has decoder_start_token_id; add it"):
        start_token({"bos_token_id": None})
    with pytest.raises(InputError, match="the model knows one language: leave it out"):
        speech_beginning(ENGLISH, "de", None)
    with pytest.raises(InputError, match="the model knows no tasks: leave it out"):
        speech_beginning(ENGLISH, None, "translate")
