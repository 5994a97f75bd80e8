"""Chooses the next token of a text from logits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError, ModelError
from onnxpar.llm.next_tokens import Candidates
from onnxpar.load.top_k_logits import BEST


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the names are those of the `generate` of Hugging Face Transformers.

    do_sample     False: the likeliest token (greedy)
    temperature   logits are divided by it; 0 is greedy
    top_k         the number of likeliest tokens to draw from; 0: all tokens
    top_p         draw from the fewest likeliest tokens with at least this probability together
    min_p         draw from tokens with at least this fraction of the likeliest token's probability
    repetition_penalty  logits of tokens that the text has are divided by it if they are above 0,
                  else multiplied
    frequency_penalty  subtracted from a token's logit for each time that it was generated
    presence_penalty   subtracted once from the logits of tokens that were generated
    logit_bias    added to logits, by token id
    seed          the same seed draws the same tokens
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def check(self, vocabulary: int) -> None:
        """Errors: InputError for a value out of its range, or a bias of a token that is not below
        `vocabulary`, the number of tokens."""
        limits = (
            ("temperature", self.temperature, 0, math.inf),
            ("top_k", self.top_k, 0, math.inf),
            ("top_p", self.top_p, 0, 1),
            ("min_p", self.min_p, 0, 1),
            ("frequency_penalty", self.frequency_penalty, -2, 2),
            ("presence_penalty", self.presence_penalty, -2, 2),
            ("seed", self.seed, 0, 2**64 - 1),
        )
        for name, value, least, most in limits:
            if not least <= value <= most or math.isinf(value):
                upto = "" if math.isinf(most) else f", at most {most}"
                raise InputError(f"{name} is {value}; it must be at least {least}{upto}")
        if not 0 < self.repetition_penalty < math.inf:
            raise InputError(f"repetition_penalty is {self.repetition_penalty}; it must be above 0")
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocabulary:
                raise InputError(
                    f"logit_bias has token {token}; ids are from 0 to {vocabulary - 1}"
                )
            if not bias < math.inf:
                raise InputError(f"logit_bias of token {token} is {bias}; it must be below inf")

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is chosen, after biases and penalties."""
        return not self.do_sample or self.temperature == 0

    @property
    def needs_all(self) -> bool:
        """True if choosing a token usually needs the logits of all tokens, not only the logits of
        the likeliest tokens."""
        if self.is_greedy or 0 < self.top_k < BEST:
            return False
        is_limited = self.top_p < 1 or self.min_p > 0
        return self.top_k >= BEST or self._changes or not is_limited

    @property
    def is_plain(self) -> bool:
        """True if the token with the largest logit is chosen, whatever tokens came before."""
        return self.is_greedy and not self._changes

    def changed(self, seen: Sequence[int], step: int) -> Array:
        """Returns the ids of the tokens whose logits biases and penalties change before the next
        token is chosen, ascending. `seen` are the tokens of the text; its last `step` tokens were
        generated."""
        ids = list(self.logit_bias)
        if self.repetition_penalty != 1:
            ids += seen
        elif step and (self.frequency_penalty or self.presence_penalty):
            ids += seen[-step:]
        return np.unique(np.array(ids, np.int64))

    def choose(
        self, candidates: Candidates, seen: Sequence[int], row: int, step: int
    ) -> tuple[int, float] | None:
        """Returns the next token of a text, and the natural logarithm of its probability by the
        model; None if only the logits of all tokens can tell it.

        candidates  the tokens to choose from, among them the tokens that `changed` returns
        seen        the tokens of the text, prompt included
        row         a number of the text, which decides what is drawn, together with `step` and the
                    seed
        step        how many of the text's tokens were generated

        Errors: ModelError for logits that are NaN.
        """
        if math.isnan(candidates.log_total):
            raise ModelError("the model's logits of the next token are not numbers (NaN)")
        if self.needs_all and not candidates.are_all:
            return None
        scores = candidates.logits.astype(np.float64)
        if self._changes:
            self._change(scores, candidates.tokens, seen, step)
        if self.is_greedy:
            at = int(scores.argmax())
            is_sure = candidates.are_all or scores[at] > candidates.floor
        else:
            at, is_sure = self._draw(scores, candidates, row, step)
        if not is_sure:
            return None
        logprob = float(candidates.logits[at]) - candidates.log_total
        return int(candidates.tokens[at]), logprob

    @property
    def _changes(self) -> bool:
        """True if biases or penalties change logits."""
        penalties = self.repetition_penalty != 1 or self.frequency_penalty or self.presence_penalty
        return bool(penalties or self.logit_bias)

    def _change(self, scores: Array, tokens: Array, seen: Sequence[int], step: int) -> None:
        """Applies penalties and biases in place to `scores`, the logits of `tokens`, which are
        ascending. `seen` are the tokens of the text; its last `step` tokens were generated."""
        if self.repetition_penalty != 1 and len(seen):
            at = np.searchsorted(tokens, np.unique(np.asarray(seen, np.int64)))
            scores[at] *= np.where(
                scores[at] > 0, 1 / self.repetition_penalty, self.repetition_penalty
            )
        if step and (self.frequency_penalty or self.presence_penalty):
            own, counts = np.unique(np.asarray(seen[-step:], np.int64), return_counts=True)
            at = np.searchsorted(tokens, own)
            scores[at] -= self.frequency_penalty * counts + self.presence_penalty
        for token, bias in self.logit_bias.items():
            scores[np.searchsorted(tokens, token)] += bias

    def _draw(self, scores: Array, candidates: Candidates, row: int, step: int) -> tuple[int, bool]:
        """Draws one of the candidates, by a random number from 0 to 1 that depends on seed, row and
        step. Returns its index, and False if the draw might give a token that is not among the
        candidates.

        scores  the logits of the candidates, after penalties and biases

        The drawn token is the first one, in the order of ids, at which the sum of probabilities
        exceeds the number.
        """
        scores = scores / self.temperature
        powers = np.exp(scores - scores.max())
        total = powers.sum() if candidates.are_all else math.exp(candidates.cooled)
        least = self._least(scores, powers, total)
        kept = np.flatnonzero(scores >= least)
        sums = np.cumsum(powers[kept])
        counter = np.array([0, 0, step, row], np.uint64)
        drawn = np.random.Generator(np.random.Philox(counter=counter, key=self.seed)).random()
        at = kept[np.searchsorted(sums, drawn * sums[-1], "right")]
        return int(at), candidates.are_all or least > candidates.floor / self.temperature

    def _least(self, scores: Array, powers: Array, total: float) -> float:
        """Returns the least score with which a token may be drawn, by top_k, top_p and min_p,
        applied in this order; -inf if there is no limit.

        scores  logits divided by the temperature
        powers  exp(score - best score)
        total   the sum of powers over the vocabulary, which may have more tokens than `scores`
        """
        least = -math.inf
        if 0 < self.top_k < len(scores):
            least = np.partition(scores, -self.top_k)[-self.top_k]
            total = powers[scores >= least].sum()
        if self.top_p < 1:
            kept = np.sort(powers[scores >= least])[::-1]
            before = np.cumsum(kept) - kept
            count = int((before < max(self.top_p * total, 1e-300)).sum())
            least = np.partition(scores, -count)[-count]
        if self.min_p > 0:
            least = max(least, scores.max() + math.log(self.min_p))
        return float(least)
