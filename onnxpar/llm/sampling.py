"""Chooses the next token from logits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the names are those of the `generate` of Hugging Face Transformers.

    do_sample     False: the likeliest token (greedy)
    temperature   logits are divided by it; 0 is greedy
    top_k         of how many likeliest tokens one is drawn; 0: of all
    top_p         of as few likeliest tokens as have at least this probability together
    min_p         of tokens with at least this fraction of the likeliest token's probability
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
        """Errors: InputError for a value out of its range, or a token that there is not."""
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
            if math.isnan(bias):
                raise InputError(f"logit_bias of token {token} is not a number")

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is chosen."""
        return not self.do_sample or self.temperature == 0

    def choose(self, logits: Array, seen: Sequence[int], row: int, step: int) -> tuple[int, float]:
        """Returns the next token of a text, and the natural logarithm of its probability by the
        model.

        logits  of the vocabulary, in any float dtype
        seen    the tokens of the text, prompt included; the last `step` of them were generated
        row, step  the number of the text and of the token in it, which decide what is drawn
        """
        total = log_total(logits)
        scores = self._changed(logits, seen, step) if self._changes else logits
        if self.is_greedy:
            token = int(scores.argmax())
        else:
            token = self._draw(scores.astype(np.float64), row, step)
        return token, float(logits[token]) - total

    @property
    def _changes(self) -> bool:
        """True if logits are changed before a token is chosen."""
        penalties = self.repetition_penalty != 1 or self.frequency_penalty or self.presence_penalty
        return bool(penalties or self.logit_bias)

    def _changed(self, logits: Array, seen: Sequence[int], step: int) -> Array:
        """The logits after penalties and biases."""
        scores = logits.astype(np.float64)
        if self.repetition_penalty != 1 and len(seen):
            at = np.unique(np.asarray(seen, np.int64))
            scores[at] *= np.where(
                scores[at] > 0, 1 / self.repetition_penalty, self.repetition_penalty
            )
        if step and (self.frequency_penalty or self.presence_penalty):
            at, counts = np.unique(np.asarray(seen[-step:], np.int64), return_counts=True)
            scores[at] -= self.frequency_penalty * counts + self.presence_penalty
        for token, bias in self.logit_bias.items():
            scores[token] += bias
        return scores

    def _draw(self, scores: Array, row: int, step: int) -> int:
        """Draws a token by the Gumbel-max trick: the largest of scores with noise has the
        probabilities of their softmax."""
        scores = scores / self.temperature
        kept = self._kept(scores)
        counter = np.array([0, 0, step, row], np.uint64)
        drawn = np.random.Generator(np.random.Philox(counter=counter, key=self.seed))
        noise = -np.log(-np.log(drawn.random(len(scores)) + np.finfo(np.float64).tiny))
        return int(np.where(kept, scores + noise, -np.inf).argmax())

    def _kept(self, scores: Array) -> Array:
        """The tokens of which one is drawn: those that no limit leaves out, in the order top_k,
        top_p, min_p. Tokens with the score of the last one that stays, stay, too."""
        least = -np.inf
        if 0 < self.top_k < len(scores):
            least = np.partition(scores, -self.top_k)[-self.top_k]
        if self.top_p < 1:
            ordered = np.sort(scores[scores >= least])[::-1]
            powers = np.exp(ordered - ordered[0])
            before = np.cumsum(powers) - powers
            least = ordered[before < max(self.top_p * powers.sum(), 1e-300)][-1]
        if self.min_p > 0:
            least = max(least, scores.max() + math.log(self.min_p))
        return scores >= least


def log_total(logits: Array) -> float:
    """Returns the logarithm of the sum of exponentials of logits: what a logit must be less by to
    be the logarithm of a probability."""
    logits = np.asarray(logits, np.result_type(logits, np.float32))
    largest = logits.max()
    return float(largest) + math.log(np.exp(logits - largest).sum(dtype=np.float64))
