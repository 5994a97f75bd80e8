"""Tools in chats, as OpenAI's client sends and reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lazily import lazily
from serve.calling_model import (
    ARGUMENTS,
    CALL,
    MALFORMED,
    NOW,
    TOOLS,
    WEATHER,
    calling_folder,
)
from serve.scripted_engine import Engine, forever, says
from serve.servers import Served, serving

from onnxpar.serve.tool_families import FAMILIES

jsonschema = lazily("jsonschema")
openai = lazily("openai")
tokenizers = lazily("tokenizers")
USER: list[Any] = [{"role": "user", "content": "hello"}]
Serve = Callable[..., Served]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer with a template for tools."""
    return calling_folder(tmp_path)


def chat(served: Served, messages: Any = USER, **options: Any) -> Any:
    """The only choice of an answer, whole; the streamed one is the same."""
    create = served.openai.chat.completions.create
    given = {"model": "llama", "messages": messages, "tools": TOOLS, "seed": 5, **options}
    (choice,) = create(**given).choices
    content, calls, finish = "", dict[int, dict[str, Any]](), None
    for chunk in create(**given, stream=True):
        delta, finish = chunk.choices[0].delta, chunk.choices[0].finish_reason
        content += delta.content or ""
        for call in delta.tool_calls or ():
            if call.id is not None:
                calls[call.index] = {"name": call.function.name, "arguments": ""}
            calls[call.index]["arguments"] += call.function.arguments
    made = [call.function.model_dump() for call in choice.message.tool_calls or ()]
    assert (choice.message.content or "", made) == (content, list(calls.values()))
    assert choice.finish_reason == finish
    return choice


def test_a_call(calling: Served) -> None:
    calling.engine.script = says(f"I look. {CALL}\n{NOW}")
    choice = chat(calling)
    assert choice.message.content == "I look." and choice.finish_reason == "tool_calls"
    first, second = choice.message.tool_calls
    assert (first.type, first.function.name) == ("function", "weather")
    assert first.function.arguments == ARGUMENTS and first.id != second.id
    assert (second.function.name, second.function.arguments) == ("now", "{}")
    calling.engine.script = says(CALL)
    assert chat(calling).message.content is None
    calling.engine.script = says("No call.")
    choice = chat(calling, tool_choice="auto")
    assert choice.message.content == "No call." and choice.message.tool_calls is None
    assert choice.finish_reason == "stop"


def test_the_client_accumulates_a_stream(calling: Served) -> None:
    calling.engine.script = says(f"I look. {CALL}{NOW}")
    create = calling.openai.chat.completions.stream
    with create(model="llama", messages=USER, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        (choice,) = stream.get_final_completion().choices
    assert kinds.count("tool_calls.function.arguments.delta") > 5
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert choice.message.content == "I look." and choice.finish_reason == "tool_calls"
    functions = [call.function for call in choice.message.tool_calls or ()]
    assert [(f.name, f.arguments) for f in functions] == [("weather", ARGUMENTS), ("now", "{}")]


def test_the_template_is_given_tools_and_calls(calling: Served) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "warm"},
    ]
    chat(calling, messages)
    tools = "".join(map(json.dumps, TOOLS))
    called = f"<s>assistant: <tool_call>weather:{ARGUMENTS}Paris</s><s>tool: warm</s>"
    wanted = f"<s>tools: {tools} write <tool_call></s><s>user: hello</s>{called}<s>assistant:"
    prompt = calling.engine.generations[0].prompt
    assert calling.engine.tokenizer.decode(prompt, specials=True) == wanted
    body = {"messages": messages, "tools": TOOLS}
    assert calling.http.post("/tokenize", json=body).json()["tokens"] == prompt


def test_none_calls_no_tool(calling: Served) -> None:
    calling.engine.script = says(CALL)
    choice = chat(calling, tool_choice="none")
    assert choice.message.content == CALL and choice.finish_reason == "stop"
    tokenizer = calling.engine.tokenizer
    assert calling.engine.generations[0].prompt == tokenizer.chat(USER)


