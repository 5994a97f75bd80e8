"""Calls of Qwen3-Coder, GLM-4.5 and Kimi-K2, as their makers, vLLM and SGLang show them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serve.parsed_calls import FUNCTIONS, Case, check, parsed

from onnxpar.serve.answer_parts import CallArguments, CallBegin, CallEnd, Text
from onnxpar.serve.tool_families import FAMILIES
from onnxpar.serve.tool_parser import ToolParser

NOW: tuple[str, dict[str, Any]] = ("now", {})
DALLAS = ("get_current_weather", {"city": "Dallas", "state": "TX", "unit": "fahrenheit"})
ORLANDO = ("get_current_weather", {"city": "Orlando", "state": "FL", "unit": "fahrenheit"})
CODE = "\n\n  if a < b and c > d:\n\treturn \"<tool_call>\\n\" + '</b>'\n\n"
"""A text that a value keeps as it is."""


def qwen(name: str, **arguments: str) -> str:
    """A call as the template of Qwen3-Coder writes it."""
    each = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{each}</function>\n</tool_call>"


def glm(name: str, **arguments: str) -> str:
    """A call as the template of GLM-4.5 writes it."""
    each = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items()
    )
    return f"<tool_call>{name}\n{each}</tool_call>"


def kimi(*calls: str, space: str = "") -> str:
    """Calls between the markers of Kimi-K2."""
    marks = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    begin, middle, end = (f"{space}{mark}{space}" for mark in marks)
    each = "".join(f"{begin}{call.replace('|', middle)}{end}" for call in calls)
    return f"<|tool_calls_section_begin|>{each}<|tool_calls_section_end|>"


QWEN: tuple[Case, ...] = (
    ("qwen3_coder", qwen(DALLAS[0], **DALLAS[1]), "", [DALLAS]),
    (
        "qwen3_coder",
        "Let me calculate that area for you."
        + qwen("calculate_area", shape="circle", dimensions='{"radius": 15.5}', precision="3"),
        "Let me calculate that area for you.",
        [("calculate_area", {"shape": "circle", "dimensions": {"radius": 15.5}, "precision": 3})],
    ),
    (
        "qwen3_coder",
        qwen("calculate_area", dimensions='{"width": 10, \n "height": 20}'),
        "",
        [("calculate_area", {"dimensions": {"width": 10, "height": 20}})],
    ),
    (
        "qwen3_coder",
        f"Both:\n\n{qwen(DALLAS[0], **DALLAS[1])}\n{qwen(ORLANDO[0], **ORLANDO[1])}\n",
        "Both:",
        [DALLAS, ORLANDO],
    ),
    (  # as Qwen's parser reads it, the outer marks may be missing
        "qwen3_coder",
        "Yes.\n<function=get_current_weather>\n<parameter=city>\nDallas\n</parameter>\n</function>",
        "Yes.",
        [("get_current_weather", {"city": "Dallas"})],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=now></function><function=now>\n</function></tool_call> Done.",
        " Done.",
        [NOW, NOW],
    ),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</tool_call>", "", [NOW]),
    (
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>Paris</parameter>"
        "<parameter=days>3</parameter></function></tool_call>",
        "",
        [("get_weather", {"city": "Paris", "days": 3})],
    ),
    ("qwen3_coder", qwen("types", string=CODE), "", [("types", {"string": CODE})]),
    ("qwen3_coder", qwen("types", string=""), "", [("types", {"string": ""})]),
    ("qwen3_coder", "<parameter=string>\n</parameter>", "<parameter=string>\n</parameter>", []),
    (
        "qwen3_coder",
        qwen("types", string="42", integer="42", number="-3.5", boolean="true"),
        "",
        [("types", {"string": "42", "integer": 42, "number": -3.5, "boolean": True})],
    ),
    (  # its template writes Python's words
        "qwen3_coder",
        qwen("types", string="True", boolean="False", object="{'a': None}", array="[1]"),
        "",
        [("types", {"string": "True", "boolean": False, "object": {"a": None}, "array": [1]})],
    ),
    ("qwen3_coder", qwen("types", integer="a few"), "", [("types", {"integer": "a few"})]),
    ("qwen3_xml", qwen("other", a="1", b="text"), "", [("other", {"a": 1, "b": "text"})]),
    ("qwen3_coder", "if a <b then <func", "if a <b then <func", []),
)
GLM: tuple[Case, ...] = (
    (
        "glm45",
        """<tool_call>get_current_weather
    <arg_key>city</arg_key>
    <arg_value>Dallas</arg_value>
    <arg_key>state</arg_key>
    <arg_value>TX</arg_value>
    <arg_key>unit</arg_key>
    <arg_value>fahrenheit</arg_value>
    </tool_call>""",
        "",
        [DALLAS],
    ),
    (
        "glm45",
        f"I will help.\n\n{glm(DALLAS[0], **DALLAS[1])}\n\nAlso this.\n\n"
        f"{glm(ORLANDO[0], **ORLANDO[1])}",
        "I will help.\n\nAlso this.",
        [DALLAS, ORLANDO],
    ),
    (
        "glm45",
        f"<think>I want to.</think>\n\nI help.\n{glm('get_weather', city='Beijing', days='2')}",
        "<think>I want to.</think>\n\nI help.",
        [("get_weather", {"city": "Beijing", "days": 2})],
    ),
    ("glm45", "<tool_call>now\n</tool_call>", "", [NOW]),
    ("glm45", "<tool_call>now</tool_call>\n<tool_call>now\n</tool_call>", "", [NOW, NOW]),
    (
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>\u5317\u4eac</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        "",
        [("get_weather", {"city": "\u5317\u4eac", "days": 3})],
    ),
    (
        "glm45",
        glm("get_weather", city="2024-06-27", date="2024-06-27", days="2"),
        "",
        [("get_weather", {"city": "2024-06-27", "date": "2024-06-27", "days": 2})],
    ),
    ("glm45", glm("types", string=CODE), "", [("types", {"string": CODE})]),
    (
        "glm45",
        glm("types", string="null", integer="-7", boolean="true", object='{"a": [1, {}]}'),
        "",
        [("types", {"string": "null", "integer": -7, "boolean": True, "object": {"a": [1, {}]}})],
    ),
    ("glm45", glm("types", string="", array="[]"), "", [("types", {"string": "", "array": []})]),
)
KIMI: tuple[Case, ...] = (
    (
        "kimi_k2",
        "I'll check. <|tool_calls_section_begin|> <|tool_call_begin|>\nfunctions.get_weather:0 "
        '<|tool_call_argument_begin|> {"city": "Beijing"} <|tool_call_end|> <|tool_call_begin|>\n'
        'functions.get_weather:1 <|tool_call_argument_begin|> {"city": "Shanghai"} '
        "<|tool_call_end|> <|tool_calls_section_end|>",
        "I'll check.",
        [("get_weather", {"city": "Beijing"}), ("get_weather", {"city": "Shanghai"})],
    ),
    (
        "kimi_k2",
        kimi('functions.get_weather:0|{"latitude": 34.05}', 'functions.get_news:1|{"a": "b"}'),
        "",
        [("get_weather", {"latitude": 34.05}), ("get_news", {"a": "b"})],
    ),
    ("kimi_k2", kimi("functions.now:0|{}", "functions.now:11|{}", space=" "), "", [NOW, NOW]),
    ("kimi_k2", kimi("now:0|{}") + " Done.", " Done.", [NOW]),
    ("kimi_k2", kimi('functions.math.add:2|{"a": 1}'), "", [("math.add", {"a": 1})]),
    (
        "kimi_k2",
        kimi('functions.html:0|{"html": "<div>}</div>", "text": "<\\u007ctool_call_end>"}'),
        "",
        [("html", {"html": "<div>}</div>", "text": "<|tool_call_end>"})],
    ),
    (
        "kimi_k2",
        kimi('functions.f:0|{\n  "name": "test",\n  "nested": {\n    "key": "value"\n  }\n}'),
        "",
        [("f", {"name": "test", "nested": {"key": "value"}})],
    ),
    ("kimi_k2", "a <|tool_call", "a <|tool_call", []),
)
WRONG = (
    ("qwen3_coder", "<tool_call>\n<function=two words>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=now>\n<parameter=a>\n1\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=now>\n<parameter>\n1\n</parameter>\n</function>"),
    ("qwen3_coder", "<tool_call>\n<function=now>\nwhat</function>"),
    ("qwen3_coder", "<tool_call>\n<function=now>\n<parameter=a>\n1\n</parameter>\n</func"),
    ("qwen3_coder", "<tool_call>\n<function=now" + " " * 300 + "><b>"),
    ("glm45", "<tool_call></tool_call>"),
    ("glm45", "<tool_call> is a mark; a < b"),
    ("glm45", glm("now", a="1").replace("</arg_key>", "")),
    ("glm45", glm("now", a="1").replace("</tool_call>", "")),
    ("glm45", glm("now", a="1").replace("<arg_value>", "and ")),
    ("kimi_k2", kimi('functions.get_weather.0|{"city": "Beijing"}')),
    ("kimi_k2", kimi('functions.get_weather:0|{"city": "Beijing"')),
    ("kimi_k2", kimi("functions.get_weather:0|Beijing")),
)


@pytest.mark.parametrize("case", [*QWEN, *GLM, *KIMI])
def test_calls(case: Case) -> None:
    assert set(check(*case)) <= {"right"}


@pytest.mark.parametrize("family,text", WRONG, ids=range(len(WRONG)))
def test_malformed_calls_are_content(family: str, text: str) -> None:
    assert set(check(family, text, text, [])) <= {"malformed"}


@pytest.mark.parametrize("family,text", [("qwen3_coder", qwen), ("glm45", glm)])
def test_right_calls_beside_malformed_ones(family: str, text: Any) -> None:
    good, wrong = text("now"), "<tool_call><b>wrong</b></tool_call>"
    assert check(family, f"{wrong} {good}", wrong, [NOW]) == ["right"]
    assert check(family, f"{good} {wrong}", f" {wrong}", [NOW]) == ["right"]


@pytest.mark.parametrize("family,text", [("qwen3_coder", qwen), ("glm45", glm)])
def test_each_value_comes_when_it_is_complete(family: str, text: Any) -> None:
    parser = ToolParser(FAMILIES[family], FUNCTIONS)
    whole = "Hi " + text("get_weather", city='A "b"', days="3")
    found = [part for char in whole for part in parser.add(char)]
    assert [part.text for part in found if isinstance(part, CallArguments)] == [
        '{"city": "A \\"b\\""',
        ', "days": 3',
        "}",
    ]
    assert [type(part) for part in found[:4]] == [Text, Text, CallBegin, CallArguments]
    assert isinstance(found[-1], CallEnd)


@pytest.mark.parametrize("family,text", [("qwen3_coder", qwen), ("glm45", glm)])
def test_a_call_that_is_cut_stays_a_call(family: str, text: Any) -> None:
    """With the arguments that are complete; without its name, it is content."""
    whole = text("get_weather", city="Paris", days="3")
    named = whole.index("get_weather") + len("get_weather")
    closed = whole.index("</tool_call>") if family == "glm45" else whole.index("</function>")
    for end in range(1, closed + 11):
        content, calls, ends = parsed(family, [whole[:end]], is_cut=True)
        if not calls:
            assert content == whole[:end] and end < named + 4 and not ends
            continue
        ((name, arguments),) = calls
        assert (name, content, ends) == ("get_weather", "", ["cut"])
        assert json.dumps({"city": "Paris", "days": 3}).startswith(arguments)
