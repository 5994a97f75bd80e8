"""Finds passes by name, and parses lists of passes such as
`propagate-layouts,fuse-all-reduces{by=cost}`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onnxpar.base.errors import StrategyError
from onnxpar.compiler.pass_ import ANNOTATIONS, Pass, Stage
from onnxpar.passes.decide.annotate_strategy import AnnotateStrategy
from onnxpar.passes.rewrite.differentiate import Differentiate
from onnxpar.passes.rewrite.fuse_attention import FuseAttention
from onnxpar.planner.default_passes import DEFAULT_PASSES, MANUAL_PASSES
from onnxpar.planner.placed_passes import Placed, check_order
from onnxpar.planner.plugins import registered_passes

_BEFORE: tuple[type[Pass], ...] = (Differentiate, FuseAttention)
OWN: dict[str, type[Pass]] = {p.name: p for p in (*_BEFORE, *DEFAULT_PASSES, *MANUAL_PASSES)}
LIST = "list"
"""The value of --passes that lists all passes instead of running any."""
_ENTRY = re.compile(r"\s*([\w.-]+)\s*(?:\{([^}]*)\})?\s*")
_LIST = re.compile(rf"\s*|{_ENTRY.pattern}(?:,{_ENTRY.pattern})*")
_PLACE = re.compile(r"(.*\S)\s+(before|after)\s+([\w.-]+)\s*")
_BOOLS = {"true": True, "false": False}


def by_name() -> dict[str, type[Pass]]:
    """Returns all passes by name, passes of plugins last. Errors: StrategyError if a plugin's pass
    has the name of a pass of onnxpar."""
    of_plugins = registered_passes()
    for name in OWN.keys() & of_plugins.keys():
        raise StrategyError(
            f"a plugin has a pass called {name!r}, but onnxpar has one of that name; rename it"
        )
    return OWN | of_plugins


def passes_help() -> str:
    """Returns the help text of --passes."""
    return (
        "comma-separated, with options in braces, NAME{option=value}; of: "
        + ", ".join(OWN)
        + ", and those of plugins. annotate-strategy is added where it is missing and needed; "
        "'list' shows all of them with their options"
    )


def pass_lines() -> list[str]:
    """Returns two lines of text about each pass: its stage, name and options; and what it does."""
    lines = []
    for name, kind in by_name().items():
        options = ", ".join(f"{key}={f.default}" for key, f in _fields(kind).items())
        text = name + (f"{{{options}}}" if options else "")
        effect = (kind.__doc__ or "").strip().partition("\n")[0]
        lines.append(f"{kind.stage.name.lower():8}{text}\n        {effect}")
    return lines


def parse_passes(text: str, facts: Sequence[str] = ()) -> list[Pass]:
    """Returns the passes of a text such as `propagate-layouts,fuse-all-reduces{by=cost}`; adds
    annotate-strategy where it is needed and missing. `facts` hold before the first pass. Errors:
    StrategyError that names the pass or option."""
    if not _LIST.fullmatch(text):
        raise StrategyError(
            f"--passes {text!r}: write names with commas between them, and options in braces: "
            "propagate-layouts,fuse-all-reduces{by=cost}"
        )
    out = [_parse(entry, "--passes") for entry in re.findall(r"[^,{]+(?:\{[^}]*\})?", text)]
    decided = {fact for p in out for fact in p.ensures} | set(facts)
    lowers = any(p.stage is not Stage.REWRITE for p in out)
    by_hand = any(p.name == "keep-collectives" for p in out)
    if not by_hand and (lowers or not out) and not decided & {ANNOTATIONS}:
        out.insert(sum(p.stage is Stage.REWRITE for p in out), AnnotateStrategy())
    check_order(out, facts, by_name().values())
    return out


def parse_placed(text: str) -> Placed:
    """Returns the pass, and its place if it has one, of a text such as `drop-identities{limit=3}
    before insert-collectives`. Errors: StrategyError."""
    match = _PLACE.fullmatch(text)
    entry, where, beside = match.groups() if match else (text, "", None)
    step = _parse(entry, "--add-pass")
    return Placed(step, **{where: beside} if where else {})


def _parse(entry: str, flag: str) -> Pass:
    known, match = by_name(), _ENTRY.fullmatch(entry)
    name = match[1] if match else entry.strip()
    if match is None or name not in known:
        raise StrategyError(f"{flag}: no pass {name!r}; there are {', '.join(known)}")
    return known[name](**_options(known[name], match[2] or "", flag))


def _fields(kind: type[Pass]) -> Mapping[str, dataclasses.Field[Any]]:
    """Returns the options of a pass, by their names in text (with hyphens)."""
    if not dataclasses.is_dataclass(kind):
        return {}
    return {f.name.replace("_", "-"): f for f in dataclasses.fields(kind)}


def _options(kind: type[Pass], text: str, flag: str) -> dict[str, Any]:
    fields = _fields(kind)
    values: dict[str, Any] = {}
    for option in filter(None, re.split(r"[,\s]+", text)):
        key, _, value = option.partition("=")
        try:
            values[fields[key].name] = _reader(fields[key])(value)
        except (KeyError, ValueError):
            names = ", ".join(fields) or "none"
            raise StrategyError(
                f"{flag}: {kind.name} has no option {option!r}; it has: {names}"
            ) from None
    return values


def _reader(field: dataclasses.Field[Any]) -> Callable[[str], Any]:
    """Returns the function that parses the text of an option, by the type of its field."""
    name = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", "")
    readers: dict[str, Callable[[str], Any]] = {
        "int": int,
        "float": float,
        "bool": _BOOLS.__getitem__,
    }
    return readers.get(str(name), str)
