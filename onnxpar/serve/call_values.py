"""Converts the values in calls of tools to JSON. Models write values as JSON, as Python, or as
plain texts whose type only the tool's JSON schema tells."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

from onnxpar.serve.pieced_text import UnexpectedText

_UNREADABLE = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)
_KINDS: Mapping[Any, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list, tuple),
}
"""Types of JSON schemas."""
T = TypeVar("T")


def json_value(text: str, kind: type[T]) -> T:
    """Returns the value of a JSON text, which must be of the type `kind`. Errors: UnexpectedText
    for any other text."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise UnexpectedText from None
    if not isinstance(value, kind):
        raise UnexpectedText
    return value


def python_value(text: str) -> str:
    """Converts a Python literal to JSON: "{'a': True}" becomes '{"a": true}'. Also accepts `true`,
    `false` and `null`, which models write, too. Errors: UnexpectedText for any other text."""
    for read in (ast.literal_eval, json.loads):
        with suppress(*_UNREADABLE):
            return json.dumps(read(text), ensure_ascii=False, allow_nan=False)
    raise UnexpectedText


def text_value(text: str, key: str, schema: Mapping[str, Any]) -> str:
    """Converts the plain text of the argument `key` to JSON: "5" becomes 5 for an integer, and "5"
    in quotes for a string.

    The value is one that the function's JSON schema allows for the argument. If it allows a string
    and another type, the other type is tried first; if it allows no value of the text, the result
    is a string.
    """
    own_schema = _schema_of(key, schema)
    for read in (_no_string, str, _literal):
        with suppress(*_UNREADABLE):
            value = read(text)
            if _fits(value, own_schema, schema, {}):
                return json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(text, ensure_ascii=False)


def _no_string(text: str) -> object:
    """Returns the value of a JSON text. Errors: ValueError for any other text, and for a string."""
    value = json.loads(text)
    if isinstance(value, str):
        raise ValueError(text)
    return value


def _literal(text: str) -> object:
    return ast.literal_eval(text.strip())


def _schema_of(key: str, schema: Mapping[str, Any]) -> object:
    """Returns the schema of the argument `key` in the schema of a function; None if there is
    none."""
    target = _target(schema["$ref"], schema) if "$ref" in schema else schema
    properties = target.get("properties") if isinstance(target, Mapping) else None
    return properties.get(key) if isinstance(properties, Mapping) else None


def _target(ref: object, root: object) -> object:
    """Returns the schema in `root` to which a reference such as "#/$defs/place" points; None if it
    is in another file."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return None
    for part in ref[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, Mapping) else None
    return root


def _fits(value: object, schema: object, root: object, known: dict[str, bool]) -> bool:
    """True if a value fits a schema, as far as the schema's types, enumerations and choices tell.

    root   the schema in which references are looked up
    known  caches, by reference, whether the value fits its target
    """
    if not isinstance(schema, Mapping):
        return True
    ref = schema.get("$ref")
    if isinstance(ref, str):
        if ref not in known:
            known[ref] = False  # a schema that names itself adds nothing
            known[ref] = _fits(value, _target(ref, root), root, known)
        if not known[ref]:
            return False
    kinds = schema.get("type")
    if kinds is not None:
        kind_list = kinds if isinstance(kinds, list) else [kinds]
        if not any(_is(value, kind) for kind in kind_list):
            return False
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(allowed, list) and json.dumps(value) not in map(json.dumps, allowed):
        return False
    for name, holds in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        parts = schema.get(name)
        if isinstance(parts, list) and not holds(_fits(value, p, root, known) for p in parts):
            return False
    return True


def _is(value: object, kind: object) -> bool:
    """True for a value of this type of a JSON schema; also for a type that JSON schemas do not
    have."""
    if not isinstance(kind, str) or kind not in _KINDS:
        return True
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _refuse(word: str) -> NoReturn:
    raise ValueError(word)
