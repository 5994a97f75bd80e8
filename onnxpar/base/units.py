"""Numbers with units: `16 GB`, `50 us`, `2e9 B/s`."""

from __future__ import annotations

import math
import re
from decimal import Decimal, InvalidOperation
from typing import Any

from onnxpar.base.errors import StrategyError

_SCALES = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    "k": Decimal(10**3),
    "K": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
}
_NUMBER = re.compile(r"([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*(.*)")
_KINDS = {
    "": "a number",
    "s": "a time",
    "B": "a size",
    "B/s": "a data rate",
    "FLOP/s": "a compute rate",
}
_SMALL = ("n", "u", "m", "")
_LARGE = ("", "k", "M", "G", "T")


def quantity(value: Any, unit: str, what: str, may_omit_unit: bool = True) -> float:
    """Converts a number, or a text with a unit such as `16 GB`, to a number of `unit`: s, B, B/s,
    FLOP/s, or none (""). Prefixes are decimal or binary: GB is 1e9 bytes, GiB 2**30.

    what           the name of the value in error messages
    may_omit_unit  False: a text must have a unit, a number need not

    Errors: StrategyError.
    """
    found = None if isinstance(value, bool) else _NUMBER.fullmatch(str(value).strip())
    if found and not found[2] and isinstance(value, str) and not may_omit_unit:
        raise StrategyError(f"{what} {value}: give a unit: {found[1]}G{unit} or {found[1]}{unit}")
    suffix = found[2] if found and found[2] else unit
    scale = _SCALES.get(suffix.removesuffix(unit)) if suffix.endswith(unit) else None
    try:
        number = float(Decimal(found[1]) * scale) if found and scale else math.nan
    except InvalidOperation:
        number = math.nan
    if not math.isfinite(number):
        example = {"": "16", "s": "50us", "B": "16GB", "B/s": "2GB/s", "FLOP/s": "20GFLOP/s"}[unit]
        raise StrategyError(f"{what}: {value!r} is not {_KINDS[unit]}; write {example}")
    return number


def text_of(value: float, unit: str) -> str:
    """The text of a quantity with a fitting prefix and six digits: 52.3e-6 s is `52.3 us`. Whole
    bytes are rounded to an integer."""
    prefixes = _SMALL if unit == "s" else _LARGE
    fitting = [p for p in prefixes if value >= _SCALES[p]]
    prefix = fitting[-1] if fitting else prefixes[0]
    value = round(value) if unit == "B" and not prefix else value
    return f"{value / float(_SCALES[prefix]):.6g} {prefix}{unit}".rstrip()
