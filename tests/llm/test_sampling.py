"""Which token is chosen of logits: limits one by one, and the distribution of what is drawn."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from onnxpar.base.errors import InputError
from onnxpar.llm.next_tokens import Candidates
from onnxpar.llm.sampling import Sampling

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.25, 0.05], np.float32))


def drawn(number: int = 2000, **options: Any) -> Counter[int]:
    """How often each token is drawn."""
    sampling = Sampling(do_sample=True, **options)
    return Counter(choose(sampling, step=step)[0] for step in range(number))


def choose(
    sampling: Sampling,
    logits: np.ndarray = LOGITS,
    seen: Sequence[int] = (),
    row: int = 0,
    step: int = 0,
) -> tuple[int, float]:
    """The token that is chosen of all logits, and the logarithm of its probability."""
    found = sampling.choose(Candidates.all(logits), seen, row, step)
    assert found is not None
    return found


def test_greedy_is_the_likeliest_with_its_probability() -> None:
    token, logprob = choose(Sampling())
    assert token == 1
    assert math.isclose(math.exp(logprob), 0.4, rel_tol=1e-6)


@pytest.mark.slow
def test_what_is_drawn_has_the_probabilities_of_the_softmax() -> None:
    found = drawn(20_000)
    for token, wanted in enumerate(np.exp(LOGITS)):
        error = math.sqrt(wanted * (1 - wanted) / 20_000)
        assert abs(found[token] / 20_000 - wanted) < 4 * error


@pytest.mark.slow
def test_a_temperature_changes_the_probabilities() -> None:
    powers = np.exp(LOGITS.astype(float) / 0.5)
    found = drawn(20_000, temperature=0.5)
    for token, wanted in enumerate(powers / powers.sum()):
        assert abs(found[token] / 20_000 - wanted) < 4 * math.sqrt(wanted * (1 - wanted) / 20_000)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "options,wanted",
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 2, 3}),
        ({"top_k": 0}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.0}, {1}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.86}, {0, 1, 2, 3}),
        ({"top_k": 3, "top_p": 0.75}, {1, 3}),  # of 0.85, which the three have together
        ({"min_p": 0.49}, {1, 2, 3}),
        ({"min_p": 1.0}, {1}),
        ({"logit_bias": {1: -math.inf, 3: -100.0}}, {0, 2, 4}),
        ({"temperature": 0.0}, {1}),
    ],
)
def test_limits(options: dict[str, Any], wanted: set[int]) -> None:
    assert set(drawn(**options)) == wanted


def test_a_penalty_makes_what_is_there_less_likely() -> None:
    logits = np.array([2.0, 1.5, -1.0], np.float32)
    assert choose(Sampling(repetition_penalty=2.0), logits, [0])[0] == 1
    assert choose(Sampling(repetition_penalty=2.0), -logits, [2, 2])[0] == 2  # 1 -> 0.5
    assert choose(Sampling(repetition_penalty=2.0), np.array([-1.0, -1.5]), [0])[0] == 1


def test_the_seed_decides_what_is_drawn() -> None:
    def tokens(seed: int, row: int) -> list[int]:
        sampling = Sampling(do_sample=True, seed=seed)
        return [choose(sampling, row=row, step=step)[0] for step in range(50)]

    assert tokens(1, 0) == tokens(1, 0)
    assert len({tuple(tokens(*each)) for each in ((1, 0), (2, 0), (1, 1), (2**64 - 1, 0))}) == 4


@pytest.mark.parametrize(
    "options,named",
    [
        ({"temperature": -1.0}, "temperature is -1.0; it must be at least 0"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 1.5}, "top_p is 1.5; it must be at least 0, at most 1"),
        ({"min_p": -0.1}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be above 0"),
        ({"logit_bias": {5: 1.0}}, "logit_bias has token 5; ids are from 0 to 4"),
        ({"logit_bias": {0: math.nan}}, "logit_bias of token 0 is nan; it must be below inf"),
        ({"logit_bias": {0: math.inf}}, "logit_bias of token 0 is inf; it must be below inf"),
    ],
)
def test_wrong_options(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named.replace("(", r"\(")):
        Sampling(**options).check(5)
