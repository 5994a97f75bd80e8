"""Polynomials of open sizes: read, written, solved, and found from samples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxpar.symbols import FEWEST, Polynomial, fit, fits, sample

B, S = Polynomial.variable("b"), Polynomial.variable("s")
NUMBERS = st.integers(-4, 4).map(Polynomial.constant)


@given(x=NUMBERS, y=NUMBERS, z=NUMBERS, b=st.integers(1, 50), s=st.integers(1, 50))
def test_text_says_all(x: Polynomial, y: Polynomial, z: Polynomial, b: int, s: int) -> None:
    made = x * B * S + y * S + z
    assert Polynomial.parse(str(made)) == made
    assert made.at({"b": b, "s": s}) == x.at({}) * b * s + y.at({}) * s + z.at({})


@pytest.mark.parametrize("text", ["2*batch*seq + 1", "past + seq", "(s - 3) // 2", "-b + 12"])
def test_names_of_dimensions_are_read(text: str) -> None:
    names = {name: 7 for name in ("batch", "seq", "past", "s", "b")}
    assert Polynomial.parse(text).at(names) == eval(text, dict(names))


@pytest.mark.parametrize("text", ["a b", "floor(s)", "s ** 2", "s / b", "1.5", ""])
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(ValueError):
        Polynomial.parse(text)


def samples() -> dict[str, list[int]]:
    rows = sample(["b", "s"], 2, (), 0)
    assert len(rows) == FEWEST and all(row["b"] != row["s"] for row in rows)
    return {name: [row[name] for row in rows] for name in ("b", "s")}


@pytest.mark.parametrize(
    "text", ["12", "b", "3*b*s", "b + s", "16 - s", "2*b*s + 3*s", "b + 2*s + 5"]
)
def test_sizes_are_found_from_samples(text: str) -> None:
    at = samples()
    size = Polynomial.parse(text)
    values = [size.at({"b": b, "s": s}) for b, s in zip(at["b"], at["s"], strict=True)]
    assert fit(values, at) == size


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_a_rounded_share_is_no_polynomial(n: int) -> None:
    """Samples leave every remainder, so that a part of a size is never taken for a fraction."""
    at = samples()
    assert {b % n for b in at["b"]} == set(range(n))
    assert fit([-(-b // n) for b in at["b"]], {"b": at["b"]}) is None


def test_variables_that_agree_at_all_samples_are_both_found() -> None:
    twins = {"part": [3, 4, 5, 6], "start": [3, 4, 5, 6]}
    assert [str(p) for p in fits([6, 8, 10, 12], twins)] == ["2*part", "2*start"]


@pytest.mark.parametrize(("text", "value", "solution"), [("s + 1", 8, 7), ("2*b*s", 24, 4)])
def test_a_size_tells_its_symbol(text: str, value: int, solution: int) -> None:
    assert Polynomial.parse(text).solve("s", {"b": 3}, value) == solution


def test_what_no_whole_number_solves_is_none() -> None:
    assert Polynomial.parse("2*s").solve("s", {}, 7) is None
    assert Polynomial.parse("s*s").solve("s", {}, 9) is None
