"""/v1/responses, as OpenAI's client sends and reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lazily import lazily
from serve.calling_model import (
    ARGUMENTS,
    CALL,
    FUNCTIONS,
    MALFORMED,
    NOW,
    WEATHER,
)
from serve.scripted_engine import FOLDER, forever, says
from serve.servers import Served

from onnxpar.llm.tokenizer import Tokenizer

jsonschema = lazily("jsonschema")
openai = lazily("openai")
TOOLS: list[Any] = [{"type": "function", **function} for function in FUNCTIONS]
ADDED, DONE = "response.output_item.added", "response.output_item.done"


def events_of(calling: Served, **options: Any) -> list[Any]:
    """The events of a stream. The client has put the response together from them: it is that which
    is answered without a stream."""
    given = {"model": "llama", "input": "hello", **options}
    with calling.openai.responses.stream(**given) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    whole = told(calling.openai.responses.create(**given))
    assert told(events[-1].response) == whole
    return events


def told(response: Any) -> dict[str, Any]:
    """A response without what differs from one to the next."""
    found: dict[str, Any] = json.loads(response.model_dump_json())
    for each in (found, *found["output"]):
        for name in ("id", "created_at", "call_id", "parsed_arguments"):
            each.pop(name, None)
        for part in each.get("content") or ():
            part.pop("parsed", None)
    return found


def test_a_text(calling: Served) -> None:
    response = calling.openai.responses.create(model="llama", input="hello")
    assert response.output_text == "Hello, world!" and response.status == "completed"
    (message,) = response.output
    assert message.type == "message" and message.role == "assistant"
    assert message.status == "completed" and message.id.startswith("msg_")
    (generation,) = calling.engine.generations
    tokenizer = Tokenizer(FOLDER)
    assert generation.prompt == tokenizer.chat([{"role": "user", "content": "hello"}])
    usage = response.usage
    assert usage is not None and usage.input_tokens == len(generation.prompt)
    assert usage.output_tokens == generation.number
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 2
    assert response.id.startswith("resp_") and response.model == "llama"
    assert response.tools == [] and response.temperature == 1 and response.store is False


def test_events_of_a_text(calling: Served) -> None:
    events = events_of(calling)
    names = [event.type.removeprefix("response.") for event in events[2:]]
    assert names[:2] == ["output_item.added", "content_part.added"]
    deltas = names.count("output_text.delta")
    assert deltas > 2 and names[2 : 2 + deltas] == ["output_text.delta"] * deltas
    ends = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert names[2 + deltas :] == ends
    text = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(text) == "Hello, world!" == events[-4].text == events[-1].response.output_text


def test_names_of_events(calling: Served) -> None:
    """Each event has its type as its name, and no [DONE] follows."""
    response = calling.http.post("/v1/responses", json={"input": "hello", "stream": True})
    lines = [event.split("\n") for event in response.text.removesuffix("\n\n").split("\n\n")]
    for name, data in lines:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert lines[-1][0] == "event: response.completed"


def test_items_of_the_input(calling: Served) -> None:
    """They are messages of a chat; calls belong to the message before them."""
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": ARGUMENTS},
        {"type": "function_call", "call_id": "2", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "warm"},
        {
            "type": "function_call_output",
            "call_id": "2",
            "output": [{"type": "input_text", "text": "noon"}],
        },
        {"type": "function_call", "call_id": "3", "name": "now", "arguments": "{}"},
    ]
    calling.openai.responses.create(model="llama", input=items, instructions="be polite")
    calls = [
        {"id": str(at), "function": {"name": name, "arguments": json.loads(arguments)}}
        for at, name, arguments in ((1, "weather", ARGUMENTS), (2, "now", "{}"), (3, "now", "{}"))
    ]
    messages = [
        {"role": "system", "content": "be polite\n\nbe brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls[:2]},
        {"role": "tool", "content": "warm", "tool_call_id": "1"},
        {"role": "tool", "content": "noon", "tool_call_id": "2"},
        {"role": "assistant", "content": None, "tool_calls": calls[2:]},
    ]
    tokenizer = calling.engine.tokenizer
    assert calling.engine.generations[0].prompt == tokenizer.chat(messages)


def test_instructions(calling: Served) -> None:
    response = calling.openai.responses.create(
        model="llama", input="hello", instructions="be brief"
    )
    assert response.instructions == "be brief"
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert calling.engine.generations[0].prompt == Tokenizer(FOLDER).chat(messages)


def test_calls(calling: Served) -> None:
    calling.engine.script = says(f"I look. {CALL}\n{NOW}")
    events = events_of(calling, tools=TOOLS)
    response = events[-1].response
    text, first, second = response.output
    assert response.output_text == "I look." and text.status == "completed"
    assert (first.type, first.name, first.arguments) == ("function_call", "weather", ARGUMENTS)
    assert (second.name, second.arguments, second.status) == ("now", "{}", "completed")
    assert first.call_id != second.call_id and first.id != second.id
    assert [e.item.type for e in events if e.type == ADDED] == [
        item.type for item in response.output
    ]
    kind = "response.function_call_arguments.delta"
    deltas = [e.delta for e in events if e.type == kind and e.output_index == 1]
    assert "".join(deltas) == ARGUMENTS and len(deltas) > 3
    (done, _) = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert done.arguments == ARGUMENTS and done.item_id == first.id
    assert response.tools[0].name == "weather"


def test_calls_that_must_be_made(calling: Served) -> None:
    calling.engine.script = forever
    for choice in ("required", {"type": "function", "name": "weather"}):
        response = calling.openai.responses.create(
            model="llama",
            input="hello",
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            max_output_tokens=200,
        )
        (call,) = response.output
        assert call.type == "function_call" and response.status == "completed"
        if call.name == "weather":
            jsonschema.validate(json.loads(call.arguments), WEATHER)


def test_malformed_calls_are_text(calling: Served) -> None:
    calling.engine.script = says(MALFORMED)
    response = calling.openai.responses.create(model="llama", input="hello", tools=TOOLS)
    assert response.output_text == MALFORMED and len(response.output) == 1
    with calling.openai.responses.stream(model="llama", input="hello", tools=TOOLS) as stream:
        final = stream.get_final_response()
    call, _ = final.output  # what has been sent of it cannot be taken back
    assert final.output_text == MALFORMED and call.status == "incomplete"


def test_a_schema(calling: Served) -> None:
    calling.engine.script = forever
    form = {"type": "json_schema", "name": "x", "schema": WEATHER, "strict": True}
    response = calling.openai.responses.create(
        model="llama", input="x", text={"format": form}, max_output_tokens=200
    )
    jsonschema.validate(json.loads(response.output_text), WEATHER)
    assert response.text is not None and response.text.format.type == "json_schema"
    wrong = {"input": "x", "text": {"format": {**form, "schema": {"type": "nothing"}}}}
    error = calling.http.post("/v1/responses", json=wrong).json()["error"]
    assert error["param"] == "text.format" and "Invalid type: nothing" in error["message"]


def test_the_length_ends_a_response(calling: Served) -> None:
    calling.engine.script = forever
    events = events_of(calling, max_output_tokens=5, temperature=0.5, top_p=0.25)
    response = events[-1].response
    assert events[-1].type == "response.incomplete" and response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 5 and response.output[0].status == "incomplete"
    limits = calling.engine.generations[0].limits
    assert limits.max_new_tokens == 5
    assert (limits.sampling.temperature, limits.sampling.top_p) == (0.5, 0.25)


def test_errors(calling: Served) -> None:
    create = calling.openai.responses.create
    with pytest.raises(openai.NotFoundError):
        create(model="gpt-5", input="x")
    with pytest.raises(openai.BadRequestError, match="send the whole conversation as input"):
        create(model="llama", input="x", previous_response_id="resp_1")
    calling.engine.script, calling.engine.delay = forever, 0.01
    stream = create(model="llama", input="x", stream=True)
    next(stream)
    calling.engine.fails = True
    with pytest.raises(openai.APIError, match="cannot finish"):
        list(stream)
