"""Polynomials of open sizes: read, written, solved, and found from samples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxpar.layout.fits import DOMAINS, FAR, FEWEST, fit, fits, sample
from onnxpar.layout.quotients import applied, find_quotient
from onnxpar.layout.symbols import Polynomial, quotient, rounded_up
from onnxpar.layout.ties import solve_tie

B, S = Polynomial.variable("b"), Polynomial.variable("s")
NUMBERS = st.integers(-4, 4).map(Polynomial.constant)


@given(x=NUMBERS, y=NUMBERS, z=NUMBERS, b=st.integers(1, 50), s=st.integers(1, 50))
def test_text_says_all(x: Polynomial, y: Polynomial, z: Polynomial, b: int, s: int) -> None:
    made = x * B * S + y * S + z
    assert Polynomial.parse(str(made)) == made
    assert made.at({"b": b, "s": s}) == x.at({}) * b * s + y.at({}) * s + z.at({})


@pytest.mark.parametrize(
    "text",
    ["2*batch*seq + 1", "past + seq", "(s - 3) // 2", "-b + 12", "b*((s + 1) // 2) + s // 3 - 1"],
)
def test_names_of_dimensions_are_read(text: str) -> None:
    names = {name: 7 for name in ("batch", "seq", "past", "s", "b")}
    assert Polynomial.parse(text).at(names) == eval(text, dict(names))


@pytest.mark.parametrize(
    "text",
    ["b - 1", "-b + s", "b*s - 3*b - s", "b - (s // 2) + 1", "-(b // 2) + s", "(b - 1) // 2"],
)
def test_differences_are_written_with_a_minus(text: str) -> None:
    made = Polynomial.parse(text)
    assert "+ -" not in str(made) and "1*" not in str(made)
    assert Polynomial.parse(str(made)) == made


@pytest.mark.parametrize("text", ["a b", "round(s)", "s ** 2", "s / b", "s // 0", "1.5", ""])
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(ValueError):
        Polynomial.parse(text)


def samples(ranks: int = 2) -> dict[str, list[int]]:
    count = max(FEWEST, ranks)
    rows = sample(dict.fromkeys(["b", "s"], DOMAINS[0]), ranks, ())[:count]
    assert len(rows) == count and all(row["b"] != row["s"] for row in rows)
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
    at = samples(n)
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


@given(
    a=st.integers(1, 6),
    b=st.integers(-9, 9),
    c=st.integers(1, 7),
    d=st.integers(1, 7),
    s=st.integers(0, 200),
)
def test_quotients_of_quotients_have_one_form(a: int, b: int, c: int, d: int, s: int) -> None:
    size = Polynomial.constant(a) * S + Polynomial.constant(b)
    down = quotient(quotient(size, c) + Polynomial.constant(b), d)
    up = rounded_up(size, c)
    assert down.at({"s": s}) == ((a * s + b) // c + b) // d
    assert up.at({"s": s}) == -(-(a * s + b) // c)
    assert Polynomial.parse(str(down)) == down and Polynomial.parse(str(up)) == up


def test_halving_thrice_is_one_division() -> None:
    size = S
    for _ in range(3):
        size = quotient(size + Polynomial.constant(1), 2)
    assert str(size) == "(s + 7) // 8"


def test_floor_and_ceil_are_read() -> None:
    assert str(Polynomial.parse("floor(s/2 - 1/2) + 1")) == "(s + 1) // 2"
    assert Polynomial.parse("ceil(s / 4)") == Polynomial.parse("(s + 3) // 4")


@pytest.mark.parametrize(
    ("a", "b", "c"), [(1, 1, 2), (1, -7, 10), (3, 2, 4), (2, 0, 1), (1, 5, 160)]
)
def test_a_stride_is_found_by_asking(a: int, b: int, c: int) -> None:
    found = find_quotient(lambda x: (a * x + b) // c, 50)
    assert found is not None
    made = applied(found, S)
    assert all(made.at({"s": x}) == (a * x + b) // c for x in range(50, 999))


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("max(0, s - 20)", "s - min(s, 20)"),
        ("min(min(s, 9), b) + 2", "min(b, s, 9) + 2"),
        ("min(2*s, 6)", "2*min(s, 3)"),
        ("min(s, s + b)", "s"),
        ("max(s, -1)", "s"),
        ("min(1, max(0, 512 - s))", "min(s, 511) - min(s, 512) + 1"),
        ("max(s, 8) // 4 - 2", "(s - (min(s, 8))) // 4"),
    ],
)
def test_minima_have_one_form(text: str, normal: str) -> None:
    assert Polynomial.parse(text) == Polynomial.parse(normal)
    for s in (0, 1, 2, 3, 7, 8, 9, 19, 20, 21, 511, 512, 513):
        for b in (0, 1, 5, 100):
            wanted = eval(text, {"s": s, "b": b, "min": min, "max": max})
            assert Polynomial.parse(text).at({"s": s, "b": b}) == wanted


def test_what_is_no_quotient_is_not_found() -> None:
    assert find_quotient(lambda x: x * x, 10) is None
    assert find_quotient(lambda x: 7, 10) is None


def test_a_quotient_is_found_among_sums_and_products() -> None:
    rows = sample(dict.fromkeys(["b", "s"], DOMAINS[0]), 2, ())
    (half,) = quotient(S + Polynomial.constant(1), 2).atoms
    columns = {"b": [r["b"] for r in rows], "s": [r["s"] for r in rows]}
    size = Polynomial.parse("3*b*((s + 1) // 2) + 2")
    values = [size.at(r) for r in rows]
    assert len(rows) == FEWEST + FAR
    assert fit(values, columns) is None
    assert fit(values, {**columns, half: [half.at(r) for r in rows]}) == size


@pytest.mark.parametrize(
    ("a", "b", "tie"),
    [
        ("s", "t", ("t", "s")),
        ("b", "t", ("t", "b")),
        ("past + s", "total", ("total", "past + s")),
        ("b*s", "b*t", ("t", "s")),
        ("s", "768", ("s", "768")),
        ("s", "2*(s // 2)", ("s", "2*s_by_2")),
        ("s_by_2", "4*(s_by_2 // 4)", ("s_by_2", "4*s_by_8")),
        ("s", "s + 1", None),
        ("s*t", "49", None),
    ],
)
def test_equal_sizes_tell_a_symbol(a: str, b: str, tie: tuple[str, str] | None) -> None:
    found = solve_tie(
        Polynomial.parse(a), Polynomial.parse(b), ["b", "s", "past", "t", "total", "s_by_2"]
    )
    assert (found and (found[0], str(found[1]))) == tie


def test_a_quotient_does_not_tell_its_symbol() -> None:
    assert Polynomial.parse("s // 2").solve("s", {}, 7) is None
