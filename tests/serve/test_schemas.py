"""Answers that fit a JSON schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serve.scripted_engine import forever
from serve.servers import Served

from onnxpar.serve.grammar import Form

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}


def form(schema: object) -> dict[str, Any]:
    """The response format of a schema."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def test_answers_fit_a_schema(served: Served) -> None:
    served.engine.script = forever  # which of the allowed tokens is taken
    answer = served.post(response_format=form(PERSON), n=4, max_tokens=400).json()
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        found = json.loads(choice["message"]["content"])
        assert found.keys() == {"name", "age", "kind", "tags"} and len(found["name"]) <= 8
        assert 0 <= found["age"] <= 150 and found["kind"] in ("cat", "dog")
        assert len(found["tags"]) <= 3 and {*map(type, found["tags"])} <= {bool}


def test_answers_that_are_any_object(served: Served) -> None:
    served.engine.script = forever
    answer = served.post(response_format={"type": "json_object"}, max_tokens=30).json()
    assert answer["choices"][0]["message"]["content"].lstrip().startswith("{")


DEEP: dict[str, Any] = {}
for _ in range(40):
    DEEP = {"properties": {"a": DEEP}}


@pytest.mark.matrix
@pytest.mark.parametrize(
    "schema,named",
    [
        ({"type": "nothing"}, "Invalid type: nothing"),
        ({"$ref": "#/nowhere"}, "'/nowhere' does not exist"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        (DEEP, "nested more than 64 levels deep"),
        ({"properties": 5}, "cannot be followed"),
        ({"allOf": [{"$ref": "#"}]}, "no text fits it"),
        ({"type": "string", "minLength": 3, "maxLength": 1}, "cannot be followed"),
    ],
    ids=range(8),
)
def test_schemas_that_cannot_be_followed(served: Served, schema: Any, named: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": form(schema)}
    response = served.http.post("/v1/chat/completions", content=json.dumps(body).encode())
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "response_format" and named in error["message"]


@pytest.mark.parametrize("begin", ["{", '{"a"', '{"a":', '{"a":[', '{"a":[1,', '{"a":1', '{"a":{}'])
def test_white_space_ends(served: Served, begin: str) -> None:
    """Between two values, a model may write a space, or one or two ends of lines and an indentation
    of at most 20 characters, as that of llama.cpp; whatever the schema says."""
    loose = {"type": "object", "x-guidance": {"whitespace_pattern": "\\s*"}}
    encode = served.engine.tokenizer.encode
    for text, count in (("\n", 2), (" ", 1), ("\n ", 21), ("\n\n\t", 22)):
        (constraint,) = served.service.grammars.constraints(Form(loose, None, "response_format"), 1)
        for token in encode(begin, specials=False):
            assert constraint.allowed()[token]
            constraint.accept(token)
        found = 0
        for token in [*encode(text, specials=False), *encode(text[-1], specials=False) * 100]:
            if not constraint.allowed()[token]:
                break
            constraint.accept(token)
            found += 1
        assert found == count
