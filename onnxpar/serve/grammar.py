"""Answers in JSON: which tokens a JSON schema allows next, by the library llguidance."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import llguidance
import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.serve.api_error import ApiError
from onnxpar.serve.served_engine import ServedEngine

_DEEPEST = 64
"""Most objects and arrays inside each other in a schema."""
_MOST_TOKENS = 1 << 24
"""Tokens of a vocabulary; more means that their number is unknown."""
_OPTIONS: Any = {"whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})?", "lenient": False}
"""A model may not write white space for ever: between two values, a space, or a line that is
indented. What the library does not know of a schema is an
error, not ignored."""


class JsonConstraint:
    """Allows the tokens that continue a text of a JSON schema; see `Constraint`."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: int, ends: Iterable[int]) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self._ends = sorted(end for end in ends if end < vocabulary)

    def allowed(self) -> Array:
        """True for each token that may come next, (vocabulary,)."""
        mask: Array = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8) != 0
        mask = mask[: self._vocabulary]  # a tokenizer may have more tokens than the model
        # The library knows one token that ends texts. It allows none at all where the text is
        # complete, or the schema is beyond its limits.
        if mask[self._ends].any() or not mask.any():
            mask[self._ends] = True
        return mask

    def accept(self, token: int) -> None:
        """Appends a token."""
        if token not in self._ends:
            self._matcher.consume_token(token)

    def check(self) -> None:
        """Errors: ApiError if the text does not fit the schema, because the library could not
        follow it to the end."""
        if self._matcher.is_error():
            raise _wrong(self._matcher.get_error())


class Grammars:
    """The vocabulary of a model, as bytes, and constraints over it."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._made: llguidance.LLTokenizer | None = None

    def load(self) -> llguidance.LLTokenizer:
        """Returns the vocabulary; the first call takes a second. Errors: ApiError if the library
        cannot read the model's tokenizer."""
        with self._lock:
            if self._engine.vocabulary > _MOST_TOKENS:
                raise ApiError(
                    "response_format and logprobs cannot be used: the model does not say how many "
                    "tokens it has"
                )
            if self._made is None:
                ends = sorted(self._engine.model.ends)
                tokenizer = self._engine.tokenizer
                size = max(self._engine.vocabulary, tokenizer.size)
                try:
                    self._made = llguidance.LLTokenizer(
                        tokenizer.as_json(), n_vocab=size, eos_token=ends[0] if ends else None
                    )
                except Exception as error:  # the library raises several kinds
                    raise ApiError(
                        f"response_format and logprobs cannot be used: the library llguidance "
                        f"does not know the model's tokenizer: {error}"
                    ) from None
            return self._made

    def bytes_of(self, token: int) -> bytes:
        """Returns the bytes of a token's text."""
        found: bytes = self.load().decode_bytes([token])
        text = self._engine.tokenizer.decode([token], specials=True)
        if len(text) > len(found.decode("utf-8", "replace")):
            return b"\xff" + found  # with which the library marks special tokens, and leaves out
        return found

    def constraints(self, schema: Mapping[str, Any], number: int) -> list[JsonConstraint]:
        """Returns as many constraints for a schema. Errors: ApiError if it is wrong, or uses what
        the library lacks."""
        _check_depth(schema)
        vocabulary = self.load()
        try:
            text = llguidance.LLMatcher.grammar_from_json_schema(dict(schema), overrides=_OPTIONS)
        except (ValueError, UnicodeError) as error:
            raise _wrong(str(error)) from None
        matcher = llguidance.LLMatcher(vocabulary, text, log_level=0)
        if matcher.is_error():
            raise _wrong(matcher.get_error())
        if not any(matcher.compute_logit_bias()):
            raise _wrong("NoExtension")
        own = self._engine.vocabulary, self._engine.model.ends
        return [JsonConstraint(matcher.deep_copy(), *own) for _ in range(number)]


def _wrong(why: str) -> ApiError:
    """The error of a schema; of the library's reasons, the first line is for users."""
    reason = "no text fits it" if why.startswith("NoExtension") else why.partition("\n<state>")[0]
    text = f"response_format has a schema that cannot be followed: {' '.join(reason.split())[:300]}"
    return ApiError(text, param="response_format")


def _check_depth(schema: object) -> None:
    """Errors: ApiError if a schema is nested too deeply for the library."""
    level, depth = [schema], 0
    while level:
        if depth > _DEEPEST:
            raise _wrong(f"it is nested more than {_DEEPEST} levels deep")
        inner: list[object] = []
        for value in level:
            inner += value.values() if isinstance(value, dict) else []
            inner += value if isinstance(value, list) else []
        level, depth = inner, depth + 1
