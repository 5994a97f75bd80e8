"""Turns a chat into the text of a prompt by the model's chat template, a Jinja program, as
Transformers does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from reprlib import repr as shortly
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from onnxpar.base.errors import InputError, ModelError
from onnxpar.base.read_bounded import read_bounded
from onnxpar.llm.messages import Messages

GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
"""The variables that all templates get."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Members of a message that are thoughts before its text. Transformers passes the first one that is
present to templates, under the first two names."""
_IN_MESSAGES = "message['tools']"
"""Text in templates that read tools from messages."""
_ASKS_FOR_NONE = re.compile(r"content\W{0,2} is none")
"""Matches templates that recognize calls by a message without content."""
_CUT = "onnxpar continues here"
"""Marks the end of the message that an answer continues."""


class ChatTemplate:
    """The chat template of a model, which runs in Jinja's sandbox.

    template   the template of chats
    specials   texts of special tokens, by names such as eos_token
    for_tools  the template of chats with tools, if it is another one
    """

    def __init__(
        self, template: str, specials: Mapping[str, str], for_tools: str | None = None
    ) -> None:
        self._template, self._specials = template, specials
        self.for_tools = template if for_tools is None else for_tools

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        others: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Returns the text of a chat. In `messages`, `tool_calls[].function.arguments` are dicts,
        not JSON text.

        tools                   the functions that the model may call, as in requests of OpenAI
        add_generation_prompt   True to begin the answer
        continue_final_message  True if the answer is to continue the last message: the text ends
                                where that message does, and `add_generation_prompt` has no effect
        others                  further variables of templates

        Errors: InputError for messages without a role or a text, or that the template refuses.
        """
        for number, message in enumerate(messages, 1):
            _check_message(message, f"message {number} of the chat")
        template = self.for_tools if tools else self._template
        chat = [_with_thoughts(_with_calls(message, template)) for message in messages]
        if tools and _IN_MESSAGES in template:
            chat = _with_tools(chat, tools)
        if continue_final_message:
            chat = _marked(chat)
        variables = {"tools": tools or None, "documents": None, **self._specials, **others}
        variables["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        try:
            text = _compiled(template).render({**variables, "messages": chat})
            text.encode()
        except jinja2.TemplateError as error:
            raise InputError(f"the chat template refuses the messages: {error}") from None
        except UnicodeEncodeError:
            raise InputError(
                "the chat has half of a surrogate pair, which is no character"
            ) from None
        except Exception as error:  # a template is a program, which may fail in any way
            raise InputError(f"the chat template fails on the messages: {error}") from None
        return _cut(text) if continue_final_message else text


def read_template(folder: Path, config: Mapping[str, Any], name: str = "default") -> str | None:
    """Returns the chat template of a model's folder; if it has several, the one called `name`. None
    if there is none. `config` is tokenizer_config.json. Errors: ModelError if a file cannot be
    read."""
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return read_bounded(file).decode("utf-8", "replace")
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} cannot be read: {error}; copy it again") from None
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {e.get("name"): e.get("template") for e in template if isinstance(e, dict)}
        template = named.get(name)
    return template if isinstance(template, str) else None


def _check_message(message: object, name: str) -> None:
    """Errors: InputError for a message without a role or without text. A message that calls tools
    needs no text. `name` is that of the message in the error."""
    if not isinstance(message, Mapping):
        raise InputError(f"{name} is no object; give it a role and a content")
    role, content = message.get("role"), message.get("content")
    calls_tools = content is None and bool(message.get("tool_calls"))
    checks = (
        ("role", role, isinstance(role, str)),
        ("content", content, calls_tools or _is_text(content)),
    )
    for key, value, is_right in checks:
        if not is_right:
            fault = f"no {key!r}" if value is None else f"{shortly(value)} as {key!r}"
            raise InputError(f"{name} has {fault}; give a text")


