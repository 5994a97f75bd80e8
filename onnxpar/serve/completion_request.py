"""Reads requests of /v1/completions."""

from __future__ import annotations

from onnxpar.serve.body import Fields
from onnxpar.serve.settings import Settings
from onnxpar.serve.texts import texts_or_ids
from onnxpar.serve.wanted import MOST_LOGPROBS, Wanted, check_model, common, max_tokens

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
    prompts = texts_or_ids(fields, "prompt")
    logprobs = fields.whole("logprobs", 0, MOST_LOGPROBS)
    echo = fields.flag("echo")
    most = max_tokens(fields, "max_tokens", settings, 0 if echo else 1)
    if most is None:
        most = min(_DEFAULT_TOKENS, settings.max_tokens or _DEFAULT_TOKENS)
    shared = common(fields, settings, len(prompts))
    return Wanted(prompts=prompts, max_tokens=most, logprobs=logprobs, echo=echo, **shared)
