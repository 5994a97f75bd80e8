"""Requests that are wrong, or made to do harm, are refused in OpenAI's shape, and never break the
server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve.scripted_engine import forever
from serve.servers import TIMEOUT, Served, serving

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TOKENS, BACK = "/tokenize", "/detokenize"
USER = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    """A server for many requests."""
    with serving(max_body=100_000) as served:
        served.engine.script = forever
        yield served


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, which has OpenAI's shape."""
    assert response.status_code == status, response.text
    (error,) = response.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and len(error["message"]) < 1000
    assert isinstance(error["type"], str) and "Traceback" not in response.text
    found: dict[str, Any] = error
    return found


BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b"\xff\xfe",
    b'{"prompt": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": -Infinity}',
    b"[" * 50_000,
    b'{"a":' * 16_000,
    b'{"prompt": "\\ud800"}',
    b'{"model": "\\ud800", "prompt": "x"}',
    b'{"prompt": "x", "seed": ' + b"9" * 50_000 + b"}",
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "x", "metadata": {"a": [1e999]}}',
    b'{"prompt": [' + b"9" * 5000 + b"]}",
    b"\xef\xbb\xbf{}",
]


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, TOKENS, BACK])
@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_bodies_that_are_wrong(shared: Served, path: str, body: bytes) -> None:
    error_of(shared.http.post(path, content=body), 400)


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def called(call: object, role: str = "assistant") -> dict[str, Any]:
    """A chat with a message that has a call."""
    return {"messages": [{"role": role, "content": "x", "tool_calls": [call]}]}


