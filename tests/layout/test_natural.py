"""What is proved to be at least 0 is so at all sizes, and what is needed is proved."""

from __future__ import annotations

import random
from itertools import product

import pytest

from onnxpar.layout.symbols import Polynomial, maximum, minimum, quotient

N, M = Polynomial.variable("n"), Polynomial.variable("m")


def number(value: int) -> Polynomial:
    return Polynomial.constant(value)


@pytest.mark.parametrize(
    ("size", "is_proved"),
    [
        (N, True),
        (N - number(1), False),
        (N - quotient(N, 2), True),
        (quotient(N + number(1), 2) - quotient(N, 2), True),
        (quotient(N, 2) - quotient(N + number(1), 2), False),
        (N - number(8) * quotient(N, 8), True),
        (number(7) + number(8) * quotient(N, 8) - N, True),
        (number(6) + number(8) * quotient(N, 8) - N, False),
        (quotient(N - number(5), 2), False),
        (N - minimum(N, number(5)), True),
        (minimum(N - number(5), number(3)), False),
        (minimum(N, M), True),
        (N - minimum(N, M) * M, False),
        (maximum(N - number(20), number(0)), True),
        (N * M - quotient(N, 2), False),
        (M * quotient(N, 3) + N, True),
        (M * quotient(N - number(1), 3) + N, False),
    ],
    ids=str,
)
def test_proofs(size: Polynomial, is_proved: bool) -> None:
    assert size.is_natural is is_proved


def test_halves_are_no_minima() -> None:
    assert minimum(N, quotient(N, 2)) == quotient(N, 2)
    assert minimum(number(8) * quotient(N, 8), N) == number(8) * quotient(N, 8)


@pytest.mark.parametrize("seed", range(200))
def test_what_is_proved_is_so(seed: int) -> None:
    source = random.Random(seed)

    def drawn(depth: int) -> Polynomial:
        kind = source.randrange(6) if depth else 5
        if kind == 0:
            return quotient(drawn(depth - 1), source.randint(2, 5))
        if kind == 1:
            return minimum(drawn(depth - 1), drawn(depth - 1))
        if kind == 2:
            return drawn(depth - 1) - drawn(depth - 1)
        if kind == 3:
            return drawn(depth - 1) + drawn(depth - 1)
        if kind == 4:
            return number(source.randint(-3, 9)) * drawn(depth - 1)
        return source.choice([N, M, number(source.randint(-4, 9))])

    for _ in range(20):
        size = drawn(4)
        if size.is_natural:
            for n, m in product((0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 23, 100), repeat=2):
                assert size.exactly_at({"n": n, "m": m}) >= 0, (str(size), n, m)
