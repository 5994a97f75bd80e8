"""Passes by name, and the text form of a pipeline: `propagate-layouts,insert-collectives{...}`."""

from __future__ import annotations

import dataclasses
import re

from onnxpar.errors import StrategyError
from onnxpar.passes.annotate_strategy import AnnotateStrategy
from onnxpar.passes.differentiate import Differentiate
from onnxpar.passes.keep_collectives import KeepCollectives
from onnxpar.passes.pass_ import Pass
from onnxpar.pipeline import DEFAULT_PASSES, MANUAL_PASSES

_BEFORE: tuple[type[Pass], ...] = (Differentiate,)
BY_NAME: dict[str, type[Pass]] = {p.name: p for p in (*_BEFORE, *DEFAULT_PASSES, *MANUAL_PASSES)}


def passes_help() -> str:
    """For --help."""
    return (
        "comma-separated, with options in braces, NAME{option=value}; of: "
        + ", ".join(BY_NAME)
        + ". annotate-strategy runs first where it is not named"
    )


def parse_passes(text: str) -> list[Pass]:
    """The passes of a pipeline text. Errors: StrategyError, naming the pass or option."""
    out: list[Pass] = []
    for entry in re.findall(r"[^,{]+(?:\{[^}]*\})?", text):
        name, _, rest = entry.strip().partition("{")
        if name not in BY_NAME:
            raise StrategyError(f"--passes: no pass {name!r}; there are {', '.join(BY_NAME)}")
        out.append(BY_NAME[name](**_options(BY_NAME[name], rest.rstrip("}"))))
    if not any(isinstance(p, (AnnotateStrategy, KeepCollectives)) for p in out):
        first = sum(isinstance(p, Differentiate) for p in out)
        out.insert(first, AnnotateStrategy())
    return out


def _options(kind: type[Pass], text: str) -> dict[str, int | str]:
    known = dataclasses.fields(kind)  # type: ignore[arg-type]
    fields = {f.name.replace("_", "-"): f for f in known}
    values: dict[str, int | str] = {}
    for option in filter(None, re.split(r"[,\s]+", text)):
        key, _, value = option.partition("=")
        is_text = key in fields and fields[key].type == "str"
        if key not in fields or not (is_text or value.isdigit()):
            have = ", ".join(fields) or "none"
            raise StrategyError(f"--passes: {kind.name} has no option {option!r}; it has: {have}")
        values[fields[key].name] = value if is_text else int(value)
    return values