def test_one_call_at_most(calling: Served) -> None:
    calling.engine.script = says(f"{CALL}{NOW} and more")
    (call,) = chat(calling, parallel_tool_calls=False).message.tool_calls
    assert call.function.name == "weather"
    assert calling.engine.generations[0].is_cancelled


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_calls_that_must_be_made(served: Served, choice: Any) -> None:
    """Of a template that says nothing of tools, too."""
    for start in range(60, 64):
        served.engine.script = lambda prompt, limits, start=start: forever(prompt, limits, start)
        found = chat(served, tool_choice=choice, parallel_tool_calls=False, max_tokens=200)
        (call,) = found.message.tool_calls
        assert found.finish_reason == "tool_calls" and found.message.content is None
        arguments = json.loads(call.function.arguments)
        if choice != "required" or call.function.name == "weather":
            assert call.function.name == "weather"
            jsonschema.validate(arguments, WEATHER)


@pytest.mark.parametrize("family", ["qwen3_coder", "glm45", "kimi_k2"])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_calls_that_must_be_made_are_json_for_each_family(
    serve: Serve, family: str, choice: Any
) -> None:
    served = serve(tool_call_parser=family)
    for start in range(60, 64):
        served.engine.script = lambda prompt, limits, start=start: forever(prompt, limits, start)
        found = chat(served, tool_choice=choice, parallel_tool_calls=False, max_tokens=200)
        (call,) = found.message.tool_calls
        if choice != "required" or call.function.name == "weather":
            jsonschema.validate(json.loads(call.function.arguments), WEATHER)


def test_several_calls_must_be_made(served: Served) -> None:
    seen = set()
    for start in range(60, 64):
        served.engine.script = lambda prompt, limits, start=start: forever(prompt, limits, start)
        choice = chat(served, tool_choice="required", max_tokens=200)
        for call in choice.message.tool_calls or ():
            if choice.finish_reason == "tool_calls":
                json.loads(call.function.arguments)
            seen.add(call.function.name)
    assert seen == {"weather", "now"}


def test_a_call_or_json(served: Served) -> None:
    """With a schema of answers, calls are constrained, too."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": [1, 2]}}}
    served.engine.script = forever
    found = chat(served, response_format=form, max_tokens=200)
    if found.message.tool_calls:
        assert found.finish_reason == "tool_calls"
    else:
        assert json.loads(found.message.content) == [1, 2]


def test_malformed_calls_are_content(calling: Served) -> None:
    calling.engine.script = says(MALFORMED)
    create = calling.openai.chat.completions.create
    (choice,) = create(model="llama", messages=USER, tools=TOOLS).choices
    assert choice.message.content == MALFORMED and choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    chunks = [*create(model="llama", messages=USER, tools=TOOLS, stream=True)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == MALFORMED
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_call_that_is_cut(calling: Served) -> None:
    """As OpenAI has it, it is a call, whose arguments are no JSON."""
    calling.engine.script = says(CALL)
    choice = chat(calling, max_tokens=50)
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "length" and choice.message.content is None
    assert ARGUMENTS.startswith(call.function.arguments) and call.function.arguments != ARGUMENTS
    choice = chat(calling, max_tokens=10)
    assert choice.finish_reason == "length" and CALL.startswith(choice.message.content)


def test_markers_that_are_special_tokens(serve: Serve, folder: Path) -> None:
    """They are read, but no content; other special tokens are neither."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[OTHER]"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("[TOOL_CALLS]")
    engine = Engine(folder)
    engine.vocabulary = 400
    ids = tokenizer.encode('[OTHER]Yes. [TOOL_CALLS][{"name": "now", "arguments": {}}]').ids
    engine.script = lambda prompt, limits: iter(ids)
    served = serve(engine=engine)
    choice = chat(served)
    assert choice.message.content == "Yes." and len(choice.message.tool_calls) == 1
    logprobs = chat(served, logprobs=True).logprobs.content
    assert len(logprobs) == len(ids)  # also those of a call
    assert chat(served, tool_choice="none").message.content.startswith("Yes. [{")
    ids = tokenizer.encode("[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}").ids
    (call,) = chat(served).message.tool_calls
    assert (call.function.name, call.function.arguments) == ("now", "{}")