def tool(name: str, parameters: object = None) -> dict[str, Any]:
    """A function, as requests give it."""
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WRONG: list[tuple[str, dict[str, Any], str | None]] = [
    (TEXT, {"prompt": None}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": {}}, "prompt"),
    (TEXT, {"prompt": 5}, "prompt"),
    (TEXT, {"prompt": True}, "prompt"),
    (TEXT, {"prompt": ["x", 5]}, "prompt"),
    (TEXT, {"prompt": [5, "x"]}, "prompt"),
    (TEXT, {"prompt": [5, True]}, "prompt"),
    (TEXT, {"prompt": [[5], 5]}, "prompt"),
    (TEXT, {"prompt": [[[5]]]}, "prompt"),
    (TEXT, {"prompt": [5.5]}, "prompt"),
    (TEXT, {"prompt": [-1]}, "prompt"),
    (TEXT, {"prompt": [5, -1]}, "prompt"),
    (TEXT, {"prompt": [320]}, "prompt"),
    (TEXT, {"prompt": [320, 5]}, "prompt"),
    (TEXT, {"prompt": [2**63]}, "prompt"),
    (TEXT, {"prompt": ["x"] * 17}, "n"),
    (TEXT, {"prompt": ["x"] * 9, "n": 2}, "n"),
    (TEXT, {"prompt": "x", "suffix": "y"}, "suffix"),
    (TEXT, {"prompt": "x", "best_of": 3}, "best_of"),
    (TEXT, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    (TEXT, {"prompt": "x", "logprobs": 21}, "logprobs"),
    (TEXT, {"prompt": "x", "logprobs": True}, "logprobs"),
    (TEXT, {"prompt": "x", "max_tokens": -1, "echo": True}, "max_tokens"),
    (TEXT, {"prompt": "x", "stop_token_ids": 5}, "stop_token_ids"),
    (TEXT, {"prompt": "x", "stop_token_ids": [5, "x"]}, "stop_token_ids"),
    (TEXT, {"prompt": "x", "stop_token_ids": [True]}, "stop_token_ids"),
    (TEXT, {"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids"),
    (TEXT, {"prompt": "x", "stop_token_ids": [320]}, "stop_token_ids"),
    (TEXT, {"prompt": "x", "stop_token_ids": [2**80]}, "stop_token_ids"),
    (TEXT, {"prompt": "x", "stop_token_ids": [5] * 1025}, "stop_token_ids"),
    (TEXT, {"prompt": "x", "ignore_eos": 1}, "ignore_eos"),
    (TEXT, {"prompt": "x", "min_tokens": -1}, "min_tokens"),
    (TEXT, {"prompt": "x", "min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    (TEXT, {"prompt": "x", "min_tokens": 2**31}, "min_tokens"),
    (TEXT, {"prompt": "x", "skip_special_tokens": "no"}, "skip_special_tokens"),
    (TEXT, {"prompt": "x", "include_stop_str_in_output": 0}, "include_stop_str_in_output"),
    (CHAT, {"chat_template_kwargs": []}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    (CHAT, {"chat_template_kwargs": {"tools": [1]}}, "chat_template_kwargs.tools"),
    (CHAT, {"continue_final_message": "yes"}, "continue_final_message"),
    (
        CHAT,
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
    (TEXT, {"prompt": "x", "echo": "yes"}, "echo"),
    (TOKENS, {}, "prompt"),
    (TOKENS, {"prompt": 5}, "prompt"),
    (TOKENS, {"prompt": "x", "messages": USER}, "messages"),
    (TOKENS, {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
    (TOKENS, {"messages": []}, "messages"),
    (BACK, {}, "tokens"),
    (BACK, {"tokens": "x"}, "tokens"),
    (BACK, {"tokens": [[5]]}, "tokens"),
    (BACK, {"tokens": [True]}, "tokens"),
    (BACK, {"tokens": [-1]}, "tokens"),
    (BACK, {"tokens": [320]}, "tokens"),
    (BACK, {"tokens": [5], "token": 1}, "token"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "x"}, "messages"),
    (CHAT, {"messages": ["x"]}, "messages[0]"),
    (CHAT, {"messages": [{}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "tool"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    (CHAT, called(1), "messages[0].tool_calls[0]"),
    (CHAT, called({}), "messages[0].tool_calls[0].function"),
    (CHAT, called({"function": {}}), "messages[0].tool_calls[0].function.name"),
    *(
        (
            CHAT,
            called({"function": {"name": "f", "arguments": arguments}}),
            "messages[0].tool_calls[0].function.arguments",
        )
        for arguments in ({}, "{", "[]", "null", "[" * 5000)
    ),
    (CHAT, called(CALL, "user"), "messages[0].tool_calls"),
    (CHAT, called({**CALL, "id": 5}), "messages[0].tool_calls[0].id"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
    (CHAT, {"tools": {}}, "tools"),
    (CHAT, {"tools": [1]}, "tools[0]"),
    (CHAT, {"tools": [{}]}, "tools[0].type"),
    (CHAT, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {"tools": [tool("a b")]}, "tools[0].function.name"),
    (CHAT, {"tools": [tool("x" * 65)]}, "tools[0].function.name"),
    (CHAT, {"tools": [tool("f"), tool("f")]}, "tools"),
    (CHAT, {"tools": [tool("f")] * 129}, "tools"),
    (CHAT, {"tools": [tool("f", 5)]}, "tools[0].function.parameters"),
    (CHAT, {"tools": [tool("f", {"type": "string"})]}, "tools[0].function.parameters"),
    (CHAT, {"tools": [tool("f")]}, "tools"),  # the template says nothing of calls
    (CHAT, {"tools": [tool("f")], "tool_choice": "any"}, "tool_choice"),
    (CHAT, {"tools": [tool("f")], "tool_choice": ["auto"]}, "tool_choice"),
    (
        CHAT,
        {"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
    ),
    (
        CHAT,
        {
            "tools": [tool("f", {"properties": {"a": {"type": "nothing"}}})],
            "tool_choice": "required",
        },
        "tools",
    ),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"parallel_tool_calls": 1}, "parallel_tool_calls"),
    (CHAT, {"functions": [{}]}, "functions"),
    (CHAT, {"function_call": {"name": "f"}}, "function_call"),
    (RESPONSES, {}, "input"),
    (RESPONSES, {"input": ""}, "input"),
    (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"input": 5}, "input"),
    (RESPONSES, {"input": [5]}, "input[0]"),
    (RESPONSES, {"input": [{}]}, "input[0].role"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].type",
    ),
    (
        RESPONSES,
        {"input": [{"type": "function_call", "name": "f", "arguments": "["}]},
        "input[0].arguments",
    ),
    (RESPONSES, {"input": [{"type": "function_call_output"}]}, "input[0].output"),
    (RESPONSES, {"input": "x", "instructions": 5}, "instructions"),
    (RESPONSES, {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    (RESPONSES, {"input": "x", "store": True}, "store"),
    (RESPONSES, {"input": "x", "background": True}, "background"),
    (RESPONSES, {"input": "x", "conversation": "c"}, "conversation"),
    (RESPONSES, {"input": "x", "truncation": "auto"}, "truncation"),
    (RESPONSES, {"input": "x", "include": ["file_search_call.results"]}, "include"),
    (RESPONSES, {"input": "x", "reasoning": {"effort": "high"}}, "reasoning.effort"),
    (RESPONSES, {"input": "x", "n": 2}, "n"),
    (RESPONSES, {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    (RESPONSES, {"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
    (RESPONSES, {"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    (
        RESPONSES,
        {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}},
        "text.format",
    ),
    (RESPONSES, {"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    (RESPONSES, {"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
    (RESPONSES, {"input": "x", "temprature": 1}, "temprature"),
    (CHAT, {"modalities": ["audio"]}, "modalities"),
    (CHAT, {"audio": {}}, "audio"),
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"n": 10**9}, "n"),
    (CHAT, {"n": 1.5}, "n"),
    (CHAT, {"n": "1"}, "n"),
    (CHAT, {"n": True}, "n"),
    (CHAT, {"temperature": -1}, "temperature"),
    (CHAT, {"temperature": "hot"}, "temperature"),
    (CHAT, {"temperature": [1]}, "temperature"),
    (CHAT, {"top_p": 1.5}, "top_p"),
    (CHAT, {"top_k": -5}, "top_k"),
    (CHAT, {"min_p": 2}, "min_p"),
    (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
    (CHAT, {"frequency_penalty": 3}, "frequency_penalty"),
    (CHAT, {"presence_penalty": -3}, "presence_penalty"),
    (CHAT, {"seed": 2**64}, "seed"),
    (CHAT, {"seed": 1e30}, "seed"),
    (CHAT, {"max_tokens": -1}, "max_tokens"),
    (CHAT, {"max_completion_tokens": 1e308}, "max_completion_tokens"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"logprobs": 1}, "logprobs"),
    (CHAT, {"stream": "true"}, "stream"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"stream": True, "stream_options": []}, "stream_options"),
    (CHAT, {"stream": True, "stream_options": {"include_usage": 1}}, None),
    (CHAT, {"stop": ""}, "stop"),
    (CHAT, {"stop": [""]}, "stop"),
    (CHAT, {"stop": ["a"] * 5}, "stop"),
    (CHAT, {"stop": "a" * 513}, "stop"),
    (CHAT, {"stop": [5]}, "stop"),
    (CHAT, {"stop": {}}, "stop"),
    (CHAT, {"logit_bias": []}, "logit_bias"),
    (CHAT, {"logit_bias": {"x": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"-1": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"\u0665": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"9999": 1}}, None),
    (CHAT, {"logit_bias": {"5": 101}}, "logit_bias.5"),
    (CHAT, {"logit_bias": {"5": "x"}}, "logit_bias.5"),
    (CHAT, {"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    (CHAT, {"response_format": "json"}, "response_format"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {"guided_json": {}}, "guided_json"),
    (TEXT, {"prompt": "x", "x" * 50_000: 1}, None),
]


@pytest.mark.parametrize("path,body,param", WRONG, ids=range(len(WRONG)))
def test_fields_that_are_wrong(
    shared: Served, path: str, body: dict[str, Any], param: str | None
) -> None:
    if path == CHAT:
        body = {"messages": USER, **body}
    found = error_of(shared.http.post(path, json=body), 400)
    assert param is None or found["param"] == param
    assert found["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body,message",
    [
        ({"temperature": 9}, "temperature is 9; it should be less than or equal to 2"),
        ({"stop": [5]}, "stop has 5; it should be a valid string"),
        ({"stop": ["a"] * 5}, "stop is an array; it should have at most 4 items, not 5"),
        ({"logit_bias": {"x": 1}}, "logit_bias has 'x'; it should be a valid integer"),
        ({"messages": None}, "messages is missing; add it"),
        ({"messages": ["x"]}, "messages[0] is 'x'; it should be an object"),
        (
            called({"function": {"name": "f", "arguments": "{"}}),
            "messages[0].tool_calls[0].function.arguments is '{'; it should be the JSON text of an "
            "object",
        ),
    ],
    ids=range(7),
)
def test_sentences(shared: Served, body: dict[str, Any], message: str) -> None:
    """Each has the user's field and value, and what it should be."""
    response = shared.http.post(CHAT, json={"messages": USER, **body})
    assert error_of(response, 400)["message"] == message


def test_a_field_that_is_misspelt(shared: Served) -> None:
    """Else an answer would be drawn at temperature 1."""
    body = {"messages": USER, "temprature": 0}
    found = error_of(shared.http.post(CHAT, json=body), 400)
    text = "'temprature' is not a field of this request; 'temperature' is"
    assert (found["message"], found["param"]) == (text, "temprature")
    assert found["code"] == "unknown_field"


HARMLESS: list[dict[str, Any]] = [
    {"unknown": None, "user": "x", "store": True, "metadata": {}, "service_tier": "auto"},
    {"tools": [], "tool_choice": "none", "functions": None, "modalities": ["text"]},
    {"n": None, "stop": None, "temperature": None, "logit_bias": None, "stream": None},
    {"n": 1.0, "temperature": 1e-300, "logit_bias": {"5": -100}, "stop": []},
    {"response_format": {"type": "text"}, "top_k": -1},
    {"max_completion_tokens": 2, "max_tokens": 3},
]


@pytest.mark.parametrize("body", HARMLESS, ids=range(len(HARMLESS)))
def test_fields_that_are_harmless(shared: Served, body: dict[str, Any]) -> None:
    response = shared.http.post(CHAT, json={"messages": USER, "max_tokens": 2, **body})
    assert response.status_code == 200, response.text


def test_a_body_that_is_too_large(shared: Served) -> None:
    body = json.dumps({"prompt": "x" * 100_000}).encode()
    found = error_of(shared.http.post(TEXT, content=body), 413)
    assert found["message"] == "the request is larger than 100000 bytes"

    def chunks() -> Iterator[bytes]:  # without a length
        yield from [b" " * 10_000] * 20

    error_of(shared.http.post(TEXT, content=chunks()), 413)


def test_paths_and_methods_that_there_are_not(shared: Served) -> None:
    error_of(shared.http.get("/v1/nothing"), 404)
    error_of(shared.http.get("/../../etc/passwd"), 404)
    error_of(shared.http.post("/v1/models/"), 405)
    error_of(shared.http.get(CHAT), 405)
    error_of(shared.http.post("/v1/models", json={}), 405)
    assert "POST" in shared.http.get(TEXT).headers["Allow"]


NAMES = """model prompt messages n stream stop temperature top_p top_k min_p seed logit_bias
logprobs top_logprobs max_tokens max_completion_tokens echo suffix best_of stream_options tools
tool_choice function name parameters arguments tool_calls input instructions text format
response_format frequency_penalty repetition_penalty role content type json_schema schema"""
FIELDS = st.sampled_from(NAMES.split())
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=()), max_size=8)
    | st.sampled_from(
        ["llama", "user", "text", "json_schema", "json_object", "function", "required"]
    ),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(FIELDS | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.slow
@given(st.sampled_from([CHAT, TEXT, RESPONSES]), st.dictionaries(FIELDS, VALUES, max_size=8))
def test_random_bodies_never_fail(shared: Served, path: str, body: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"max_output_tokens" if path == RESPONSES else "max_tokens": 2}
    if len(body) % 2:  # so that some requests get further
        usual |= {CHAT: {"messages": USER}, TEXT: {"prompt": "x"}, RESPONSES: {"input": "x"}}[path]
        body = {name: value for name, value in body.items() if name not in usual}
    body = {**body, **usual}
    response = shared.http.post(path, content=json.dumps(body).encode())
    if response.status_code != 200:
        assert response.status_code in (400, 404), response.text
        error_of(response, response.status_code)
    assert shared.http.get("/health", timeout=TIMEOUT).status_code == 200
