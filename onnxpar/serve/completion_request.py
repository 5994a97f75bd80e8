"""Reads requests of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from onnxpar.serve.body import Fields
from onnxpar.serve.settings import Settings
from onnxpar.serve.wanted import MOST_LOGPROBS, Prompt, Wanted, check_model, common, max_tokens

_DEFAULT_TOKENS = 16
"""OpenAI's number of new tokens where a request says nothing."""


def completion_request(fields: Fields, settings: Settings) -> Wanted:
    """Returns what a request wants. Errors: ApiError."""
    check_model(fields, settings)
    if fields.text("suffix"):
        fields.refuse("suffix", "is not supported; the model continues texts at their end")
    best = fields.whole("best_of", 0, 2**31)
    if best is not None and best != (fields.get("n") or 1):
        fields.refuse("best_of", "is not supported; ask for n answers")
    prompts = _prompts(fields)
    logprobs = fields.whole("logprobs", 0, MOST_LOGPROBS)
    echo = fields.flag("echo")
    if echo and logprobs is not None:
        fields.refuse("echo", "is not supported with logprobs; ask for one of them")
    most = max_tokens(fields, "max_tokens", settings)
    if most is None:
        most = min(_DEFAULT_TOKENS, settings.max_tokens or _DEFAULT_TOKENS)
    shared = common(fields, settings, len(prompts))
    return Wanted(prompts=prompts, max_tokens=most, logprobs=logprobs, echo=echo, **shared)


def _prompts(fields: Fields) -> Sequence[Prompt]:
    """The prompts: a text, tokens, or a list of these."""
    value = fields.get("prompt")
    if value is None:
        fields.refuse("prompt", "is missing; give a text, token ids, or a list of these")
    if not isinstance(value, list):
        return [fields.valid_text("prompt", value)]
    if not value:
        fields.refuse("prompt", "is an empty list; give a text, token ids, or a list of these")
    if _is_id(value[0]):
        return [_ids(fields, value)]
    if isinstance(value[0], list):
        return [_ids(fields, each) for each in value]
    return [fields.valid_text("prompt", each) for each in value]


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ids(fields: Fields, value: object) -> list[int]:
    """A prompt of token ids."""
    if not isinstance(value, list) or not all(_is_id(each) for each in value):
        fields.refuse("prompt", "mixes texts, token ids or lists; give one kind")
    return value