def _is_text(content: object) -> bool:
    """True for a text, or a list of parts that each have a "text"."""
    if not isinstance(content, list | tuple):
        return isinstance(content, str)
    return all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content)


def _with_thoughts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message with its thoughts, if any, under both names that templates know:
    "thinking" and "reasoning_content"."""
    thoughts = next((message[name] for name in THOUGHTS if message.get(name) is not None), None)
    if thoughts is None:
        return dict(message)
    return {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _with_calls(message: Mapping[str, Any], template: str) -> Mapping[str, Any]:
    """Returns the message with arguments of its tool calls as `_Arguments`, which templates may use
    as a dict or as text. A missing content becomes empty text, unless the template tests whether it
    is missing."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    content = message.get("content")
    if content is None and not _ASKS_FOR_NONE.search(template):
        content = ""
    return {**message, "content": content, "tool_calls": [_call(call) for call in calls]}


def _with_tools(
    chat: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns the chat with the tools in its system message, as JSON under "tools": templates of
    Phi-4 read them there."""
    functions = _as_json([tool.get("function", tool) for tool in tools])
    first, rest = {"role": "system", "content": ""}, [*chat]
    if chat and chat[0]["role"] == "system":
        first, rest = chat[0], [*chat[1:]]
    return [{**first, "tools": functions}, *rest]


def _call(call: Any) -> Any:
    """Returns a tool call with its arguments as `_Arguments`; they may be in the call itself, or in
    its "function"."""
    if not isinstance(call, Mapping):
        return call
    copy = {**call, "function": _call(call["function"])} if "function" in call else dict(call)
    if isinstance(copy.get("arguments"), Mapping):
        copy["arguments"] = _Arguments(copy["arguments"])
    return copy


class _Arguments(dict[str, Any]):
    """The arguments of a tool call: a dict, as most templates read it. Where a template joins it
    with text, it is written as JSON."""

    def __str__(self) -> str:
        return _as_json(self)

    def __add__(self, text: str) -> str:
        return f"{self}{text}"

    def __radd__(self, text: str) -> str:
        return f"{text}{self}"


def _marked(chat: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the chat with the mark `_CUT` and a blank at the end of its last text; `_cut` finds
    the mark in the rendered text. Errors: InputError if the last message has no text."""
    content = chat[-1].get("content") if chat else None
    if not content:
        raise InputError("the chat has no text in its last message that an answer could continue")
    # A template that cuts white space at the end of a message cuts it behind the mark, too.
    if isinstance(content, str):
        content += f"{_CUT} "
    else:
        content = [*content[:-1], {**content[-1], "text": f"{content[-1]['text']}{_CUT} "}]
    return [*chat[:-1], {**chat[-1], "content": content}]


def _cut(text: str) -> str:
    """Returns the rendered text before the mark `_CUT`, that is, up to the end of the last message.

    `_marked` put a blank behind the mark. If the template has removed the blank, it would have
    removed white space at the end of the message, too, so this function removes it. Errors:
    InputError if the template has dropped the mark.
    """
    before, mark, after = text.rpartition(_CUT)
    if not mark:
        raise InputError("the chat template drops the end of the last message; do not continue it")
    return before if after.startswith(" ") else before.rstrip()


class _Generation(jinja2.ext.Extension):
    """Jinja's block `generation`, with which templates mark what an assistant has written. The
    marks are for training; here the block is only its content."""

    tags = {"generation"}  # noqa: RUF012  (declared so by Jinja)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Returns the content of the block, as a scope of its own."""
        line = next(parser.stream).lineno
        inner = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(inner, lineno=line)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _as_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns a value as JSON text. Unlike in Jinja's own filter, < and > stay as they are."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment() -> ImmutableSandboxedEnvironment:
    """Returns the sandbox in which templates run, with the filters and functions that Transformers
    gives templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _as_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


_ENVIRONMENT = _environment()


@lru_cache(8)
def _compiled(template: str) -> jinja2.Template:
    return _ENVIRONMENT.from_string(template)
