"""Reads requests of /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from onnxpar.llm.chat_template import GIVEN, THOUGHTS
from onnxpar.serve.api_error import quoted
from onnxpar.serve.body import Fields
from onnxpar.serve.settings import Settings
from onnxpar.serve.tools import functions_of, tools_of
from onnxpar.serve.wanted import MOST_LOGPROBS, Wanted, check_model, common, max_tokens

_ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "developer": "system",
}
"""Roles of messages, as chat templates call them."""
_TEXTS = ("text", "input_text", "output_text")
"""Types of parts of messages that are texts."""


def chat_request(fields: Fields, settings: Settings) -> Wanted:
    """Returns what a request wants. Errors: ApiError."""
    check_model(fields, settings)
    _refuse_unsupported(fields)
    functions = functions_of(fields, is_flat=False)
    tools = tools_of(fields, functions)
    messages = messages_of(fields)
    top = fields.whole("top_logprobs", 0, MOST_LOGPROBS)
    wants_logprobs = fields.flag("logprobs")
    if top is not None and not wants_logprobs:
        fields.refuse("top_logprobs", "needs logprobs: true")
    names = ("max_completion_tokens", "max_tokens")
    most = [max_tokens(fields, name, settings) for name in names]
    return Wanted(
        prompts=[messages],
        max_tokens=most[1] if most[0] is None else most[0],
        logprobs=(top or 0) if wants_logprobs else None,
        schema=schema_of(fields.inner("response_format"), is_flat=False),
        chat=template_options(fields, functions if tools else ()),
        tools=tools,
        **common(fields, settings, 1),
    )


def _refuse_unsupported(fields: Fields) -> None:
    """Errors: ApiError for what would change an answer, and is not there."""
    for name, instead in (("functions", "tools"), ("function_call", "tool_choice")):
        if fields.get(name) not in (None, [], "none", "auto"):
            fields.refuse(name, f"is not supported; give {instead}")
    for kind in fields.array("modalities") or ():
        if kind != "text":
            fields.refuse("modalities", f"has {quoted(kind)}; the model writes text")
    if fields.get("audio") is not None:
        fields.refuse("audio", "is not supported; the model writes text")


def messages_of(fields: Fields) -> list[dict[str, Any]]:
    """Returns the messages of the chat, with one text each, and what else templates read."""
    found = fields.array("messages")
    if not found:
        fields.refuse("messages", "is missing or empty; give at least one message")
    return [message_of(fields.item("messages", at, each)) for at, each in enumerate(found)]


def message_of(message: Fields) -> dict[str, Any]:
    """Returns a message as templates read it."""
    role = message.text("role")
    if role not in _ROLES:
        message.refuse("role", f"is {quoted(role)}; it must be one of {', '.join(_ROLES)}")
    calls = [_call(message, at, call) for at, call in enumerate(message.array("tool_calls") or ())]
    if calls and role != "assistant":
        message.refuse("tool_calls", f"is of a message of role {role}; only assistants call tools")
    texts: dict[str, Any] = {"role": _ROLES[role]}
    has_none = calls and message.get("content") is None
    texts["content"] = None if has_none else text_of(message)
    others = {member: message.text(member) for member in ("name", "tool_call_id", *THOUGHTS)}
    texts |= {member: text for member, text in others.items() if text is not None}
    return {**texts, "tool_calls": calls} if calls else texts


def _call(message: Fields, at: int, found: object) -> dict[str, Any]:
    """A call that an assistant has made."""
    call = message.item("tool_calls", at, found)
    function = call.inner("function")
    if function is None:
        call.refuse("function", "is missing; give an object with a name and arguments")
    return called(call.text("id"), function)


def called(id_: str | None, function: Fields) -> dict[str, Any]:
    """Returns a call as templates read it: its arguments are an object, and not its JSON."""
    name, text = function.text("name"), function.text("arguments")
    if name is None:
        function.refuse("name", "is missing; give that of a function")
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        function.refuse("arguments", f"is {quoted(text)}; it must be the JSON text of an object")
    return {"id": id_ or "", "type": "function", "function": {"name": name, "arguments": arguments}}


def text_of(message: Fields, name: str = "content") -> str:
    """Returns the text of a message, which may be in parts."""
    content = message.get(name)
    if isinstance(content, list):
        each = enumerate(content)
        return "\n".join(_part(message, f"{name}[{at}]", part) for at, part in each)
    if content is None:
        message.refuse(name, "is missing; give a text")
    return message.valid_text(name, content)


def _part(message: Fields, name: str, found: object) -> str:
    """The text of a part of a message."""
    if not isinstance(found, dict) or found.get("type") not in _TEXTS:
        message.refuse(name, "is no text; the model reads parts of type text")
    return message.valid_text(name, found.get("text"))


def template_options(fields: Fields, functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what the chat template is given besides the messages."""
    is_continued = fields.flag("continue_final_message")
    begins = fields.flag("add_generation_prompt", default=not is_continued)
    if is_continued and begins:
        fields.refuse("continue_final_message", "begins no answer: leave add_generation_prompt out")
    others = fields.inner("chat_template_kwargs")
    for name in GIVEN:
        if others is not None and others.get(name) is not None:
            others.refuse(name, "is no option of the template; leave it out")
    return {
        "specials": fields.flag("add_special_tokens"),
        "tools": [{"type": "function", "function": function} for function in functions],
        "add_generation_prompt": begins,
        "continue_final_message": is_continued,
        "others": fields.get("chat_template_kwargs") or {},
    }


def schema_of(form: Fields | None, is_flat: bool) -> Mapping[str, Any] | None:
    """Returns the JSON schema that answers must fit; None if any text does.

    is_flat  True if it is a member of the format itself, as in /v1/responses
    """
    if form is None:
        return None
    kind = form.text("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        form.refuse("type", f"is {quoted(kind)}; it must be text, json_object or json_schema")
    inner = form if is_flat else form.inner("json_schema")
    schema = None if inner is None else inner.get("schema")
    if not isinstance(schema, dict):
        form.refuse("schema" if is_flat else "json_schema", "has no schema; give an object")
    return schema
