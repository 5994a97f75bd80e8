"""Reads mappings and quantities of topology files, and reports mistakes in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxpar.base.errors import StrategyError
from onnxpar.base.units import quantity


def mapping(data: Any, keys: tuple[str, ...], where: str) -> Mapping[str, Any]:
    """Returns `data` if it is a mapping that has only these keys. Errors: StrategyError, which
    names `where`."""
    if not isinstance(data, Mapping):
        raise StrategyError(f"{where}: must be a mapping with the keys {', '.join(keys)}")
    unknown = sorted(set(map(str, data)) - set(keys))
    if unknown:
        raise StrategyError(f"{where}: unknown key {unknown[0]!r}; use {', '.join(keys)}")
    return data


def number(entries: Mapping[str, Any], key: str, unit: str, where: str) -> float:
    """Returns the quantity `key` of a mapping as a number of `unit`. Errors: StrategyError if it is
    missing, negative, or 0 and not a time."""
    if entries.get(key) is None:
        raise StrategyError(f"{where}: {key} is missing; give it in {unit}")
    value = quantity(entries[key], unit, f"{where}: {key}")
    if value < 0 or (value == 0 and unit != "s"):
        least = "at least" if unit == "s" else "above"
        raise StrategyError(f"{where}: {key} is {entries[key]!r}; it must be {least} 0")
    return value
