"""Prompts that templates make of chats: those of Hugging Face Transformers."""

from __future__ import annotations

from typing import Any

import pytest

from onnxpar.base.errors import InputError
from onnxpar.llm.chat_template import ChatTemplate

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "hi \u00e9<b>"}
CHAT = [USER, {"role": "assistant", "content": " I say "}]
EACH = "{% for m in messages %}"
TEMPLATES = (  # what each makes of CHAT
    (
        EACH + "[{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}]{% endfor %}",
        "[hi \u00e9<b>][ I say ]",
    ),
    (
        EACH
        + "{%- generation -%}\n  {% set x = 1 %}{{ loop.index }} {{ x }}\n{%- endgeneration %}\n"
        "{{ x is defined }}{% endfor %}",
        "1 1False2 1False",
    ),
    ("{{ messages[0] | tojson }}", '{"role": "user", "content": "hi \u00e9<b>"}'),
    (
        "{{ messages[0] | tojson(ensure_ascii=True, sort_keys=True) }}",
        '{"content": "hi \\u00e9<b>", "role": "user"}',
    ),
    ("{{ [1, {'a': 2}] | tojson(separators=(',', ':')) }}", '[1,{"a":2}]'),
    ("{{ {'a': 2} | tojson(indent=1) }}", '{\n "a": 2\n}'),
    ("{{ {'a': 2} | tojson(True, 1, (',', '='), False) }}", '{\n "a"=2\n}'),
    ("{{ tools is none }}{{ documents is none }}", "TrueTrue"),
    ("{% if tools %}x{% endif %}{{ tools is defined }}", "True"),
    ("{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ pad_token }}", "<s></s>False"),
    ("{{ date_string is defined }}{{ strftime_now('%%') }}", "False%"),
    ("{{ add_generation_prompt }}", "True"),
    (EACH + "{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "user"),
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"add_generation_prompt": False},
    {"continue_final_message": True},
    {"others": {"enable_thinking": False}},
    {"others": {"date_string": "1 May", "bos_token": "[B]"}},
)
CHATML = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content CUT }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not "
    "enable_thinking %}no thoughts{% endif %}{% endif %}{{ date_string }}"
)
PRESERVING, CUTTING = CHATML.replace(" CUT", ""), CHATML.replace("CUT", "| trim")
BEGUN = "<s><user>hi \u00e9<b></><assistant>"
WITH_OPTIONS = (  # what CUTTING makes of CHAT, by option
    BEGUN + "I say</>",
    BEGUN + "I say",
    BEGUN + "I say</><assistant>no thoughts",
    BEGUN.replace("<s>", "[B]") + "I say</><assistant>1 May",
)


def transformers_text(template: str, options: dict[str, Any], chat: Any = CHAT) -> str:
    """The prompt of Transformers."""
    module = pytest.importorskip("transformers.utils.chat_template_utils")
    is_continued = options.get("continue_final_message", False)
    given = {**SPECIALS, "add_generation_prompt": not is_continued, **options}
    given |= given.pop("others", {})
    (text,), _ = module.render_jinja_template([chat], chat_template=template, **given)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("template,wanted", TEMPLATES)
def test_a_template(template: str, wanted: str) -> None:
    assert ChatTemplate(template, SPECIALS).render(CHAT) == wanted


@pytest.mark.parametrize("options,wanted", [*zip(OPTIONS, WITH_OPTIONS, strict=True)])
def test_options(options: dict[str, Any], wanted: str) -> None:
    assert ChatTemplate(CUTTING, SPECIALS).render(CHAT, **options) == wanted


def test_white_space_before_a_continuation_stays_if_the_template_keeps_it() -> None:
    found = ChatTemplate(PRESERVING, SPECIALS).render(CHAT, continue_final_message=True)
    assert found == BEGUN + " I say "


def test_transformers_writes_the_same() -> None:
    for template, _ in TEMPLATES:
        assert ChatTemplate(template, SPECIALS).render(CHAT) == transformers_text(template, {})
    parts = [USER, {"role": "user", "content": [{"type": "text", "text": "a "}]}]
    joined = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}."
    for options in OPTIONS:
        for template in (PRESERVING, CUTTING):
            found = ChatTemplate(template, SPECIALS).render(CHAT, **options)
            assert found == transformers_text(template, options)
        found = ChatTemplate(joined + "{% endfor %}", SPECIALS).render(parts, **options)
        assert found == transformers_text(joined + "{% endfor %}", options, parts)
    for name in ("reasoning_content", "thinking", "reasoning"):
        chat = [USER, {"role": "assistant", "content": "x", name: "I think"}]
        text = "{{ messages[1].reasoning_content }}|{{ messages[1].thinking }}"
        found = ChatTemplate(text, SPECIALS).render(chat)
        assert found == "I think|I think" == transformers_text(text, {}, chat)


TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CALLED = [
    USER,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": "\u00e9", "b": [1, None]}}}],
    },
]
CALL = "{% set c = messages[1].tool_calls[0].function.arguments %}"
WITH_CALLS = (  # what each makes of CALLED
    ("{{ tools | tojson }}", '[{"type": "function", "function": {"name": "f", "parameters": {}}}]'),
    ("{% for t in tools %}{{ t.function.name }}{% endfor %}{{ messages | length }}", "f2"),
    (CALL + "{{ c | tojson }}", '{"a": "\u00e9", "b": [1, null]}'),
    (
        CALL + "{{ c if c is string else c | tojson(indent=1) }}",
        '{\n "a": "\u00e9",\n "b": [\n  1,\n  null\n ]\n}',
    ),
    (
        CALL + "{% for k, v in c | items %}{{ k }}={{ v | tojson }};{% endfor %}",
        'a="\u00e9";b=[1, null];',
    ),
    (
        CALL + "{% for k in c %}{{ k }}{% endfor %}{{ c.a }}{{ c is mapping }}{{ c | length }}",
        "ab\u00e9True2",
    ),
    (
        "{{ messages[1].tool_calls[0] | tojson }}",
        '{"function": {"name": "f", "arguments": {"a": "\u00e9", "b": [1, null]}}}',
    ),
)
AS_TEXT = (  # templates that demand the JSON of the arguments, which Transformers is given as such
    CALL + "{{ 'a' + c + 'b' }}",
    CALL + "{{ c }}",
    CALL + "{{ 'a' ~ c }}",
)


def test_tools_and_calls() -> None:
    for template, wanted in WITH_CALLS:
        assert ChatTemplate(template, SPECIALS).render(CALLED, tools=TOOLS) == wanted
    texts = [ChatTemplate(template, SPECIALS).render(CALLED, tools=TOOLS) for template in AS_TEXT]
    json_ = '{"a": "\u00e9", "b": [1, null]}'
    assert texts == [f"a{json_}b", json_, f"a{json_}"]
    assert ChatTemplate("a", {}, "b").render(CHAT) == "a"
    assert ChatTemplate("a", {}, "b").render(CHAT, tools=TOOLS) == "b"


def test_calls_without_content() -> None:
    """Some templates join the content with texts, some ask whether there is none."""
    without = {"role": "assistant", "tool_calls": CALLED[1]["tool_calls"]}
    for message in (without, {**without, "content": None}):
        chat = [USER, message]
        assert ChatTemplate("{{ '<' + messages[1].content + '>' }}", {}).render(chat) == "<>"
        for content in ("messages[1]['content']", "messages[1].content"):
            template = "{% if " + content + " is none %}none{% endif %}"
            assert ChatTemplate(template, {}).render(chat) == "none"
            assert ChatTemplate(template, {}).render(CALLED) == ""


def test_tools_in_the_system_message() -> None:
    """As the card of Phi-4-mini has them."""
    template = (
        "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and "
        "message['tools'] is not none %}{{ message['content'] + '<|tool|>' + message['tools'] }}"
        "{% endif %}{% endfor %}"
    )
    chat = ChatTemplate(template, {})
    functions = '<|tool|>[{"name": "f", "parameters": {}}]'
    assert chat.render([USER], tools=TOOLS) == functions
    system = {"role": "system", "content": "be brief"}
    assert chat.render([system, USER], tools=TOOLS) == f"be brief{functions}"
    assert chat.render([system, USER]) == ""


def test_transformers_writes_the_same_of_tools() -> None:
    for template, wanted in WITH_CALLS:
        assert transformers_text(template, {"tools": TOOLS}, CALLED) == wanted
    function = {"name": "f", "arguments": '{"a": "\u00e9", "b": [1, null]}'}
    called = [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}]
    for template in AS_TEXT:
        found = ChatTemplate(template, SPECIALS).render(CALLED)
        assert found == transformers_text(template, {}, called)


@pytest.mark.parametrize(
    "chat,template,named",
    [
        ([], PRESERVING, "has no text in its last message that an answer could continue"),
        ([{**USER, "content": ""}], PRESERVING, "has no text in its last message"),
        (CHAT, "{{ messages[0].content }}", "drops the end of the last message"),
        (CHAT, "{{ messages[1].content[:3] }}", "drops the end of the last message"),
    ],
)
def test_what_cannot_be_continued(chat: Any, template: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        ChatTemplate(template, SPECIALS).render(chat, continue_final_message=True)


@pytest.mark.parametrize(
    "template",
    ["{{ 'a' + 1 }}", "{{ 1 / 0 }}", "{{ [1] | tojson(indent=[]) }}", "{{ x | tojson }}"],
)
def test_a_template_that_fails(template: str) -> None:
    with pytest.raises(InputError, match="the chat template fails on the messages: "):
        ChatTemplate(template, SPECIALS).render(CHAT)


def test_what_is_no_text() -> None:
    for others in ({"x": "\ud800"}, {"x": {"y": ["\udfff"]}}):
        with pytest.raises(InputError, match="has half of a surrogate pair"):
            ChatTemplate("{{ x }}{{ x | tojson }}", SPECIALS).render(CHAT, others=others)
