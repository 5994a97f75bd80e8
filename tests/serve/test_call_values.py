"""Texts as values that a JSON schema allows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from onnxpar.serve.call_values import text_value

DEFINED: dict[str, Any] = {
    "$ref": "#/$defs/all",
    "$defs": {
        "all": {
            "properties": {
                "city": {"$ref": "#/$defs/city"},
                "size": {"$ref": "#/$defs/a~1b"},
                "loop": {"$ref": "#/$defs/loop"},
                "away": {"$ref": "https://example.com/schema"},
            }
        },
        "city": {"enum": ["12", "Paris"]},
        "a/b": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "loop": {"anyOf": [*[{"$ref": "#/$defs/loop"}] * 50, {"type": "integer"}]},
    },
}
VALUES: tuple[tuple[Any, str, Any], ...] = (  # schema, text, value
    ({"type": "string"}, "12", "12"),
    ({"type": "string"}, '"quoted"', '"quoted"'),
    ({"type": "string"}, "null", "null"),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "None", "None"),
    ({"type": ["integer", "null"]}, "None", None),
    ({"type": "integer"}, "12", 12),
    ({"type": "integer"}, " 12\n", 12),
    ({"type": "integer"}, "12.0", 12),
    ({"type": "integer"}, "12.5", "12.5"),
    ({"type": "integer"}, "9" * 5000, "9" * 5000),
    ({"type": "number"}, "1e999", "1e999"),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "number"}, "true", "true"),
    ({"type": "boolean"}, "true", True),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "\n False\n", False),
    ({"type": "boolean"}, "1", "1"),
    ({"type": "object"}, '{"a": NaN}', '{"a": NaN}'),
    ({"type": "object"}, "{'a': [1, None]}", {"a": [1, None]}),
    ({"type": "array"}, "[" * 3000, "[" * 3000),
    ({"type": "array"}, "(1, 2)", [1, 2]),
    ({"type": "array"}, "{1, 2}", "{1, 2}"),
    ({"type": "float"}, "3.14", 3.14),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, "one"]}, "1", 1),
    ({"enum": ["a"]}, '"a"', "a"),
    ({"enum": [True]}, "1", "1"),
    ({"const": 5}, "5", 5),
    ({"oneOf": [{"type": "string"}, {"type": "object"}]}, "12", "12"),
    ({"oneOf": [{"type": "string"}, {"type": "object"}]}, "{}", {}),
    ({"allOf": [{"type": "string"}, {}]}, "12", "12"),
    ({}, "12", 12),
    ({}, "a text", "a text"),
    (True, "[1]", [1]),
    ({"type": 5, "enum": "x", "anyOf": {}}, "12", 12),
)


@pytest.mark.parametrize("schema,text,value", VALUES, ids=range(len(VALUES)))
def test_values(schema: Any, text: str, value: Any) -> None:
    found = json.loads(text_value(text, "a", {"properties": {"a": schema}}))
    assert found == value and isinstance(found, bool) == isinstance(value, bool)


def test_schemas_that_are_named() -> None:
    texts = {"city": "12", "size": "12", "loop": "12", "away": "12", "none": "12"}
    found = {key: json.loads(text_value(text, key, DEFINED)) for key, text in texts.items()}
    assert found == {"city": "12", "size": 12, "loop": 12, "away": 12, "none": 12}
    assert text_value("None", "size", DEFINED) == "null"
    assert text_value("true", "loop", DEFINED) == '"true"'


@pytest.mark.parametrize("schema", [{}, {"properties": 5}, {"$ref": 5}, {"$ref": "#/x/y"}])
def test_functions_that_say_nothing_of_an_argument(schema: Any) -> None:
    assert text_value("12", "a", schema) == "12"


def test_a_schema_that_is_nested_deeply() -> None:
    schema: Any = {"type": "integer"}
    for _ in range(2000):
        schema = {"anyOf": [schema]}
    assert text_value("12", "a", {"properties": {"a": schema}}) == '"12"'
