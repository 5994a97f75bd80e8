"""The candidates for the next token of a text: tokens with their logits, as ranks return them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from onnxpar.base.arrays import Array


@dataclass(frozen=True, eq=False)
class Candidates:
    """All tokens of a vocabulary, or the likeliest and some more, with their logits.

    tokens     ids, ascending, (n,)
    logits     the logits of `tokens`, in any float dtype, (n,)
    floor      an upper bound on the logits of other tokens; -inf if there are none
    are_all    True if `tokens` are the whole vocabulary
    log_total  the logarithm of the sum of exp(logit) over the vocabulary; a logit minus this is the
               logarithm of a probability
    cooled     the logarithm of the sum of exp((logit - best logit) / temperature) over the
               vocabulary; 0 if `tokens` are all
    first      the likeliest token, with which ranks go on if they take several steps; -1 if unknown
    """

    tokens: Array
    logits: Array
    log_total: float
    are_all: bool = True
    floor: float = -math.inf
    cooled: float = 0.0
    first: int = -1

    @staticmethod
    def all(logits: Array) -> Candidates:
        """Returns all tokens of a vocabulary. `logits`: (vocabulary,)."""
        return Candidates(np.arange(len(logits)), logits, _log_total(logits))

    @staticmethod
    def best(
        tokens: Array, logits: Array, asked: Array, asked_logits: Array, log_totals: Array
    ) -> Candidates:
        """Returns the likeliest tokens, the best first, and others that were asked for (see
        `load/top_k_logits.py`).

        log_totals  logarithms of two sums over the vocabulary: of exp(logit - best logit), and of
                    exp((logit - best logit) / temperature)
        """
        each, at = np.unique(np.concatenate([tokens, asked]), return_index=True)
        total, cooled = map(float, log_totals)
        values = np.concatenate([logits, asked_logits])[at]
        log_total, floor, first = float(logits[0]) + total, float(logits[-1]), int(tokens[0])
        return Candidates(each, values, log_total, False, floor, cooled, first)

    def logprob(self, token: int) -> float:
        """Returns the natural logarithm of the probability of a token, which must be one of
        `tokens`."""
        return float(self.logits[np.searchsorted(self.tokens, token)]) - self.log_total

    def logprobs(self, count: int) -> list[tuple[int, float]]:
        """Returns the `count` likeliest tokens, the best first, each with the natural logarithm of
        its probability."""
        best = np.argsort(-self.logits, kind="stable")[:count] if count else ()
        return [(int(self.tokens[i]), float(self.logits[i]) - self.log_total) for i in best]


def _log_total(logits: Array) -> float:
    """Returns the logarithm of the sum of exp(logit), without overflow."""
    logits = np.asarray(logits, np.result_type(logits, np.float32))
    largest = logits.max()
    return float(largest) + math.log(np.exp(logits - largest).sum(dtype=np.float64))
