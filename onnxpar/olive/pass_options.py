"""The options of `onnxpar.shard` as parameters of an Olive pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Union, cast, get_origin

from olive.passes.pass_config import PassConfigParam

from onnxpar.planner.option_entry import members, table
from onnxpar.planner.option_table import PlanOptions

_JSON: Mapping[Any, type] = {
    **{kind: kind for kind in (bool, int, float, str)},
    Mapping: dict,
    Sequence: list,
}
"""For a type of an option, that of its value in a workflow file; no file has other objects."""


def parameters() -> dict[str, Any]:
    """Returns the options of `onnxpar.shard` as Olive's PassConfigParams, by name, with the
    options' defaults."""
    return {
        name: PassConfigParam(
            type_=Union[tuple(_json_types(each.type))],  # noqa: UP007  (of a tuple)
            default_value=_as_json(each.default),
            description=each.option.help,
        )
        for name, each in table(PlanOptions).items()
    }


def options(config: Mapping[str, Any]) -> PlanOptions:
    """Returns the options of `onnxpar.shard` from the parameters of a pass; a parameter that is
    None is left out."""
    given = {name: value for name, value in config.items() if value is not None}
    return cast(PlanOptions, given)


def _json_types(hint: Any) -> Iterator[type]:
    """Yields the types that a value of an option may have in a workflow file, from its type
    hint."""
    for each in members(hint):
        kind = get_origin(each) or each
        found = next(
            (made for own, made in _JSON.items() if kind is get_origin(own) or kind is own), None
        )
        if found is not None:
            yield found


def _as_json(default: Any) -> Any:
    return list(default) if isinstance(default, tuple) else default
