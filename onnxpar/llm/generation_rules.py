"""Tokens that the configuration of a model forces or forbids in generated texts; the names are
those of the `generate` of Hugging Face Transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.llm.language_model import token_ids


@dataclass(frozen=True)
class GenerationRules:
    """Which tokens may come next in texts of a model, by settings of its generation_config.json.

    ends        tokens that end a text
    never       suppress_tokens: tokens that never come
    not_first   begin_suppress_tokens: tokens that may not be the first new one
    first       forced_bos_token_id: the first new token, if the text begins with a single token
    last        forced_eos_token_id: the last of max_new_tokens must be one of these
    phrases     bad_words_ids: sequences that must not occur
    ngram       no_repeat_ngram_size: no sequence of this many tokens occurs twice; 0: no limit
    least       min_length: the least tokens of a text, including its beginning
    least_new   min_new_tokens: the least tokens without the beginning
    """

    ends: frozenset[int] = frozenset()
    never: tuple[int, ...] = ()
    not_first: tuple[int, ...] = ()
    first: int | None = None
    last: tuple[int, ...] = ()
    phrases: tuple[tuple[int, ...], ...] = ()
    ngram: int = 0
    least: int = 0
    least_new: int = 0

    @staticmethod
    def of(settings: Mapping[str, Any], ends: Iterable[int]) -> GenerationRules:
        """Returns the rules of a generation_config.json. `ends` are the tokens that end a text."""
        phrases = settings.get("bad_words_ids")
        phrases = phrases if isinstance(phrases, list) else []
        return GenerationRules(
            ends=frozenset(ends),
            never=token_ids(settings.get("suppress_tokens")),
            not_first=token_ids(settings.get("begin_suppress_tokens")),
            first=next(iter(token_ids(settings.get("forced_bos_token_id"))), None),
            last=token_ids(settings.get("forced_eos_token_id")),
            phrases=tuple(filter(None, map(token_ids, phrases))),
            ngram=next(iter(token_ids(settings.get("no_repeat_ngram_size"))), 0),
            least=next(iter(token_ids(settings.get("min_length"))), 0),
            least_new=next(iter(token_ids(settings.get("min_new_tokens"))), 0),
        )


class RuledText:
    """A `Constraint` that applies the rules to one text as it grows.

    rules       the rules
    vocabulary  the number of tokens
    begin       the tokens with which the text begins
    most_new    the most new tokens after these
    """

    def __init__(
        self, rules: GenerationRules, vocabulary: int, begin: Sequence[int], most_new: int
    ) -> None:
        self._rules, self._vocabulary = rules, vocabulary
        self._tokens, self._begin, self._most_new = list(begin), len(begin), most_new

    def accept(self, token: int) -> None:
        """Appends a token to the text."""
        self._tokens.append(token)

    def allowed(self) -> Array:
        """Returns True for each token that may come next by the rules, (vocabulary,)."""
        rules, step = self._rules, len(self._tokens) - self._begin
        is_forced = rules.first is not None and self._begin == 1
        if is_forced and step == 0:
            return self._mask([rules.first or 0], True)
        if rules.last and step == self._most_new - 1:
            return self._mask(rules.last, True)
        barred = [*rules.never, *self._repeating(), *self._completing()]
        if step == int(is_forced):
            barred += rules.not_first
        if len(self._tokens) < rules.least or step < rules.least_new:
            barred += rules.ends
        return self._mask(barred, False)

    def _mask(self, tokens: Iterable[int], value: bool) -> Array:
        """Returns `value` for these tokens, and its opposite for all others, (vocabulary,)."""
        mask = np.full(self._vocabulary, not value)
        mask[[token for token in tokens if 0 <= token < self._vocabulary]] = value
        return mask

    def _repeating(self) -> Iterable[int]:
        """Yields the tokens that would repeat a sequence of `ngram` tokens."""
        size, tokens = self._rules.ngram, self._tokens
        if not 0 < size <= len(tokens):
            return
        end = tokens[len(tokens) - size + 1 :]
        for i in range(len(tokens) - size + 1):
            if tokens[i : i + size - 1] == end:
                yield tokens[i + size - 1]

    def _completing(self) -> Iterable[int]:
        """Yields the tokens that would complete one of the forbidden `phrases`."""
        for *begin, last in self._rules.phrases:
            is_end = len(begin) == 0 and last in self._rules.ends
            if not is_end and self._tokens[len(self._tokens) - len(begin) :] == begin:
                yield last
