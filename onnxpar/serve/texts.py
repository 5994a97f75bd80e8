"""Reads fields that are a text, token ids, or a list of these."""

from __future__ import annotations

from collections.abc import Sequence

from onnxpar.serve.body import Fields

_MIXED = "mixes texts, token ids or lists; give one kind"


def texts_or_ids(fields: Fields, name: str) -> Sequence[str | Sequence[int]]:
    """Returns the texts and lists of ids of a field. Errors: ApiError."""
    value = fields.get(name)
    if value is None:
        fields.refuse(name, "is missing; give a text, token ids, or a list of these")
    if not isinstance(value, list):
        return [fields.valid_text(name, value)]
    if not value:
        fields.refuse(name, "is an empty list; give a text, token ids, or a list of these")
    if _is_id(value[0]):
        return [ids_of(fields, name, value, _MIXED)]
    if isinstance(value[0], list):
        return [ids_of(fields, name, each, _MIXED) for each in value]
    return [fields.valid_text(name, each) for each in value]


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def ids_of(
    fields: Fields, name: str, value: object, why: str = "must be a list of token ids"
) -> list[int]:
    """Returns a value that is a list of token ids. Errors: ApiError that says why not."""
    if not isinstance(value, list) or not all(_is_id(each) for each in value):
        fields.refuse(name, why)
    return value