def test_how_calls_are_written_may_be_said(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser") as found:
        chat(served)
    assert found.value.code == "no_tool_call_parser" and found.value.param == "tools"
    with serving(tool_call_parser="pythonic") as other:
        other.engine.script = says("[weather(city='Paris', days=3)]")
        (call,) = chat(other).message.tool_calls
        assert call.function.arguments == ARGUMENTS


FORMS = {
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
}


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("family", FORMS)
def test_forms_by_their_templates(
    serve: Serve, folder: Path, family: str, is_special: bool
) -> None:
    """Also where their marks are special tokens. The schema says what texts are."""
    (folder / "chat_template.jinja").write_text(FORMS[family])
    if is_special:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_special_tokens([*FAMILIES[family].special])
        tokenizer.save(str(folder / "tokenizer.json"))
    engine = Engine(folder)
    engine.vocabulary, engine.longest = 400, 1024
    ids = engine.tokenizer.encode(f"I look. {FORMS[family]}", specials=False)
    engine.script = lambda prompt, limits: iter(ids)
    choice = chat(serve(engine=engine))
    assert choice.message.content == "I look." and choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)


def test_ids_in_prompts_of_kimi(serve: Serve, folder: Path) -> None:
    """They have the names of calls and their numbers in the chat, whatever clients send."""
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% for c in m.tool_calls or [] %}<|tool_calls_section_begin|>"
        "{{ c.id }};{% endfor %}{% if m.tool_call_id %}of {{ m.tool_call_id }};{% endif %}"
        "{% endfor %}"
    )
    served = serve(engine=Engine(folder))
    calls = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for id_, name in (("a1", "now"), ("b2", "weather"), ("a1", "now"))
    ]
    messages = [
        *USER,
        {"role": "assistant", "tool_calls": calls[:2]},
        *({"role": "tool", "tool_call_id": id_, "content": "x"} for id_ in ("b2", "a1", "c3")),
        {"role": "assistant", "tool_calls": calls[2:]},
        {"role": "tool", "tool_call_id": "a1", "content": "x"},
    ]
    chat(served, messages)
    mark = "<|tool_calls_section_begin|>"
    prompt = served.engine.generations[0].prompt
    assert served.engine.tokenizer.decode(prompt) == (
        f"{mark}functions.now:0;{mark}functions.weather:1;of functions.weather:1;"
        f"of functions.now:0;of c3;{mark}functions.now:2;of functions.now:2;"
    )
    assert messages[1] == {"role": "assistant", "tool_calls": calls[:2]}


def test_tools_of_several_answers(calling: Served) -> None:
    texts = [CALL, "No call.", NOW]
    calling.engine.script = lambda prompt, limits: says(texts[limits.row])(prompt, limits)
    answer = calling.openai.chat.completions.create(model="llama", messages=USER, tools=TOOLS, n=3)
    finishes = [choice.finish_reason for choice in answer.choices]
    assert finishes == ["tool_calls", "stop", "tool_calls"]


def test_a_template_for_tools(folder: Path) -> None:
    """Of several templates, that named tool_use, as in Transformers."""
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }}[TOOL_CALLS]"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with serving(engine=Engine(folder)) as served:
        tokens = [
            served.http.post("/tokenize", json={"messages": USER, **more}).json()["tokens"]
            for more in ({}, {"tools": TOOLS})
        ]
    texts = [served.engine.tokenizer.decode(each) for each in tokens]
    assert texts == ["plain", "2[TOOL_CALLS]"]
