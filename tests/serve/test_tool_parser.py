"""Calls of tools in the text of answers, as the cards of models and vLLM's pages show them."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import ANY

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve.parsed_calls import FUNCTIONS, Case, check, parsed
from serve.test_call_forms import GLM, KIMI, QWEN

from onnxpar.serve.answer_parts import CallArguments, CallBegin, CallEnd, Text
from onnxpar.serve.tool_families import FAMILIES, family_of
from onnxpar.serve.tool_parser import ToolParser

PARIS = ("get_weather", {"city": "Paris", "days": 3})
ROME = ("get_weather", {"city": 'R"o\\m}e]', "days": [1, {"a": None}]})
NOW: tuple[str, dict[str, Any]] = ("now", {})


def written(call: tuple[str, dict[str, Any]], key: str = "arguments") -> str:
    """A call as a JSON object."""
    return json.dumps({"name": call[0], key: call[1]})


def deepseek(*calls: str) -> str:
    """Calls between the markers of DeepSeek."""
    begin, end = (f"<\uff5ctool\u2581call{{}}\u2581{at}\uff5c>" for at in ("begin", "end"))
    each = "\n".join(begin.format("") + call + end.format("") for call in calls)
    return begin.format("s") + each + end.format("s")


SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
ROME_JSON = json.dumps(ROME[1])
CASES: tuple[Case, ...] = (
    (
        "lfm2",
        '<|tool_call_start|>[get_candidate_status(candidate_id="12345")]<|tool_call_end|>Checking.',
        "Checking.",
        [("get_candidate_status", {"candidate_id": "12345"})],
    ),
    ("hermes", f"<tool_call>\n{written(PARIS)}\n</tool_call>", "", [PARIS]),
    (
        "hermes",
        f"Let me see.\n\n<tool_call>\n{written(ROME)}\n</tool_call>\n<tool_call>\n{written(NOW)}\n"
        "</tool_call>\n",
        "Let me see.",
        [ROME, NOW],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"city": "x"}, "name": "f"}</tool_call>',
        "",
        [("f", {"city": "x"})],
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call> Done. ', " Done. ", [NOW]),
    ("hermes", "a < b <tool b <tool_cal", "a < b <tool b <tool_cal", []),
    ("hermes", " \n", " \n", []),
    ("hermes", written(PARIS), written(PARIS), []),
    ("granite", f"<|tool_call|>[{written(PARIS)}, {written(NOW)}]", "", [PARIS, NOW]),
    ("granite", f"<tool_call>[{written(ROME)}]", "", [ROME]),
    ("phi4_mini_json", f"functools[{written(PARIS)},{written(NOW)}]", "", [PARIS, NOW]),
    (
        "phi4_mini_json",
        f'<|tool_call|>[{{"type": "function", "function": {written(PARIS)}}}]<|/tool_call|>',
        "",
        [PARIS],
    ),
    ("mistral", f"[TOOL_CALLS] [{written(PARIS)}, {written(ROME)}]", "", [PARIS, ROME]),
    ("mistral", f"Yes.[TOOL_CALLS]get_weather{ROME_JSON}[TOOL_CALLS]now{{}}", "Yes.", [ROME, NOW]),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{ROME_JSON}", "", [ROME]),
    ("llama3_json", written(PARIS, "parameters"), "", [PARIS]),
    ("llama3_json", f"<|python_tag|>{written(ROME, 'parameters')}", "", [ROME]),
    (
        "llama3_json",
        f"{written(PARIS, 'parameters')}; {written(NOW, 'parameters')}",
        "",
        [PARIS, NOW],
    ),
    ("llama3_json", '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', []),
    ("llama3_json", f"It is {written(PARIS)}.", f"It is {written(PARIS)}.", []),
    ("llama3_json", "[1, 2, 3]", "[1, 2, 3]", []),
    ("pythonic", "[get_weather(city='Paris', days=3), now()]", "", [PARIS, NOW]),
    (
        "pythonic",
        "[math.add(a=-1.5e3, b=[True, None, 'x,)'])]",
        "",
        [("math.add", {"a": -1500.0, "b": [True, None, "x,)"]})],
    ),
    (
        "pythonic",
        "[now(a=true, b=null, c=[false])]",
        "",
        [("now", {"a": True, "b": None, "c": [False]})],
    ),
    ("pythonic", "[unknown(a=1)]", "[unknown(a=1)]", []),
    (
        "llama4_pythonic",
        '<|python_start|>[get_weather(city="Paris", days=3)]<|python_end|>',
        "",
        [PARIS],
    ),
    (
        "deepseek_v3",
        deepseek(
            f"function{SEPARATOR}get_weather\n```json\n{ROME_JSON}\n```",
            f"function{SEPARATOR}now\n```json\n{{}}\n```",
        ),
        "",
        [ROME, NOW],
    ),
    (
        "deepseek_v31",
        "So: " + deepseek(f"get_weather{SEPARATOR}{ROME_JSON}", f"now{SEPARATOR}{{}}"),
        "So:",
        [ROME, NOW],
    ),
)
GOOD = f"<tool_call>{written(NOW)}</tool_call>"
WRONG = (  # family, and text that is all content
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call>\n</tool_call>"),
    ("hermes", "a <tool_call>not json</tool_call> b"),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": nope}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "x'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"function": {"function": {}}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now\\'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a":' + "[" * 2000 + "]" * 2000 + "}}"),
    ("mistral", "[TOOL_CALLS] what is that?" * 30),
    ("llama3_json", '{"name": "now", "age": 5}'),
    ("pythonic", "[now(1)]"),
    ("pythonic", "[now(a=open)]"),
    ("pythonic", "[now(a=1e999)]"),
    ("pythonic", "[now(a={1, 2})]"),
    ("pythonic", "[now(a=" + "9" * 5000 + ")]"),
    ("pythonic", "[now(a=" + "(" * 2000 + ")" * 2000 + ")]"),
    ("deepseek_v31", deepseek(f"two words{SEPARATOR}{{}}")),
)
PARTLY_WRONG: tuple[Case, ...] = (
    ("hermes", f"<tool_call>{{</tool_call> {GOOD}", "<tool_call>{</tool_call>", [NOW]),
    ("hermes", f"{GOOD} <tool_call>{{</tool_call>", " <tool_call>{</tool_call>", [NOW]),
    ("mistral", f"[TOOL_CALLS][{written(NOW)}, 5]", ", 5]", [NOW]),
    ("mistral", f"[TOOL_CALLS][{written(NOW)}", "", [NOW]),
)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_calls(case: Case) -> None:
    assert set(check(*case)) <= {"right"}


@pytest.mark.parametrize("family,text", WRONG, ids=range(len(WRONG)))
def test_malformed_calls_are_content(family: str, text: str) -> None:
    assert set(check(family, text, text, [])) <= {"malformed"}


@pytest.mark.parametrize("case", PARTLY_WRONG, ids=range(len(PARTLY_WRONG)))
def test_right_calls_beside_malformed_ones(case: Case) -> None:
    check(*case)


def test_arguments_come_in_pieces() -> None:
    """As the model writes them, as soon as the name is known."""
    parser = ToolParser(FAMILIES["hermes"], FUNCTIONS)
    assert parser.add('Hi <tool_call>{"name": "now", "arg') == [
        Text("Hi"),
        CallBegin(0, ANY, "now"),
    ]
    assert parser.add('uments": {"a"') == [CallArguments(0, '{"a"')]
    assert parser.add(': "b}') == [CallArguments(0, ': "b}')]
    assert parser.add('"}') == [CallArguments(0, '"}')]
    assert parser.add("}") == [CallEnd(0, "right")]


def test_a_call_that_is_cut_stays_a_call() -> None:
    parser = ToolParser(FAMILIES["hermes"], FUNCTIONS)
    assert parser.add('<tool_call>{"name": "now"') == [CallBegin(0, ANY, "now")]
    assert parser.add(', "arguments": {"a"', is_last=True, is_cut=True) == [
        CallArguments(0, '{"a"'),
        CallEnd(0, "cut"),
    ]
    parser = ToolParser(FAMILIES["hermes"], FUNCTIONS)
    assert parser.add('<tool_call>{"na', is_last=True, is_cut=True) == [Text('<tool_call>{"na')]


def test_text_without_calls_comes_at_once() -> None:
    parser = ToolParser(FAMILIES["mistral"], FUNCTIONS)
    assert parser.add("a [TOOL") == [Text("a")]
    assert parser.add("S] b ") == [Text(" [TOOLS] b")]
    assert parser.add("c") == [Text(" c")]


def test_families_of_templates() -> None:
    signs = {
        "hermes": "within <tool_call></tool_call> XML tags",
        "granite": "respond with <|tool_call|> followed by a JSON list",
        "phi4_mini_json": "{{ '<|tool|>' + tools + '<|/tool|>' }} <|tool_call|>",
        "lfm2": "List of tools: <|tool_list_start|>[",
        "mistral": "{{- '[TOOL_CALLS] [' }}",
        "llama3_json": '{"name": function name, "parameters": dictionary}',
        "llama4_pythonic": "{{- '<|python_start|>' }}",
        "pythonic": "[func_name1(params_name1=params_value1, ...)]",
        "deepseek_v3": "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        "qwen3_coder": r"with NO suffix:\n\n<tool_call>\n<function=name>\n<parameter=key>\nvalue",
        "glm45": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>",
        "kimi_k2": "{% macro render_toolcalls(message) %}<|tool_calls_section_begin|>",
    }
    for name, text in signs.items():
        assert family_of(text) is FAMILIES[name]
    assert family_of("{{ messages }}") is None
    for other in (
        "<tool_call>\n<function=name>",
        "<seed:tool_call>\n<function=name>\n<parameter=a>",
    ):
        assert family_of(other) is None


FRAGMENTS = [
    *("{", "}", "[", "]", "(", ")", ",", ":", ";", '"', "'", "\\", " ", "\n", "=", "<", ">"),
    *('"name"', '"arguments"', '"parameters"', '"function"', '"type"', '"now"', "now", "x"),
    *(written(NOW), written(ROME), "now(a=1)", "[now()]", "-1.5", "null"),
    *("[ARGS]", SEPARATOR, "function", "```json"),
]


def fragments_of(name: str) -> st.SearchStrategy[tuple[str, list[str]]]:
    """A family, and what texts with its calls, and others, may have."""
    family = FAMILIES[name]
    own = [*family.special, *(family.argument or ())[::2]]
    texts = [text for of, text, *_ in (*CASES, *QWEN, *GLM, *KIMI) if FAMILIES[of] is family]
    ends = st.integers(0, max(map(len, texts)))
    cut = st.builds(lambda text, begin, end: text[begin:end], st.sampled_from(texts), ends, ends)
    drawn = st.sampled_from([*FRAGMENTS, *own]) | st.sampled_from([*own, *texts]) | cut
    return st.tuples(st.just(name), st.lists(drawn, max_size=8))


@settings(max_examples=400)
@given(st.sampled_from([*FAMILIES]).flatmap(fragments_of), st.booleans())
def test_any_text_is_content_or_calls(drawn: tuple[str, list[str]], is_cut: bool) -> None:
    """It does not matter how it comes, and what has no call is content."""
    family, fragments = drawn
    text = "".join(fragments)
    whole = parsed(family, [text], is_cut)
    assert parsed(family, list(text), is_cut) == whole == parsed(family, fragments, is_cut)
    content, calls, _ = whole
    assert calls or content == text
